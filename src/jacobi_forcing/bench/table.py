"""Results as the rows of a table and as sentences. Speed never stands in a row without exactness and quality."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

COLUMNS = (
    "model",
    "decoder",
    "n",
    "solved",
    "repeats",
    "TPF",
    "TPS",
    "speed-up",
    "exact",
    "cost(n)/cost(1)",
)
LEGEND = (
    "TPF: tokens per forward, prefill included. TPS: tokens per second, batch of one, warm-up thrown away. "
    "speed-up: TPS over that of ar on the same weights in the same run. "
    "exact: answers equal to ar's token for token (ar: to the library's generate). "
    "repeats: answers that end in a loop. cost(n)/cost(1): time of a forward of n tokens over that of one."
)


def rows(results: Sequence[Mapping[str, Any]]) -> list[tuple[str, ...]]:
    """One row of text cells for each decoder of each model.

    Args:
        results: `ModelResult.to_dict()` of each model; where it has a `quality` entry of its own (of more answers than
            were timed), the solve and repetition rates are taken from there.
    """
    return [
        _row(result, decoder)
        for result in results
        for decoder in result["decoders"]
        if decoder["tokens_per_forward"] is not None
    ]


def _row(result: Mapping[str, Any], decoder: Mapping[str, Any]) -> tuple[str, ...]:
    quality = result.get("quality") or decoder["quality"]
    solved = quality["solve_rate"]
    size = decoder["block_size"]
    return (
        str(result["label"]),
        str(decoder["decoder"]),
        "–" if size is None else str(size),
        "–" if solved is None else f"{100 * solved:.1f} % of {quality['answers']}",
        f"{100 * quality['repetition_rate']:.1f} %",
        f"{decoder['tokens_per_forward']:.2f}",
        f"{decoder['tokens_per_second']:.0f}"
        if decoder["tokens_per_second"] >= 10
        else f"{decoder['tokens_per_second']:.1f}",
        f"{decoder['speedup']:.2f}×",
        f"{decoder['exact']}/{decoder['of']}",
        "–" if size is None else f"{result['cost'][str(size)]['ratio']:.2f}",
    )


def notes(results: Sequence[Mapping[str, Any]]) -> list[str]:
    """Sentences that belong under the table: what to expect of each decoder, and what went wrong."""
    return [sentence for result in results for sentence in _notes(result)]


def _notes(result: Mapping[str, Any]) -> list[str]:
    said = []
    label = result["label"]
    for decoder in result["decoders"]:
        name, gain, size = decoder["decoder"], decoder["tokens_per_forward"], decoder["block_size"]
        if size is not None:
            ratio = result["cost"][str(size)]["ratio"]
            figures = f"a forward of {size} tokens costs {ratio:.2f} times one of 1 here, and brings {gain:.2f} tokens"
            if ratio >= gain:
                said.append(f"{label}, {name} n={size}: no speed-up is to be expected: {figures}.")
            else:
                said.append(f"{label}, {name} n={size}: about {gain / ratio:.1f}× is to be expected: {figures}.")
        wrong = [mismatch for mismatch in decoder["mismatches"] if not mismatch["near_tie"]]
        ties = len(decoder["mismatches"]) - len(wrong)
        who = f"{label}, {name}" + ("" if size is None else f" n={size}")
        if ties:
            said.append(f"{who}: {ties} answers part from {decoder['exact_against']} at a near tie of two logits.")
        if wrong:
            first = wrong[0]
            said.append(
                f"{who}: {len(wrong)} answers differ from {decoder['exact_against']} beyond rounding, first at token "
                f"{first['position']} of prompt {first['prompt']}. This is a fault."
            )
    return said


def markdown(results: Sequence[Mapping[str, Any]]) -> str:
    """Table, legend and notes as Markdown."""
    lines = ["| " + " | ".join(COLUMNS) + " |", "|" + " --- |" * len(COLUMNS)]
    lines += ["| " + " | ".join(row) + " |" for row in rows(results)]
    return "\n".join([*lines, "", LEGEND, "", *(f"- {note}" for note in notes(results))]).rstrip() + "\n"
