"""Statistics of right and wrong answers: how sure a share is, whether two sets of answers differ."""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Sequence
from typing import Self


@dataclasses.dataclass(frozen=True)
class Wilson:
    """A share with its 95 % Wilson score interval, which stays within 0 and 1 and is honest for small counts."""

    count: int
    of: int
    low: float
    high: float

    @classmethod
    def of_counts(cls, count: int, of: int, z: float = 1.959964) -> Self:
        """The interval for `count` successes in `of` trials."""
        if of == 0:
            return cls(0, 0, 0.0, 1.0)
        share, spread = count / of, z * z / of
        centre = (share + spread / 2) / (1 + spread)
        half = z * math.sqrt(share * (1 - share) / of + spread / (4 * of)) / (1 + spread)
        return cls(count, of, max(0.0, centre - half), min(1.0, centre + half))

    @property
    def share(self) -> float:
        """The share itself, 0 where nothing was counted."""
        return self.count / self.of if self.of else 0.0


def mcnemar(only_first: int, only_second: int) -> float:
    """Two-sided p-value of the exact McNemar test: is one of two paired sets of answers right more often?

    Items that both have right, or both wrong, tell nothing. Of the others each is as likely to go either way if there
    is no difference, so that the smaller count is binomial (n, 1/2).

    Args:
        only_first: Items that only the first has right.
        only_second: Items that only the second has right.
    """
    differ, smaller = only_first + only_second, min(only_first, only_second)
    tail = sum(math.comb(differ, count) for count in range(smaller + 1))
    return min(1.0, float(2 * tail / 2**differ))


def paired_bootstrap(
    first: Sequence[float], second: Sequence[float], *, resamples: int = 10_000, level: float = 0.95, seed: int = 0
) -> tuple[float, float]:
    """Percentile bootstrap interval of mean(first) - mean(second), items drawn with replacement in pairs.

    Args:
        first: A value per item, such as 1.0 for right.
        second: Those of the other, item by item.
        resamples: Draws.
        level: Share of the draws within the interval.
        seed: Of the draws.

    Raises:
        ValueError: The lengths differ or there is nothing.
    """
    if len(first) != len(second) or not first:
        raise ValueError(f"Paired values are needed; seen: {len(first)} and {len(second)}")
    differences = [one - other for one, other in zip(first, second, strict=True)]
    rng, count = random.Random(seed), len(differences)
    means = sorted(sum(rng.choices(differences, k=count)) / count for _ in range(resamples))
    cut = (1 - level) / 2
    return means[math.floor(cut * (resamples - 1))], means[math.ceil((1 - cut) * (resamples - 1))]
