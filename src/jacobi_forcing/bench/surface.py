"""TPS as a polynomial surface over block size and candidates (appendix E, Fig. 8)."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np

_STEPS = 201  # places along each axis at which the optimum is looked for


@dataclasses.dataclass(frozen=True)
class Surface:
    """sum of coefficient * x**i * y**j over terms (i, j) with i + j <= 2; x = log2(block size), y = candidates.

    Attributes:
        terms: Powers (i, j).
        coefficients: One for each.
        fit: Share of the variance that it explains, R squared.
        block_sizes: Least and greatest that were measured.
        candidates: Least and greatest that were measured.
        points: Number of measured points.
    """

    terms: list[tuple[int, int]]
    coefficients: list[float]
    fit: float
    block_sizes: tuple[int, int]
    candidates: tuple[int, int]
    points: int

    def at(self, block_size: Any, candidates: Any) -> Any:
        """TPS there; arrays broadcast."""
        x, y = np.log2(np.asarray(block_size, dtype=np.float64)), np.asarray(candidates, dtype=np.float64)
        return sum(c * x**i * y**j for c, (i, j) in zip(self.coefficients, self.terms, strict=True))

    @property
    def optimum(self) -> tuple[float, float, float]:
        """Block size, candidates and TPS of the highest place within what was measured; not rounded."""
        low, high = self.block_sizes
        sizes = np.geomspace(low, high, _STEPS) if low < high else np.array([float(low)])
        lines = (
            np.linspace(*self.candidates, _STEPS) if len(set(self.candidates)) > 1 else np.array([self.candidates[0]])
        )
        heights = np.broadcast_to(self.at(sizes[:, None], lines[None, :]), (len(sizes), len(lines)))
        row, column = np.unravel_index(int(np.argmax(heights)), heights.shape)
        return float(sizes[row]), float(lines[column]), float(heights[row, column])

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        size, lines, rate = self.optimum
        return {
            "terms": [list(term) for term in self.terms],
            "coefficients": self.coefficients,
            "fit": self.fit,
            "block_sizes": list(self.block_sizes),
            "candidates": list(self.candidates),
            "points": self.points,
            "optimum": {"block_size": size, "candidates": lines, "tokens_per_second": rate},
        }


def fit_surface(points: Sequence[tuple[int, int, float]]) -> Surface | None:
    """Fit by least squares; None where there are fewer points than terms.

    Powers are used as far as an axis has values for them: an axis with two values has no curvature, one with a single
    value has no slope.

    Args:
        points: Block size, candidates, TPS.
    """
    if not points:
        return None
    sizes, lines, rates = (np.array(column, dtype=np.float64) for column in zip(*points, strict=True))
    most = [min(2, len(set(axis.tolist())) - 1) for axis in (sizes, lines)]
    terms = [(i, j) for i, j in itertools.product(range(3), repeat=2) if i <= most[0] and j <= most[1] and i + j <= 2]
    if len(points) < len(terms):
        return None
    design = np.stack([np.log2(sizes) ** i * lines**j for i, j in terms], axis=1)
    coefficients, *_ = np.linalg.lstsq(design, rates, rcond=None)
    left = float(np.sum((design @ coefficients - rates) ** 2))
    spread = float(np.sum((rates - rates.mean()) ** 2))
    return Surface(
        terms=terms,
        coefficients=[float(value) for value in coefficients],
        fit=1 - left / spread if spread else 1.0,
        block_sizes=(int(sizes.min()), int(sizes.max())),
        candidates=(int(lines.min()), int(lines.max())),
        points=len(points),
    )
