"""What a sweep of n slots costs beside a sweep of one: the figure that explains every speed-up, or its absence."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence

import torch

from jacobi_forcing.backbone import Backbone
from jacobi_forcing.sweep import Line, Lines, sweep

WARM_UP = 3
REPEATS = 30


def cost_ratios(
    backbone: Backbone, sizes: Sequence[int], context: int, *, rows: int = 1, repeats: int = REPEATS
) -> dict[int, dict[str, float]]:
    """Time sweeps of different sizes over the same committed context; the median is reported.

    Where the model has a gated adapter, half of a sweep's tokens run through it, as they about do in decoding.

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
    context = room_before(backbone, sizes[-1], context)
    gated = backbone.adapter is not None
    times = time_sweeps(backbone, sizes, [context], rows=rows, repeats=repeats, gated=gated)
    medians = {size: statistics.median(times[context, size]) for size in sizes}
    return {size: {"seconds": median, "ratio": median / medians[1]} for size, median in medians.items()}


def room_before(backbone: Backbone, size: int, context: int) -> int:
    """The context that leaves room for a sweep of `size` tokens: `context`, or less where the model's own is short."""
    limit = backbone.context_length
    return max(1, context if limit is None else min(context, limit - size))


@torch.inference_mode()
def time_sweeps(
    backbone: Backbone,
    sizes: Sequence[int],
    contexts: Sequence[int],
    *,
    rows: int = 1,
    repeats: int = REPEATS,
    gated: bool = False,
    on_progress: Callable[[int, int], None] | None = None,
) -> dict[tuple[int, int], list[float]]:
    """Time sweeps of different sizes over different contexts.

    All take turns, so that the machine's noise hits all alike.

    Args:
        backbone: The model.
        sizes: Slots of a sweep, tokens a row.
        contexts: Committed tokens before it.
        rows: Rows side by side, all of the same length.
        repeats: Timed sweeps of each, after a few that are thrown away.
        gated: Send half of a sweep's tokens (rounded down) through the model's adapter, as a line beside the others.
        on_progress: Told rounds done and rounds in all, those that are thrown away included.

    Returns:
        Wall seconds of each timed sweep by (context, size).
    """
    device, token = backbone.device, 1 % backbone.vocab_size
    caches = {context: backbone.new_cache(rows) for context in contexts}
    for context, cache in caches.items():
        sweep(backbone, cache, Lines.pack([[Line([token] * context, 0)]] * rows, device))
        cache.commit([range(context)] * rows)
    lines = {
        (context, size): Lines.pack([_lines(size, context, token, gated)] * rows, device)
        for context in contexts
        for size in sizes
    }
    seconds: dict[tuple[int, int], list[float]] = {place: [] for place in lines}
    for repeat in range(WARM_UP + repeats):
        for (context, size), packed in lines.items():
            synchronise(device)
            started = time.perf_counter()
            sweep(backbone, caches[context], packed)
            synchronise(device)
            if repeat >= WARM_UP:
                seconds[context, size].append(time.perf_counter() - started)
            caches[context].forget()
        if on_progress is not None:
            on_progress(repeat + 1, WARM_UP + repeats)
    return seconds


def _lines(size: int, context: int, token: int, gated: bool) -> list[Line]:
    drafts = size // 2 if gated else 0
    lines = [Line([token] * (size - drafts), context)]
    return [*lines, Line([token] * drafts, context, gated=True)] if drafts else lines


def synchronise(device: torch.device) -> None:
    """Wait until the device has done what was asked of it, so that a clock tells the truth."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()
