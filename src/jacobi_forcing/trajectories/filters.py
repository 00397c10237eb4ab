"""Filters for answers: which responses are worth training on.

A filter is a named question about one answer. The first that says no keeps the answer out, and is counted for it: in
the manifest, shard by shard, and in the report. What needs graders is made by the layers that have them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from jacobi_forcing.errors import DataError
from jacobi_forcing.trajectories.prompts import Prompt


@dataclasses.dataclass(frozen=True)
class Answer:
    """What a filter is asked about.

    Attributes:
        prompt: The prompt, with its reference answer where the source has one.
        ids: The response, tokens, the end token included.
        finished: Whether it ended with an end token within its limit.
    """

    prompt: Prompt
    ids: Sequence[int]
    finished: bool


Filter = Callable[[Answer], bool]
"""Whether an answer is to be kept."""


def is_finished(answer: Answer) -> bool:
    """Whether the answer came to its end within the token limit."""
    return answer.finished


def first_refusal(filters: Mapping[str, Filter], answer: Answer) -> str | None:
    """The name of the first filter that keeps an answer out, in their order; None where all let it pass."""
    return next((name for name, keeps in filters.items() if not keeps(answer)), None)


def count_filtered(manifest: Mapping[str, Any]) -> dict[str, int]:
    """How many answers each filter kept out, by name, over all shards of a manifest."""
    counts: dict[str, int] = {}
    for entry in manifest["shards"]:
        for name in entry.get("filtered", {}).values():
            counts[name] = counts.get(name, 0) + 1
    return counts


def kept_of(manifest: Mapping[str, Any], filters: Iterable[str]) -> str:
    """What the filters did, for people: "kept 50 of 64: 10 final_answer, 4 no_repetition".

    Raises:
        DataError: They kept nothing.
    """
    counts = count_filtered(manifest)
    kept = sum(int(entry["rows"]) for entry in manifest["shards"])
    total = kept + sum(counts.values())
    each = ", ".join(f"{counts[name]} {name}" for name in filters if counts.get(name))
    if not kept:
        raise DataError(
            "No answer passed the filters, so there is nothing to train on",
            seen=f"kept 0 of {total}" + (f": {each}" if each else ""),
            remedy="leave the filter out that refuses most, or look at the answers: jforce generate shows some",
        )
    return f"kept {kept} of {total}" + (f": {each}" if each else "")
