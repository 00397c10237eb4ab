"""Latency of a forward over parallel tokens, at several context lengths, held against what the device can do."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from jacobi_forcing.backbone import Backbone
from jacobi_forcing.bench.cost import room_before, time_sweeps
from jacobi_forcing.bench.knee import bend, knee, recommended
from jacobi_forcing.bench.roofline import Limits, Work, device_name, measure_limits, model_form, work_of
from jacobi_forcing.errors import ConfigError
from jacobi_forcing.loading import Loaded

TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
CONTEXTS = (64, 256, 1024)
TOLERANCE = 0.2
REPEATS = 15


def profile(
    loaded: Loaded,
    *,
    tokens: Sequence[int] = TOKENS,
    contexts: Sequence[int] = CONTEXTS,
    batch_size: int = 1,
    tolerance: float = TOLERANCE,
    repeats: int = REPEATS,
    label: str | None = None,
    on_progress: Callable[[int, int], None] | None = None,
) -> dict[str, Any]:
    """Measure forwards of one model (Fig. 5a and 7).

    With an adapter half of a forward's tokens go through it, as in decoding.

    Args:
        loaded: Model and tokenizer.
        tokens: Parallel tokens a row; 1 is always among them.
        contexts: Committed tokens before them; those that do not fit in the model's context are shortened.
        batch_size: Rows side by side.
        tolerance: Excess over the latency of one token that still counts as flat, a share.
        repeats: Timed forwards of each kind, after a few that are thrown away.
        label: What figures call the model; its name by default.
        on_progress: Told rounds done and rounds in all.

    Returns:
        The result without its schema's name and provenance, see `formats/schemas/profile-1.json`.

    Raises:
        ConfigError: A number is too small, or the model's context holds no forward of that size.
    """
    backbone = Backbone(loaded.model)
    sizes = sorted({1, *tokens})
    _check(backbone, sizes, contexts, batch_size, tolerance, repeats)
    lengths = sorted({room_before(backbone, sizes[-1], context) for context in contexts})
    gated = backbone.adapter is not None
    work = work_of(backbone)
    limits = measure_limits(backbone.device, backbone.dtype, work.weights * work.itemsize)
    times = time_sweeps(
        backbone, sizes, lengths, rows=batch_size, repeats=repeats, gated=gated, on_progress=on_progress
    )
    settings = _with_limits(_Settings(batch_size, gated, tolerance, work, limits), backbone, times)
    found = [_context(length, {size: times[length, size] for size in sizes}, settings) for length in lengths]
    safe = min(entry["knee"]["tokens"] for entry in found)
    return {
        "label": label or loaded.config.name,
        "model": loaded.config.name,
        **model_form(backbone),
        "device_name": device_name(backbone.device),
        "batch_size": batch_size,
        "adapter": gated,
        "tolerance": tolerance,
        "repeats": repeats,
        "limits": dataclasses.asdict(settings.limits),
        "work": dataclasses.asdict(work),
        "contexts": found,
        "recommended": {"tokens": safe, "settings": recommended(safe)},
    }


@dataclasses.dataclass(frozen=True)
class _Settings:
    rows: int
    gated: bool
    tolerance: float
    work: Work
    limits: Limits


def _with_limits(
    settings: _Settings, backbone: Backbone, times: Mapping[tuple[int, int], Sequence[float]]
) -> _Settings:
    """With the limits of a second measurement, and of the forwards, where they are higher.

    What else a machine does comes and goes: a limit that was measured in a bad moment would lie below what is reached.
    """
    limits, work = settings.limits, settings.work
    again = measure_limits(backbone.device, backbone.dtype, work.weights * work.itemsize)
    limits = limits.raised(again.bytes_per_second, again.flops_per_second)
    for (length, size), seconds in times.items():
        moved, computed = _demand(length, size, settings)
        limits = limits.raised(moved / min(seconds), computed / min(seconds))
    return dataclasses.replace(settings, limits=limits)


def _check(
    backbone: Backbone,
    sizes: Sequence[int],
    contexts: Sequence[int],
    batch_size: int,
    tolerance: float,
    repeats: int,
) -> None:
    for name, value in (
        ("tokens", sizes[0]),
        ("context", min(contexts, default=0)),
        ("batch_size", batch_size),
        ("repeats", repeats),
    ):
        if value < 1:
            raise ConfigError(f"'{name}' is too small", seen=value, expected="at least 1")
    if tolerance < 0:
        raise ConfigError("'tolerance' is too small", seen=tolerance, expected="at least 0")
    if len(sizes) < 2:
        raise ConfigError("There is nothing to compare with one token", seen=list(sizes), expected="a larger size")
    limit = backbone.context_length
    if limit is not None and sizes[-1] >= limit:
        raise ConfigError(
            "The model's context is shorter than a forward", seen=f"{sizes[-1]} tokens", expected=f"below {limit}"
        )


def _context(length: int, times: dict[int, list[float]], settings: _Settings) -> dict[str, Any]:
    medians = {size: statistics.median(values) for size, values in times.items()}
    fitted = bend(medians)
    return {
        "context": length,
        "points": [_point(length, size, values, medians, settings) for size, values in times.items()],
        "knee": {"tokens": knee(medians, settings.tolerance), "fitted": dataclasses.asdict(fitted)},
        "ridge": _ridge(length, settings),
    }


def _point(
    length: int, size: int, values: Sequence[float], medians: dict[int, float], settings: _Settings
) -> dict[str, Any]:
    """One size at one context length; shares are of what the device does at best in that time."""
    moved, computed = _demand(length, size, settings)
    seconds = medians[size]
    low, high = (float(value) for value in np.quantile(values, [0.25, 0.75]))
    reading = moved / settings.limits.bytes_per_second
    computing = computed / settings.limits.flops_per_second
    return {
        "tokens": size,
        "seconds": seconds,
        "low": low,
        "high": high,
        "ratio": seconds / medians[1],
        "bytes": moved,
        "flops": computed,
        "bandwidth_share": reading / seconds,
        "compute_share": computing / seconds,
        "bound_seconds": max(reading, computing),
        "limit": "bandwidth" if reading >= computing else "compute",
    }


def _demand(length: int, size: int, settings: _Settings) -> tuple[int, int]:
    """Bytes and operations of a forward."""
    gated = settings.gated and size > 1
    work, rows = settings.work, settings.rows
    return work.bytes(size, length, rows, gated), work.flops(size, length, rows, gated)


def _ridge(length: int, settings: _Settings) -> int | None:
    """Parallel tokens from which on computing takes longer than reading, by the roofline alone; None: below 65536."""
    for size in range(1, 1 << 16):
        moved, computed = _demand(length, size, settings)
        if computed / settings.limits.flops_per_second >= moved / settings.limits.bytes_per_second:
            return size
    return None
