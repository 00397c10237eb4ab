"""Up to how many parallel tokens a forward costs about what one token costs, and what settings follow from that."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping

import numpy as np

_LINES = 4
"""The draft and three candidates share the tokens of a sweep, as 64 x 4 = 256 do in the paper (section 4.1)."""
_LEAST = 32
"""Below so many tokens all are given to the draft."""
_FEWEST = 4
"""Below so many there is no block worth the name."""
_STEPS = 400  # bends that are tried


@dataclasses.dataclass(frozen=True)
class Bend:
    """Latency as a flat part and a straight line behind it: seconds(q) = flat + slope * max(0, q - tokens).

    Attributes:
        tokens: Where the line begins; 1 where there is no flat part.
        flat: Seconds of the flat part.
        slope: Seconds per token behind it.
        error: Root mean square of (fitted - measured) / measured.
    """

    tokens: float
    flat: float
    slope: float
    error: float


def knee(seconds: Mapping[int, float], tolerance: float) -> int:
    """The largest number of tokens up to which no forward takes more than (1 + tolerance) times that of one token.

    Between two sizes that were measured it is read off the straight line between them.

    Args:
        seconds: Latency by tokens; must hold 1.
        tolerance: Excess that still counts as flat, a share.
    """
    limit = (1 + tolerance) * seconds[1]
    last = 1
    for size in sorted(seconds):
        if seconds[size] > limit:
            share = (limit - seconds[last]) / (seconds[size] - seconds[last])
            return last + math.floor(share * (size - last) + 1e-9)  # rounding must not cost a token
        last = size
    return last


def bend(seconds: Mapping[int, float]) -> Bend:
    """Fit a flat part and a straight line by least squares of the relative error.

    Args:
        seconds: Latency by tokens, two sizes or more.
    """
    sizes = np.array(sorted(seconds), dtype=np.float64)
    times = np.array([seconds[int(size)] for size in sizes])
    best: Bend | None = None
    for place in np.geomspace(sizes[0], sizes[-1], _STEPS):
        beyond = np.maximum(0.0, sizes - place)
        design = np.stack([np.ones_like(sizes), beyond], axis=1) / times[:, None]
        (flat, slope), *_ = np.linalg.lstsq(design, np.ones_like(times), rcond=None)
        error = float(np.sqrt(np.mean((design @ (flat, slope) - 1) ** 2)))
        if slope >= 0 and (best is None or error < best.error - 1e-9):
            best = Bend(float(place), float(flat), float(slope), error)
    assert best is not None  # a bend at the largest size has no slope
    return best


def recommended(tokens: int) -> list[dict[str, int | str]]:
    """Settings whose sweeps take at most so many tokens.

    Args:
        tokens: Parallel tokens that a sweep may take, such as the knee.

    Returns:
        For `window` a block size; for `recycle` a block size and candidates that share the tokens, where there are
        enough of them. Block sizes are powers of two. Nothing where there are too few tokens for any block.
    """
    if tokens < _FEWEST:
        return []
    found: list[dict[str, int | str]] = [{"decoder": "window", "block_size": _power(tokens), "tokens": _power(tokens)}]
    if tokens >= _LEAST:
        size = _power(tokens // _LINES)
        lines = min(tokens // size, 2 * _LINES)
        found.append({"decoder": "recycle", "block_size": size, "candidates": lines - 1, "tokens": size * lines})
    return found


def _power(number: int) -> int:
    return 1 << (max(number, 1).bit_length() - 1)
