"""How long a request takes: to its first token, between commits, and to its end; the usual one and the worst."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np

from jacobi_forcing.bench.contestants import Turn

PERCENTILES = (50, 90, 95, 99)


def percentiles(values: Sequence[float]) -> dict[str, float]:
    """Mean, percentiles and the worst of some times.

    A percentile between two values is read off the straight line between them: p99 of fewer than a hundred values lies
    close to the worst of them.

    Args:
        values: Seconds, at least one.

    Returns:
        `mean`, `p50`, `p90`, `p95`, `p99` and `worst`, seconds.
    """
    found = np.percentile(np.asarray(values, dtype=np.float64), PERCENTILES)
    figures = {f"p{rank}": float(value) for rank, value in zip(PERCENTILES, found, strict=True)}
    return {"mean": float(np.mean(values)), **figures, "worst": float(max(values))}


def latency(turns: Sequence[Turn]) -> dict[str, Any]:
    """Latencies of timed calls, for JSON.

    A batch answers when all of its rows have: each of its requests takes as long as the call.

    Returns:
        `requests` (their number) and, in seconds as `percentiles` gives them: `answer` (the whole call), `first_token`
        (until the first token is known) and `gap` (between one commit and the next; null where no answer took two
        forwards).
    """
    answer = [turn.seconds for turn in turns for _ in turn.ids]
    first = [turn.marks[0] for turn in turns for _ in turn.ids]
    gaps = [after - before for turn in turns for before, after in itertools.pairwise(turn.marks)]
    return {
        "requests": len(answer),
        "answer": percentiles(answer),
        "first_token": percentiles(first),
        "gap": percentiles(gaps) if gaps else None,
    }
