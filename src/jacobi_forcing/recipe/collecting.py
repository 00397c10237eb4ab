"""The stage that collects: a model, prompts, and a folder of trajectories."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jacobi_forcing import provenance
from jacobi_forcing.backbone import Backbone
from jacobi_forcing.config import CollectConfig, ModelConfig, PromptsConfig, RoundConfig
from jacobi_forcing.errors import ConfigError
from jacobi_forcing.files import link_folder, read_json
from jacobi_forcing.loading import load
from jacobi_forcing.processes import is_main
from jacobi_forcing.recipe.filters import make_filters
from jacobi_forcing.recipe.reporter import Reporter
from jacobi_forcing.recipe.stages import Stage, perform
from jacobi_forcing.schedule import NoiseSchedule
from jacobi_forcing.trajectories.collect import collect
from jacobi_forcing.trajectories.filters import count_filtered, kept_of
from jacobi_forcing.trajectories.given import read_responses
from jacobi_forcing.trajectories.prompts import load_prompts
from jacobi_forcing.trajectories.report import CollectReport
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
    tokenizer, backbone = loaded.tokenizer, Backbone(loaded.model)
    found = load_prompts(prompts, tokenizer, context_length=backbone.context_length)
    given = None
    if settings.responses is not None:
        given = read_responses(settings.responses, found, tokenizer, prompts, backbone.eos_ids)

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
        given=given,
        filters=make_filters(settings, prompts, found, tokenizer, backbone.eos_ids),
        make_backbone=functools.partial(load_backbone, model),
        on_progress=tell,
    )
    reader = TrajectoryReader(folder)
    what = _summary(reader, report, block_size, states)
    if settings.filters:
        what += f"; {kept_of(reader.manifest, settings.filters)}"
    return {
        **report.to_dict(),
        "trajectories": len(reader),
        "filtered_by": count_filtered(reader.manifest),
        "summary": what,
    }


def load_backbone(model: ModelConfig) -> Backbone:
    """A model in the shape that collecting takes; for processes that load their own."""
    return Backbone(load(model).model)


def _summary(reader: TrajectoryReader, report: CollectReport, block_size: int, states: bool) -> str:
    sweeps = f", {report.sweeps / report.blocks:.1f} sweeps a block" if report.blocks else ""
    if report.spared:
        sweeps += f" ({report.spared / (report.sweeps + report.spared):.0%} of them spared, at most)"
    what = f"{len(reader)} trajectories of n={block_size}{sweeps}" if states else f"{len(reader)} responses"
    if report.checked:
        ties = f", {report.response_near_ties} near ties" if report.response_near_ties else ""
        what += f"; {report.checked} given responses compared with the model{ties}"
    return what


class _Part(Reporter):
    """Passes on what happens within a stage, and not that a stage begins or ends."""

    def __init__(self, reporter: Reporter) -> None:
        self.progress, self.note = reporter.progress, reporter.note  # type: ignore[method-assign]  # passed through


def collect_once(
    pool: Path, stage: Stage, collecting: Callable[..., dict[str, Any]], place: Path, reporter: Reporter
) -> dict[str, Any]:
    """Collect for several runs: the first does it, the others are given the same files.

    Args:
        pool: Folder that the runs share; a collection lies in it under the key of its stage.
        stage: What is collected.
        collecting: `collect_trajectories` but for `folder` and `reporter`.
        place: Where this run expects its trajectories.
        reporter: Told about progress.

    Returns:
        The result of the collecting, its seconds too, whoever did it.
    """
    folder = pool / stage.key[:16]
    part = _Part(reporter)
    result = perform(folder, stage, lambda: collecting(folder=folder / "trajectories", reporter=part), part)
    if is_main():
        link_folder(folder / "trajectories", place)
    return result


def less_collecting(settings: RoundConfig, marker: Path) -> RoundConfig:
    """A round with a budget of core-seconds less those that its collecting took; any other round as it is.

    Args:
        settings: The round.
        marker: Of its collecting.

    Raises:
        ConfigError: Nothing is left.
    """
    if settings.core_seconds is None:
        return settings
    taken = read_json(marker)["result"]["core_seconds"]
    if taken >= settings.core_seconds:
        raise ConfigError(
            "Collecting took all core-seconds of the round",
            seen=f"{taken} of {settings.core_seconds}",
            remedy="raise core_seconds, or collect fewer prompts (prompts_limit)",
        )
    return dataclasses.replace(settings, core_seconds=settings.core_seconds - taken)
