"""The stage that collects: a model, prompts, and a folder of trajectories."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from jacobi_forcing import provenance
from jacobi_forcing.backbone import Backbone
from jacobi_forcing.config import CollectConfig, ModelConfig, PromptsConfig
from jacobi_forcing.loading import load
from jacobi_forcing.recipe.reporter import Reporter
from jacobi_forcing.schedule import NoiseSchedule
from jacobi_forcing.trajectories.collect import collect
from jacobi_forcing.trajectories.prompts import load_prompts
from jacobi_forcing.trajectories.store import TrajectoryReader


def collect_trajectories(
    model: ModelConfig,
    prompts: PromptsConfig,
    settings: CollectConfig,
    *,
    block_size: int,
    folder: Path,
    reporter: Reporter,
    states: bool = True,
    needed: NoiseSchedule | None = None,
) -> dict[str, Any]:
    """Collect into `folder`, going on where an earlier attempt stopped; without `states` responses alone.

    `needed` is the schedule of the training to come, for `settings.needed_only`.

    Returns:
        The counts of this attempt, the number of trajectories in the folder, and a `summary`.

    Raises:
        JForceError: See `load`, `load_prompts` and `collect`.
    """
    loaded = load(model)
    backbone = Backbone(loaded.model)
    found = load_prompts(prompts, loaded.tokenizer, context_length=backbone.context_length)

    passed: dict[str, int] = {}

    def tell(stage: str, done: int, total: int) -> None:
        # Both passes over a response count half, so that one bar runs from begin to end.
        passed[stage] = done
        reporter.progress(sum(passed.values()) // 2, total, stage)

    report = collect(
        backbone,
        found,
        folder=folder,
        config=settings,
        block_size=block_size,
        vocabulary=loaded.vocabulary if settings.draft_init == "vocabulary" else None,
        provenance=provenance.collect(seed=settings.seed, model=model.name),
        states=states,
        needed=needed,
        on_progress=tell,
    )
    reader = TrajectoryReader(folder)
    counts = report.to_dict()
    sweeps = f", {report.sweeps / report.blocks:.1f} sweeps a block" if report.blocks else ""
    if report.spared:
        sweeps += f" ({report.spared / (report.sweeps + report.spared):.0%} of them spared, at most)"
    what = f"{len(reader)} trajectories of n={block_size}{sweeps}" if states else f"{len(reader)} responses"
    return {**counts, "trajectories": len(reader), "summary": what}
