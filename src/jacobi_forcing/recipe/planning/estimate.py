"""From costs to a table: memory, time, disk and device-hours of every stage, and the break-even."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from jacobi_forcing import provenance
from jacobi_forcing.config import RecipeConfig, RoundConfig
from jacobi_forcing.errors import ConfigError
from jacobi_forcing.formats import stamped
from jacobi_forcing.recipe.planning.arithmetic import Hardware, computed_costs
from jacobi_forcing.recipe.planning.costs import Costs, TrainCost
from jacobi_forcing.recipe.reporter import Reporter

TPF = 3.0
"""Tokens per forward that a trained model is expected to have, where nobody says otherwise."""
SECONDS = 60.0
"""How long each kind of measurement may take, about."""
CHECKPOINTS = 3
"""Checkpoints on disk at the worst moment: two are kept while the next one is written."""


def estimate_recipe(
    recipe: RecipeConfig,
    *,
    measure: bool = True,
    hardware: Hardware | None = None,
    tpf: float = TPF,
    speedup: float | None = None,
    budget: float = SECONDS,
    reporter: Reporter | None = None,
) -> dict[str, Any]:
    """Estimate what a recipe will cost, without starting it.

    Args:
        recipe: The settings.
        measure: Time a few prompts and steps on this machine; else reckon from the model's config alone.
        hardware: The machine that is reckoned with where nothing is measured.
        tpf: Tokens per forward that is expected of the trained model.
        speedup: Speed-up in wall time that is expected; by default `tpf` over the cost of a forward with a draft.
        budget: Seconds that each kind of measurement may take.
        reporter: Told what is being measured.

    Returns:
        `stages` in order (`stage`, `seconds`, `device_hours`, `memory_bytes`, `disk_bytes`, `disk_peak_bytes`,
        `detail`), `total`, `break_even`, `assumptions` and provenance.

    Raises:
        ConfigError: A number is out of range.
        JForceError: Whatever a stage raises, or a model that cannot be read.
    """
    for name, value in (("tpf", tpf), ("speedup", speedup), ("budget", budget)):
        if value is not None and not (math.isfinite(value) and value > 0):
            raise ConfigError(f"'{name}' is out of range", seen=value, expected="a finite number above 0")
    if measure:
        from jacobi_forcing.recipe.planning.microrun import MicroRun

        costs = MicroRun(recipe, budget, reporter or Reporter()).costs()
    else:
        costs = computed_costs(recipe, hardware or Hardware())
    stages = list(_stages(recipe, costs))
    return stamped(
        "plan",
        {
            "measured": measure,
            "device": costs.device,
            "stages": stages,
            "total": _total(stages),
            "break_even": break_even(stages, costs, tpf, speedup),
            "assumptions": list(costs.assumptions),
            "recipe": recipe.to_dict(),
            "provenance": provenance.collect(seed=recipe.seed),
        },
    )


def _stages(recipe: RecipeConfig, costs: Costs) -> Iterator[dict[str, Any]]:
    evaluation = recipe.evaluation
    if evaluation is not None and evaluation.base:
        yield _measuring(recipe, costs, "evaluate-base")
    for index, settings in enumerate(recipe.rounds):
        number, collect, train = index + 1, costs.collect[index], costs.train[index]
        seconds = collect.fixed_seconds + collect.responses * collect.seconds_per_response
        disk = collect.responses * collect.bytes_per_response
        yield _row(
            f"collect-{number}",
            seconds,
            collect.memory,
            disk,
            disk,
            f"{collect.responses} responses × {collect.tokens_per_response:.0f} tokens, "
            f"{collect.seconds_per_response:.3g} s each",
        )
        steps = _steps(settings, train)
        saves = steps // settings.save_steps
        probes = 0
        if evaluation is not None and evaluation.probe_steps is not None:
            probes = (1 + math.ceil(steps / evaluation.probe_steps)) * evaluation.probe_prompts
        seconds = train.fixed_seconds + steps * train.seconds_per_step
        seconds += saves * train.checkpoint_seconds + probes * costs.measure.seconds_per_answer
        tokens = f" of {train.tokens_per_step:.0f} tokens" if train.tokens_per_step else ""
        yield _row(
            f"train-{number}",
            seconds,
            train.memory,
            train.model_bytes,
            train.model_bytes + CHECKPOINTS * train.checkpoint_bytes,
            f"{steps} steps{tokens}, {train.seconds_per_step:.3g} s each",
        )
        last = number == len(recipe.rounds)
        if evaluation is not None and (last or evaluation.every_round):
            yield _measuring(recipe, costs, f"evaluate-{number}")


def _steps(settings: RoundConfig, cost: TrainCost) -> int:
    """Steps of a round, foreseen where it has another kind of budget; collecting is taken to cost nothing then."""
    if settings.train_tokens is not None:
        return max(1, round(settings.train_tokens / (cost.tokens_per_step or 1)))
    if settings.core_seconds is not None:
        return max(1, round(settings.core_seconds / cost.seconds_per_step))
    return settings.steps or 1


def _measuring(recipe: RecipeConfig, costs: Costs, name: str) -> dict[str, Any]:
    assert recipe.evaluation is not None
    settings, cost = recipe.evaluation, costs.measure
    graded = settings.prompts.limit or settings.speed_prompts or 0
    timed = graded if settings.speed_prompts is None else min(graded, settings.speed_prompts)
    seconds = cost.fixed_seconds + graded * cost.seconds_per_answer + timed * cost.seconds_per_timed
    detail = f"{graded} answers graded, {timed} timed with {len(settings.decode) + 2} decoders"
    return _row(name, seconds, cost.memory, 0.0, 0.0, detail)


def _row(stage: str, seconds: float, memory: float, disk: float, peak: float, detail: str) -> dict[str, Any]:
    return {
        "stage": stage,
        "seconds": round(seconds, 2),
        "device_hours": round(seconds / 3600, 5),
        "memory_bytes": round(memory),
        "disk_bytes": round(disk),
        "disk_peak_bytes": round(peak),
        "detail": detail,
    }


def _total(stages: list[dict[str, Any]]) -> dict[str, Any]:
    kept, most = 0, 0
    for stage in stages:
        most = max(most, kept + stage["disk_peak_bytes"])
        kept += stage["disk_bytes"]
    seconds = sum(stage["seconds"] for stage in stages)
    return {
        "seconds": round(seconds, 2),
        "device_hours": round(seconds / 3600, 5),
        "memory_bytes": max(stage["memory_bytes"] for stage in stages),
        "disk_bytes": kept,
        "disk_peak_bytes": most,
    }


def break_even(stages: list[dict[str, Any]], costs: Costs, tpf: float, speedup: float | None) -> dict[str, Any]:
    """How many generated tokens pay for collecting and training, in device seconds, one answer at a time.

    tokens = C / (a (1 - 1/s)): C seconds of collecting and training, a seconds a token of plain decoding, s the
    speed-up in wall time, which is TPF / cost ratio unless it is given.

    Returns:
        `tokens`, None where training never pays (s <= 1), the inputs, and the formula with them filled in.
    """
    cost = sum(stage["seconds"] for stage in stages if not stage["stage"].startswith("evaluate"))
    ratio, pace = costs.measure.cost_ratio, costs.measure.ar_seconds_per_token
    gain = tpf / ratio if speedup is None else speedup
    tokens = math.ceil(cost / (pace * (1 - 1 / gain))) if gain > 1 else None
    source = f"TPF {tpf:g} / cost ratio {ratio:.2f}" if speedup is None else "as given"
    filled = f"{cost:.4g} s / ({pace:.3g} s × (1 − 1/{gain:.2f}))"
    return {
        "tokens": tokens,
        "training_seconds": round(cost, 2),
        "ar_seconds_per_token": pace,
        "tpf": tpf,
        "cost_ratio": round(ratio, 4),
        "speedup": round(gain, 4),
        "formula": f"{filled}, s = {gain:.2f} ({source})",
    }
