"""Small tables beside the main one: which guesses were right, which lines won, what the loop costs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

Form = Mapping[str, Any]


class Table(NamedTuple):
    """A table of text cells."""

    title: str
    columns: tuple[str, ...]
    rows: list[tuple[str, ...]]


def details(results: Sequence[Form]) -> list[Table]:
    """Draft accuracy by distance and lines won, of all decoders of ours that draft; tables without a row left out.

    Args:
        results: `ModelResult.to_dict()` of each model.
    """
    return [table for table in (_accuracy(results), _lines(results)) if table.rows]


def overhead(results: Sequence[Form]) -> list[Table]:
    """What the decoding loop costs beside the bare forwards, if it was measured."""
    rows = [
        (
            *_who(result, entry),
            str(entry["sweeps"]),
            f"{1000 * entry['sweep_seconds']:.2f}",
            f"{1000 * entry['forward_seconds']:.2f}",
            f"{entry['ratio']:.3f}",
            f"{entry['ratio_in_loop']:.3f}",
        )
        for result in results
        for entry in result.get("overhead", [])
    ]
    heads = (*_HEADS, "sweeps", "ms a sweep", "ms a bare forward", "sweep/forward", "same, timed in the loop")
    return [Table("Overhead of the decoding loop", heads, rows)] if rows else []


_HEADS = ("model", "decoder", "settings", "n")


def _who(result: Form, decoder: Form) -> tuple[str, ...]:
    size, batch = decoder["block_size"], decoder.get("batch_size", 1)
    settings = [text for text in (decoder["label"], f"batch={batch}" if batch > 1 else "") if text]
    return result["label"], decoder["decoder"], ", ".join(settings) or "–", "–" if size is None else str(size)


def _accuracy(results: Sequence[Form]) -> Table:
    found = [(result, decoder) for result in results for decoder in result["decoders"] if decoder["draft_accuracy"]]
    longest = max((len(decoder["draft_accuracy"]) for _, decoder in found), default=0)
    distances = [1 << power for power in range(longest.bit_length())]
    rows = [
        (
            *_who(result, decoder),
            *(
                f"{100 * decoder['draft_accuracy'][distance - 1]:.0f} %"
                if distance <= len(decoder["draft_accuracy"])
                else "–"
                for distance in distances
            ),
        )
        for result, decoder in found
    ]
    title = "Draft accuracy: share of right guesses by distance behind the accepted text"
    return Table(title, (*_HEADS, *(f"+{distance}" for distance in distances)), rows)


def _lines(results: Sequence[Form]) -> Table:
    found = [(result, decoder) for result in results for decoder in result["decoders"] if decoder["draft_accuracy"]]
    most = max((int(line) for _, decoder in found for line in decoder["lines_won"]), default=0)
    rows = []
    for result, decoder in found:
        won = decoder["lines_won"]
        forwards = sum(won.values())
        shares = (f"{100 * won.get(str(line), 0) / forwards:.1f} %" for line in range(most + 1))
        rows.append((*_who(result, decoder), f"{decoder['mean_slots']:.1f}", *shares))
    heads = ("mean slots", "draft", *(f"candidate {line}" for line in range(1, most + 1)))
    return Table("Lines won: share of forwards by the line of which most was accepted", (*_HEADS, *heads), rows)
