"""Results as the rows of a table and as sentences. Speed never stands in a row without exactness and quality."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

Form = Mapping[str, Any]
COLUMNS = (
    "model",
    "decoder",
    "settings",
    "batch",
    "n",
    "solved",
    "in parts",
    "repeats",
    "TPF",
    "TPS",
    "speed-up",
    "exact",
    "cost(n)/cost(1)",
)
_PLAIN = {"settings": "–", "batch": "1", "in parts": "–"}
"""Columns that are left out where all rows say this."""
LEGEND = (
    "TPF: tokens per forward of the model, prefill included. TPS: tokens per second, all rows of a batch together, "
    "warm-up thrown away. speed-up: TPS over that of ar on the same weights and batches in the same run. "
    "exact: answers equal to ar's token for token (ar: to the library's generate). "
    "repeats: answers that end in a loop. cost(n)/cost(1): time of a forward of n tokens over that of one, where n is "
    "the median of what the decoder's forwards took, which is given if it is not the n of the row."
)


def columns(results: Sequence[Form]) -> tuple[str, ...]:
    """Heads of the table: all of `COLUMNS` but those in which every row says the same plain thing."""
    cells = _cells(results)
    return tuple(name for name in COLUMNS if name not in _PLAIN or any(row[name] != _PLAIN[name] for row in cells))


def rows(results: Sequence[Form]) -> list[tuple[str, ...]]:
    """One row of text cells, under `columns`, for each decoder and batch size of each model.

    Args:
        results: `ModelResult.to_dict()` of each model; where it has a `quality` entry of its own (of more answers than
            were timed), the solve and repetition rates are taken from there.
    """
    heads = columns(results)
    return [tuple(row[name] for name in heads) for row in _cells(results)]


def _cells(results: Sequence[Form]) -> list[dict[str, str]]:
    return [
        dict(zip(COLUMNS, _row(result, decoder), strict=True))
        for result in results
        for decoder in result["decoders"]
        if decoder["tokens_per_forward"] is not None  # the library's, in reports of version 1
    ]


def _row(result: Form, decoder: Form) -> tuple[str, ...]:
    quality = result.get("quality") or decoder["quality"]
    solved, size = quality["solve_rate"], decoder["block_size"]
    rate = decoder["tokens_per_second"]
    return (
        str(result["label"]),
        str(decoder["decoder"]),
        decoder.get("label") or "–",
        str(_batch(decoder)),
        "–" if size is None else str(size),
        "–" if solved is None else f"{100 * solved:.1f} % of {quality['answers']}",
        graded_parts(quality) or "–",
        f"{100 * quality['repetition_rate']:.1f} %",
        f"{decoder['tokens_per_forward']:.2f}",
        f"{rate:.0f}" if rate >= 10 else f"{rate:.1f}",
        f"{decoder['speedup']:.2f}×",
        _exact(decoder),
        _cost(decoder),
    )


def graded_parts(quality: Form) -> str:
    """Shares of the answers that came so far, for a task that is graded in steps; empty for others."""
    return ", ".join(f"{name} {100 * part['share']:.1f} %" for name, part in quality.get("parts", {}).items())


def _batch(decoder: Form) -> int:
    return int(decoder.get("batch_size", 1))


def _exact(decoder: Form) -> str:
    text = f"{decoder['exact']}/{decoder['of']}"
    ties, faults = _differences(decoder)
    return f"{text}, near ties {ties}, faults {faults}" if ties or faults else text


def _differences(decoder: Form) -> tuple[int, int]:
    ties = sum(mismatch["near_tie"] for mismatch in decoder["mismatches"])
    return ties, len(decoder["mismatches"]) - ties


def _cost(decoder: Form) -> str:
    ratio = decoder.get("cost_ratio")
    if ratio is None:
        return "–"
    slots = decoder["median_slots"]
    return f"{ratio:.2f}" + ("" if slots == decoder["block_size"] else f" (n={slots})")


def notes(results: Sequence[Form]) -> list[str]:
    """Sentences that belong under the table: what to expect of each decoder, and what went wrong."""
    said = []
    for result in results:
        said += _cut(result)
        for decoder in result["decoders"]:
            who = f"{result['label']}, {_name(decoder)}"
            said += [f"{who}: {text}" for text in [*_expected(decoder), *_faults(decoder)]]
        said += _crossovers(result)
        said += _left_over(result)
    return said


def _cut(result: Form) -> list[str]:
    """Answers that the token limit cut off can hardly be right, whatever the model knows."""
    plain = next((d for d in result["decoders"] if d["decoder"] == "ar" and _batch(d) == 1), None)
    quality = (plain or {}).get("quality") or {}
    cut = round(quality.get("answers", 0) * (1 - quality.get("finished_rate", 1.0)))
    if not cut:
        return []
    limit = result["max_new_tokens"]
    return [f"{result['label']}: {cut} of {quality['answers']} answers met the limit of {limit} tokens unfinished."]


def _name(decoder: Form, *, batch: bool = True) -> str:
    """What sentences call a result: all that tells it from the others."""
    size, label = decoder["block_size"], decoder.get("label")
    text = decoder["decoder"] + ("" if size is None else f" n={size}") + (f" ({label})" if label else "")
    return text + (f" at batch {_batch(decoder)}" if batch and _batch(decoder) > 1 else "")


def _expected(decoder: Form) -> list[str]:
    """Whether the tokens that a forward brings outweigh what it costs."""
    ratio, gain, rows_ = decoder.get("cost_ratio"), decoder["tokens_per_forward"], _batch(decoder)
    if ratio is None:
        return []
    slots = f"{decoder['median_slots']} tokens" + (f" in each of {rows_} rows" if rows_ > 1 else "")
    figures = f"a forward of {slots} costs {ratio:.2f} times one of 1 here, and brings {gain:.2f} tokens"
    if decoder.get("assistant_forwards"):
        own = decoder["assistant_forwards"] / decoder["forwards"]
        return [f"{figures}; {own:.1f} forwards of the assistant come with each."]
    if gain < 1.05 * ratio:
        return [f"no speed-up is to be expected: {figures}."]
    return [f"about {gain / ratio:.1f}× is to be expected: {figures}."]


def _faults(decoder: Form) -> list[str]:
    said = []
    ties, faults = _differences(decoder)
    if ties:
        widest = max(mismatch["gap"] for mismatch in decoder["mismatches"] if mismatch["near_tie"])
        said.append(
            f"{ties} of {decoder['of']} answers part from {decoder['exact_against']} at a near tie of logits, at most "
            f"{widest:.2g} apart."
        )
    if faults:
        first = next(mismatch for mismatch in decoder["mismatches"] if not mismatch["near_tie"])
        said.append(
            f"{faults} of {decoder['of']} answers differ from {decoder['exact_against']} beyond rounding, first at "
            f"token {first['position']} of prompt {first['prompt']}. This is a fault."
        )
    return said


def _crossovers(result: Form) -> list[str]:
    """For every decoder that was measured at several batch sizes, where it stops being faster than `ar`."""
    ladder: dict[str, list[tuple[int, float]]] = {}
    for decoder in result["decoders"]:
        if decoder["decoder"] not in ("ar", "library"):
            ladder.setdefault(_name(decoder, batch=False), []).append((_batch(decoder), decoder["speedup"]))
    return [f"{result['label']}, {who}: {_crossover(steps)}" for who, steps in ladder.items() if len(steps) > 1]


def _crossover(steps: Sequence[tuple[int, float]]) -> str:
    steps = sorted(steps)
    below = [size for size, speedup in steps if speedup < 1]
    measured = ", ".join(str(size) for size, _ in steps)
    if not below:
        size, least = min(steps, key=lambda step: step[1])
        return f"no crossover at batches of {measured}: never slower than ar, least so at batch {size} ({least:.2f}×)."
    if below[0] == steps[0][0]:
        return (
            f"no crossover at batches of {measured}: slower than ar at batch {below[0]} already ({steps[0][1]:.2f}×)."
        )
    before = max(step for step in steps if step[0] < below[0])
    after = dict(steps)[below[0]]
    return (
        f"crossover between batch {before[0]} ({before[1]:.2f}×) and batch {below[0]} ({after:.2f}×), "
        "where the speed-up falls below 1."
    )


def _left_over(result: Form) -> list[str]:
    """Batch sizes at which some prompts filled no batch."""
    short = {_batch(decoder): decoder["of"] for decoder in result["decoders"] if decoder["of"] < result["prompts"]}
    return [
        f"{result['label']}: batches of {size} took the first {of} of {result['prompts']} prompts."
        for size, of in short.items()
    ]


def markdown(results: Sequence[Form]) -> str:
    """Table, legend and notes as Markdown."""
    return f"{grid(columns(results), rows(results))}\n{LEGEND}\n\n" + "".join(f"- {note}\n" for note in notes(results))


def grid(heads: Sequence[str], cells: Sequence[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = ["| " + " | ".join(row) + " |" for row in (heads, *cells)]
    return "\n".join([lines[0], "|" + " --- |" * len(heads), *lines[1:]]) + "\n"
