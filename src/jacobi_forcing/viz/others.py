"""Parts of a report about evaluations, the device and the search for settings."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from jacobi_forcing.viz import figures
from jacobi_forcing.viz.gather import Found
from jacobi_forcing.viz.parts import Block, Section, Table, Text

Form = Mapping[str, Any]


def other_sections(found: Found) -> tuple[list[Section], list[str]]:
    """Parts about what there is, and what is missing."""
    given, lacking = [], []
    for kind, (title, make, missing) in _PARTS.items():
        blocks: list[Block] = []
        for number, (name, value) in enumerate(found.of(kind)):
            blocks += make(name, value, f"{kind}{number}")
        if blocks:
            given.append(Section(title, blocks))
        elif missing:
            lacking.append(missing)
    return given, lacking


def _evaluation(name: str, report: Form, mark: str) -> list[Block]:
    lines = [
        (
            task["task"],
            decoder["decoder"] + (f" ({decoder['label']})" if decoder["label"] else ""),
            _count(decoder["block_size"]),
            _right(decoder["quality"]),
            f"{100 * decoder['quality']['repetition_rate']:.1f} %",
            "–" if decoder["paired"] is None else f"{decoder['paired']['exact']}/{decoder['paired']['of']}",
            f"{decoder['tokens_per_forward']:.2f}",
            f"{decoder['tokens_per_second']:.1f}",
            "–" if decoder["speedup"] is None else f"{decoder['speedup']:.2f}×",
            _pair(decoder["paired"]),
        )
        for task in report["tasks"]
        for decoder in task["decoders"]
    ]
    heads = ("task", "decoder", "n", "right", "repeats", "exact", "TPF", "TPS", "speed-up", "against ar, item by item")
    walls = {task["isolation"]["sentence"] for task in report["tasks"] if task["isolation"] is not None}
    where = f"{name}: {report['model']}, {report['dtype']} on {report['device']}, {report['fewshot']} shots."
    return [Text(where), Table(heads, lines), *(Text(f"Generated code ran so: {wall}.") for wall in sorted(walls))]


def _right(quality: Form) -> str:
    if quality["solve_rate"] is None:
        return "not graded"
    low, high = quality["solve_rate_interval"]
    return f"{100 * quality['solve_rate']:.1f} % of {quality['answers']} ({100 * low:.1f} to {100 * high:.1f})"


def _pair(paired: Form | None) -> str:
    if paired is None:
        return "–"
    return f"+{paired['only_this']} −{paired['only_ar']}, p = {paired['mcnemar_p']:.2g}"


def _profile(name: str, report: Form, mark: str) -> list[Block]:
    contexts = {f"context {entry['context']}": entry["points"] for entry in report["contexts"]}
    shown = figures.over_tokens(
        {label: [(p["tokens"], 1000 * p["seconds"]) for p in points] for label, points in contexts.items()},
        mark + "ms",
        "Latency of a forward pass",
        "milliseconds",
    )
    ratio = figures.over_tokens(
        {label: [(p["tokens"], p["ratio"]) for p in points] for label, points in contexts.items()},
        mark + "cost",
        "What a decoder's TPF has to exceed to pay",
        "cost(n)/cost(1)",
    )
    knees = ", ".join(f"{entry['knee']['tokens']} tokens at context {entry['context']}" for entry in report["contexts"])
    advice = "; ".join(
        f"{one['decoder']} n={one['block_size']}"
        + (f" with {one['candidates']} candidates" if "candidates" in one else "")
        + f" ({one['tokens']} tokens a forward)"
        for one in report["recommended"]["settings"]
    )
    limits = report["limits"]
    speed = f"{limits['bytes_per_second'] / 1e9:.1f} GB/s and computes {limits['flops_per_second'] / 1e9:.1f} GFLOP/s"
    said = (
        f"{name}: {report['label']} on {report['device_name']}, which reads {speed} in {report['dtype']}. A forward "
        f"costs no more than {100 * report['tolerance']:.0f} % over that of one token up to: {knees}."
        + (f" Settings that fit: {advice}." if advice else "")
    )
    return [Text(said), *(figure for figure in (shown, ratio) if figure is not None)]


def _tune(name: str, report: Form, mark: str) -> list[Block]:
    ranked = sorted(report["settings"], key=lambda one: -float(one["tokens_per_second"]))
    quality = report["quality"]
    worth = f"{_right(quality)}, {100 * quality['repetition_rate']:.1f} % end in a loop"
    lines = [
        (
            one["decoder"],
            one["label"] or "–",
            _count(one["block_size"]),
            f"{one['tokens_per_forward']:.2f}",
            f"{one['tokens_per_second']:.1f}",
            f"{one['speedup']:.2f}×",
            f"{one['exact']}/{one['of']}",
        )
        for one in ranked
    ]
    curves: dict[str, dict[int, float]] = {}
    for one in ranked:
        if one["block_size"] is not None:
            curves.setdefault(one["decoder"], {}).setdefault(int(one["block_size"]), float(one["tokens_per_second"]))
    shown = figures.over_tokens(
        {label: sorted(points.items()) for label, points in curves.items()},
        mark + "tps",
        "Best setting at each block size",
        "tokens per second (TPS)",
        along="block size n (tokens)",
    )
    said = f"{name}: {report['label']} on {report['device_name']}, {report['prompts']} prompts. ar's answers, {worth}."
    heads = ("decoder", "settings", "n", "TPF", "TPS", "speed-up", "exact")
    table = Table(heads, lines, f"All {len(lines)} settings, the fastest first; the answers are ar's, {worth}")
    return [Text(said), *([shown] if shown is not None else []), table]


def _ablation(name: str, report: Form, mark: str) -> list[Block]:
    decoders = list(report["base"]["decoders"])
    heads = ("variant", "seeds", *(f"TPF, {decoder}" for decoder in decoders), "solved", "repeats", "exact", "tokens")
    lines = [
        (
            str(one["variant"]),
            str(len(one["seeds"])),
            *(_spread(one["tokens_per_forward"][decoder]) for decoder in decoders),
            _spread(one["solve_rate"], 100, " %"),
            _spread(one["repetition_rate"], 100, " %"),
            f"{one['exact']}/{one['of']}",
            "–" if one["train_tokens"] is None else f"{one['train_tokens']['mean']:,.0f}",
        )
        for one in report["variants"]
    ]
    left = f" Runs still to be made: {report['unfinished']}." if report["unfinished"] else ""
    return [Text(f"{name}: mean and standard deviation over seeds; tokens: trained on.{left}"), Table(heads, lines)]


def _spread(value: Form | None, factor: float = 1, unit: str = "") -> str:
    if value is None:
        return "–"
    spread = "" if value["sd"] is None else f" ± {factor * value['sd']:.2f}"
    return f"{factor * value['mean']:.2f}{spread}{unit}"


def _count(size: int | None) -> str:
    return "–" if size is None else str(size)


_Make = Callable[[str, Form, str], list[Block]]
_PARTS: Mapping[str, tuple[str, _Make, str]] = {
    "ablation": ("Ablations", _ablation, ""),
    "eval": ("Tasks", _evaluation, "Tasks were not graded: `jforce eval --output`."),
    "profile": ("What this device does", _profile, "This device was not profiled: `jforce profile --output`."),
    "tune": ("The search for settings", _tune, "Settings were not searched for: `jforce tune --output`."),
}
