"""Successive halving: many settings on few batches, the better half on more, until a few are left for all of them.

Which setting is fastest is asked of a noisy clock. So no setting is dropped that lies close to the leader; one that is
wrong is dropped at once.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence

FINALISTS = 4
"""Settings that are measured on all batches, at least."""
MARGIN = 0.05
"""Settings so close to the best, as a share of its score, are kept however many there are."""
_LEAST = 2  # batches of the first rung


@dataclasses.dataclass(frozen=True)
class Rung:
    """One step of a search.

    Attributes:
        batches: The first so many are measured.
        repeats: How often each.
        keep: Settings that go on to the next step.
    """

    batches: int
    repeats: int
    keep: int


@dataclasses.dataclass(frozen=True)
class Step:
    """What a rung did: the settings that it measured, and those that it left, best first."""

    rung: Rung
    measured: list[int]
    left: list[int]


Measure = Callable[[Sequence[int], int, int], None]
"""Measure settings on the first so many batches, so many times."""
Score = Callable[[int, int, int], float | None]
"""Of a setting on the first so many batches, so many times; None where it must not be taken."""


def plan(settings: int, batches: int, repeats: int, finalists: int = FINALISTS) -> list[Rung]:
    """Rungs that halve the settings and double the batches, up to all batches for the finalists.

    Args:
        settings: Number of settings.
        batches: Number of batches.
        repeats: How often finalists are measured on each batch; the others once.
        finalists: Settings that are measured on all batches.
    """
    levels = max(0, math.ceil(math.log2(max(settings, 1) / finalists)))
    rungs = []
    for level in range(levels):
        some = max(min(_LEAST, batches), round(batches / 2 ** (levels - level)))
        rungs.append(Rung(some, 1, max(finalists, math.ceil(settings / 2 ** (level + 1)))))
    return [*rungs, Rung(batches, repeats, 1)]


def search(settings: Sequence[int], rungs: Sequence[Rung], measure: Measure, score: Score) -> list[Step]:
    """Run a search.

    Args:
        settings: What is searched among.
        rungs: From `plan`.
        measure: Called once a rung.
        score: The higher, the better.

    Returns:
        What each rung did. The last one's `left` is the ranking of the finalists; it may be empty.
    """
    alive, steps = list(settings), []
    for place, rung in enumerate(rungs):
        measure(alive, rung.batches, rung.repeats)
        scores = {one: score(one, rung.batches, rung.repeats) for one in alive}
        ranked = sorted((one for one in alive if scores[one] is not None), key=lambda one: -(scores[one] or 0.0))
        left = ranked
        if place < len(rungs) - 1 and ranked:
            close = (1 - MARGIN) * (scores[ranked[0]] or 0.0)
            left = [one for rank, one in enumerate(ranked) if rank < rung.keep or (scores[one] or 0.0) >= close]
        steps.append(Step(rung, alive, left))
        alive = left
    return steps
