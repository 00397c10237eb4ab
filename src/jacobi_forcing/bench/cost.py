"""What a sweep of n slots costs beside a sweep of one: the figure that explains every speed-up, or its absence."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence

import torch

from jacobi_forcing.backbone import Backbone
from jacobi_forcing.sweep import Line, Lines, sweep

WARM_UP = 3
REPEATS = 30


@torch.inference_mode()
def cost_ratios(
    backbone: Backbone, sizes: Sequence[int], context: int, *, rows: int = 1, repeats: int = REPEATS
) -> dict[int, dict[str, float]]:
    """Time sweeps of different sizes over the same committed context.

    Sizes take turns, so that the machine's noise hits all alike; the median is reported.

    Args:
        backbone: The model.
        sizes: Slots of a sweep, tokens a row.
        context: Committed tokens before it; less where the model's context would not hold both.
        rows: Rows side by side, all of the same length.
        repeats: Timed sweeps of each size, after a few that are thrown away.

    Returns:
        For 1 and every size: `seconds` (median) and `ratio`, cost(n) / cost(1) with as many rows.
    """
    sizes = sorted({1, *sizes})
    limit = backbone.context_length
    context = max(1, context if limit is None else min(context, limit - sizes[-1]))
    cache = backbone.new_cache(rows)
    token = 1 % backbone.vocab_size
    sweep(backbone, cache, Lines.pack([[Line([token] * context, 0)]] * rows, backbone.device))
    cache.commit([range(context)] * rows)
    lines = {size: Lines.pack([[Line([token] * size, context)]] * rows, backbone.device) for size in sizes}
    seconds: dict[int, list[float]] = {size: [] for size in sizes}
    for repeat in range(WARM_UP + repeats):
        for size in sizes:
            synchronise(backbone.device)
            started = time.perf_counter()
            sweep(backbone, cache, lines[size])
            synchronise(backbone.device)
            if repeat >= WARM_UP:
                seconds[size].append(time.perf_counter() - started)
            cache.forget()
    medians = {size: statistics.median(values) for size, values in seconds.items()}
    return {size: {"seconds": median, "ratio": median / medians[1]} for size, median in medians.items()}


def synchronise(device: torch.device) -> None:
    """Wait until the device has done what was asked of it, so that a clock tells the truth."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()
