"""From runs to one table: mean and spread over seeds, quality beside speed, and what each variant took."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Any

Figure = dict[str, Any]
"""`mean`, `sd` (sample standard deviation, null for a single run), `low`, `high` and the `values` behind them."""


def summarise(variants: Sequence[str], runs: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Figures of each variant over its seeds; a variant without a finished run is left out.

    Args:
        variants: Their names, in order.
        runs: Finished runs.
    """
    return [_variant(name, own) for name in variants if (own := [run for run in runs if run["variant"] == name])]


def _variant(name: str, runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    def over(value: Callable[[dict[str, Any]], float | None]) -> Figure | None:
        return figure([number for run in runs if (number := value(run)) is not None])

    decoders = runs[0]["decoders"]
    return {
        "variant": name,
        "seeds": [run["seed"] for run in runs],
        "tokens_per_forward": {
            decoder: over(lambda run, decoder=decoder: run["decoders"][decoder]["tokens_per_forward"])  # type: ignore[misc]  # a default binds the name of this turn
            for decoder in decoders
        },
        "exact": sum(one["exact"] for run in runs for one in run["decoders"].values()),
        "of": sum(one["of"] for run in runs for one in run["decoders"].values()),
        "solve_rate": over(lambda run: run["quality"]["solve_rate"]),
        "repetition_rate": over(lambda run: run["quality"]["repetition_rate"]),
        **{
            name: over(lambda run, name=name: run[name])  # type: ignore[misc]  # as above
            for name in ("steps", "train_tokens", "collect_core_seconds", "train_core_seconds")
        },
    }


def figure(values: Sequence[float]) -> Figure | None:
    """Mean and spread of a figure over seeds; None where there is none."""
    if not values:
        return None
    return {
        "mean": round(statistics.fmean(values), 4),
        "sd": round(statistics.stdev(values), 4) if len(values) > 1 else None,
        "low": min(values),
        "high": max(values),
        "values": list(values),
    }


def columns(report: dict[str, Any]) -> list[str]:
    """The heads of the table."""
    decoders = [f"TPF, {name}" for name in report["base"]["decoders"]]
    return ["variant", "seeds", *decoders, "solved", "repeats", "exact", *("steps", "tokens", "collect", "train")]


def rows(report: dict[str, Any]) -> list[list[str]]:
    """The lines of the table: the base model, then the variants."""
    base = {**report["base"], "variant": "base", "seed": None, "steps": None, "train_tokens": None}
    base |= {"collect_core_seconds": None, "train_core_seconds": None}
    return [_row(one) for one in [*summarise(["base"], [base]), *report["variants"]]]


def _row(one: dict[str, Any]) -> list[str]:
    return [
        one["variant"],
        "–" if one["variant"] == "base" else str(len(one["seeds"])),
        *(_text(value, 2) for value in one["tokens_per_forward"].values()),
        _text(one["solve_rate"], 1, 100, " %"),
        _text(one["repetition_rate"], 1, 100, " %"),
        f"{one['exact']}/{one['of']}",
        _text(one["steps"], 0),
        _text(one["train_tokens"], 0, 1e-3, " k"),
        _text(one["collect_core_seconds"], 0, 1, " s"),
        _text(one["train_core_seconds"], 0, 1, " s"),
    ]


def _text(value: Figure | None, digits: int, factor: float = 1, unit: str = "") -> str:
    if value is None:
        return "–"
    spread = value["sd"]
    around = f" ± {factor * spread:.{digits}f}" if spread is not None and round(factor * spread, digits) else ""
    return f"{factor * value['mean']:.{digits}f}{around}{unit}"


LEGEND = (
    "mean ± sample standard deviation over seeds; TPF: tokens per forward; exact: answers of the parallel decoders "
    "that equal greedy ones; tokens: packed tokens trained on (prompt, noisy and clean); collect, train: core-seconds"
)


def markdown(report: dict[str, Any]) -> str:
    """The table as Markdown, with a legend."""
    heads = columns(report)
    lines = [heads, ["---"] * len(heads), *rows(report)]
    table = "".join(f"| {' | '.join(line)} |\n" for line in lines)
    left = f"\n{report['unfinished']} runs are not done yet.\n" if report["unfinished"] else ""
    return f"{table}{left}\n{LEGEND[0].upper()}{LEGEND[1:]}.\n"
