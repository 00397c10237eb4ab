"""Small tables beside the main one: latencies, which guesses were right, which lines won, strata, the loop's cost."""

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
    """Latencies, accepted lengths, draft accuracy by distance, lines won and strata; tables without a row left out.

    Args:
        results: `ModelResult.to_dict()` of each model.
    """
    tables = [_latency(results), _accepted(results), _accuracy(results), _lines(results), *_strata(results)]
    return [table for table in tables if table.rows]


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


def _latency(results: Sequence[Form]) -> Table:
    ranks = ("p50", "p90", "p95", "p99", "worst")
    rows = [
        (
            *_who(result, decoder),
            *(f"{decoder['latency']['answer'][rank]:.3f}" for rank in ranks),
            f"{1000 * decoder['latency']['first_token']['p50']:.1f}",
            *(
                f"{1000 * decoder['latency']['gap'][rank]:.1f}" if decoder["latency"]["gap"] else "–"
                for rank in ("p50", "p99", "worst")
            ),
        )
        for result in results
        for decoder in result["decoders"]
        if "latency" in decoder
    ]
    heads = (*_HEADS, *(f"{rank}, s" for rank in ranks), "first token, ms", "gap p50, ms", "gap p99, ms", "worst, ms")
    return Table("Latency of a request, its first token, and the gaps between commits", heads, rows)


_LENGTHS = ((1, 1), (2, 2), (3, 4), (5, 8), (9, 16), (17, 32), (33, None))
"""Accepted lengths that share a column, tokens."""


def _accepted(results: Sequence[Form]) -> Table:
    found = [(result, decoder) for result in results for decoder in result["decoders"] if decoder["draft_accuracy"]]
    rows = []
    for result, decoder in found:
        counts = {int(length): count for length, count in decoder["accepted"].items()}
        forwards = sum(counts.values())
        shares = [
            sum(count for length, count in counts.items() if low <= length and (high is None or length <= high))
            for low, high in _LENGTHS
        ]
        longest = str(max(counts))
        rows.append((*_who(result, decoder), *(f"{100 * share / forwards:.1f} %" for share in shares), longest))
    heads = tuple(f"{low}" if low == high else f"{low}–{high}" if high else f"{low}+" for low, high in _LENGTHS)
    title = "Accepted lengths: share of forwards that added so many tokens, prefill included"
    return Table(title, (*_HEADS, *heads, "longest"), rows)


STRATA = {
    "response_tokens": "length of the answer, tokens",
    "base_right": "the base model's answer",
    "answer_tokens": "length of the reference answer, tokens",
    "entropy": "mean entropy of the base along its answer, nats",
}


def _strata(results: Sequence[Form]) -> list[Table]:
    """One table for each trait; the library and `ar` take one token a forward in every stratum."""
    tables = []
    for by, title in STRATA.items():
        rows = [
            (
                *_who(result, decoder),
                _range(group),
                str(group["requests"]),
                f"{group['tokens_per_forward']:.2f}",
                "–" if group["tokens_per_second"] is None else f"{group['tokens_per_second']:.0f}",
                "–" if group["speedup"] is None else f"{group['speedup']:.2f}×",
                f"{group['exact']}/{group['of']}",
            )
            for result in results
            for decoder in result["decoders"]
            for group in decoder.get("strata", [])
            if group["by"] == by and decoder["decoder"] not in ("ar", "library")
        ]
        heads = (*_HEADS, "stratum", "requests", "TPF", "TPS", "speed-up", "exact")
        tables.append(Table(f"By {title}", heads, rows))
    return tables


def _range(group: Form) -> str:
    if group["by"] == "base_right":
        return "right" if group["low"] else "wrong"
    low, high = (f"{value:.3g}" if isinstance(value, float) else str(value) for value in (group["low"], group["high"]))
    return low if low == high else f"{low}–{high}"


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
