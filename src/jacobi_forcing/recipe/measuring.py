"""The stage that measures: quality over all held-out prompts, and speed over some of them, on the same weights."""

from __future__ import annotations

from typing import Any

from jacobi_forcing import provenance
from jacobi_forcing.backbone import Backbone
from jacobi_forcing.bench.contestants import LIBRARY
from jacobi_forcing.bench.speed import bench
from jacobi_forcing.config import EvaluationConfig, ModelConfig
from jacobi_forcing.evaluate.quality import answers, quality_of
from jacobi_forcing.loading import load
from jacobi_forcing.recipe.reporter import Reporter
from jacobi_forcing.trajectories.prompts import load_prompts


def measure_model(model: ModelConfig, settings: EvaluationConfig, *, label: str, reporter: Reporter) -> dict[str, Any]:
    """Measure one model.

    Returns:
        `ModelResult.to_dict()`, with `quality` over all prompts and a `summary`.

    Raises:
        JForceError: See `load`, `load_prompts`, `quality_of` and `bench`.
    """
    loaded = load(model)
    backbone = Backbone(loaded.model)
    prompts = load_prompts(settings.prompts, loaded.tokenizer, context_length=backbone.context_length)
    responses, _ = answers(
        backbone,
        prompts,
        max_new_tokens=settings.max_new_tokens,
        batch_size=settings.batch_size,
        on_progress=lambda done, total: reporter.progress(done, total, "answers"),
    )
    quality = quality_of(responses, prompts, loaded.tokenizer, backbone.eos_ids, settings.task)
    result = bench(
        loaded,
        prompts[: settings.speed_prompts],
        decode=settings.decode,
        max_new_tokens=settings.max_new_tokens,
        task=settings.task,
        label=label,
        on_progress=lambda done, total: reporter.progress(done, total, "timed answers"),
    ).to_dict()
    ours = [decoder for decoder in result["decoders"] if decoder["decoder"] != LIBRARY]
    best = max(ours, key=lambda decoder: decoder["speedup"])
    solved = "" if quality.solved is None else f"{100 * quality.solved.share:.1f} % solved, "
    size = f" n={best['block_size']}" if best["block_size"] else ""
    summary = f"{solved}at best {best['speedup']:.2f}× with {best['decoder']}{size}"
    # The name may be a path of this machine; reports are meant to be passed on.
    result["model"] = provenance.portable(model.name)
    return {**result, "quality": quality.to_dict(), "summary": summary}
