"""An evaluation as the rows of a table and as sentences. Speed never stands in a row without quality."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Form = Mapping[str, Any]
COLUMNS = (
    "task",
    "decoder",
    "n",
    "right",
    "95 % interval",
    "repeats",
    "cut off",
    "exact",
    "TPF",
    "TPS",
    "speed-up",
    "s/item",
    "cost(n)/cost(1)",
)
LEGEND = (
    "right: share of items, with Wilson's interval. cut off: answers that met the token limit. exact: items whose ids "
    "equal ar's token for token. TPF: tokens per forward, prefill included. TPS: tokens per second, warm-up thrown "
    "away. speed-up: TPS over that of ar in the same run. s/item: median wall time. cost(n)/cost(1): time of a forward "
    "of the size that the decoder runs, in brackets if it is not n, over that of one token."
)


def rows(report: Form) -> list[tuple[str, ...]]:
    """A row of text cells for each task and decoder.

    Args:
        report: What `jforce eval` writes.
    """
    return [_row(task, decoder) for task in report["tasks"] for decoder in task["decoders"]]


def _row(task: Form, decoder: Form) -> tuple[str, ...]:
    quality, paired = decoder["quality"], decoder["paired"]
    low, high = quality["solve_rate_interval"]
    size, slots, cost = decoder["block_size"], decoder["median_slots"], decoder["cost_ratio"]
    rate = decoder["tokens_per_second"]
    return (
        task["task"],
        decoder["decoder"] + (f" ({decoder['label']})" if decoder["label"] else ""),
        "–" if size is None else str(size),
        f"{100 * quality['solve_rate']:.1f} % of {quality['answers']}",
        f"{100 * low:.1f}–{100 * high:.1f} %",
        f"{100 * quality['repetition_rate']:.1f} %",
        f"{100 * (1 - quality['finished_rate']):.1f} %",
        "–" if paired is None else f"{paired['exact']}/{paired['of']}",
        f"{decoder['tokens_per_forward']:.2f}",
        f"{rate:.0f}" if rate >= 10 else f"{rate:.1f}",
        "–" if decoder["speedup"] is None else f"{decoder['speedup']:.2f}×",
        f"{decoder['median_seconds']:.2f}",
        "–" if cost is None else f"{cost:.2f}" + ("" if slots == size else f" (n={slots})"),
    )


def notes(report: Form) -> list[str]:
    """What belongs under the table: pairs with `ar`, items that differ, what stopped code, the walls around it."""
    said = []
    for task in report["tasks"]:
        for decoder in task["decoders"]:
            who = f"{task['task']}, {decoder['decoder']}" + (f" {decoder['label']}" if decoder["label"] else "")
            said += [f"{who}: {text}" for text in [*_paired(decoder), *_failures(decoder)]]
        if task["isolation"] is not None:
            said.append(f"{task['task']}: {task['isolation']['sentence']}.")
    return said


def _paired(decoder: Form) -> list[str]:
    paired = decoder["paired"]
    if paired is None:
        return []
    only, other, p = paired["only_this"], paired["only_ar"], paired["mcnemar_p"]
    low, high = paired["difference_interval"]
    texts = [
        f"{only} items right that ar has wrong, {other} the other way round (exact McNemar p = {p:.3g}; difference "
        f"{100 * paired['difference']:+.1f} points, bootstrap {100 * low:+.1f} to {100 * high:+.1f})."
        if only or other
        else "right and wrong on the same items as ar."
    ]
    if paired["differ"]:
        items = ", ".join(map(str, paired["differ"][:10])) + (", …" if len(paired["differ"]) > 10 else "")
        texts.append(
            f"ids differ from ar's on items {items}: near ties {paired['near_ties']}, faults {paired['faults']}."
        )
    cost, reached = decoder["cost_ratio"], decoder["tokens_per_forward"]
    if cost is not None and reached <= cost:
        texts.append(f"no speed-up is to be expected: a forward costs {cost:.2f} and gives {reached:.2f} tokens.")
    return texts


def _failures(decoder: Form) -> list[str]:
    found = {name: count for name, count in decoder["failures"].items() if name != "failed"}
    return [f"code was stopped: {', '.join(f'{name} {count}' for name, count in found.items())}."] if found else []
