"""The figure of `jforce profile`: latency over parallel tokens, the speed-up that leaves room for, and the roofline."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jacobi_forcing.viz.canvas import INK, legend_below, measured_on, panels, tone

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Form = Mapping[str, Any]
GAINS = (2, 3, 4, 6, 8)
"""Tokens per forward whose speed-up is drawn."""


def draw_profile(result: Form, path: str | Path) -> None:
    """Draw a result of `profile`.

    Args:
        result: What `profile` returned.
        path: File to write, .png or .svg.

    Raises:
        ArtefactError, ConfigError, MissingExtraError: See `panels`.
    """
    rows = f", {result['batch_size']} rows" if result["batch_size"] > 1 else ""
    with panels(path, 3, measured_on(result) + rows) as (latency, gain, share):
        _latency(latency, result)
        _gain(gain, result["contexts"][0])
        _share(share, result["contexts"][0])


def _over_tokens(axes: Axes, tokens: Sequence[int]) -> None:
    axes.set_xscale("log", base=2)
    axes.set_xticks(tokens, [str(size) for size in tokens])
    axes.minorticks_off()
    axes.set_xlabel("parallel tokens in a forward pass, per row")


def _latency(axes: Axes, result: Form) -> None:
    """Measured latencies, where they bend, and the least that the roofline allows (Fig. 7)."""
    for index, entry in enumerate(result["contexts"]):
        sizes = [point["tokens"] for point in entry["points"]]
        style, known = tone(index), {point["tokens"]: point["seconds"] for point in entry["points"]}
        axes.plot(
            sizes, [1000 * point["seconds"] for point in entry["points"]], label=f"context {entry['context']}", **style
        )
        low, high = ([1000 * point[end] for point in entry["points"]] for end in ("low", "high"))
        axes.fill_between(sizes, low, high, color=style["color"], alpha=0.15, linewidth=0)
        bound = [1000 * point["bound_seconds"] for point in entry["points"]]
        axes.plot(sizes, bound, color=style["color"], linestyle=":", linewidth=1.2)
        at = entry["knee"]["tokens"]
        limit = 1000 * (1 + result["tolerance"]) * known[1]
        axes.plot([at], [limit], marker="|", markersize=18, color=style["color"])
    _over_tokens(axes, sizes)
    axes.set_yscale("log")
    axes.set_ylabel("latency of a forward pass (ms)")
    axes.set_title(f"Latency; upright mark: knee ({100 * result['tolerance']:.0f} %); dotted: roofline")
    legend_below(axes)


def _gain(axes: Axes, entry: Form) -> None:
    """Speed-up over one token a forward at fixed tokens per forward (Fig. 5a)."""
    for index, gain in enumerate(GAINS):
        points = [point for point in entry["points"] if point["tokens"] >= gain]
        axes.plot(
            [point["tokens"] for point in points],
            [gain / point["ratio"] for point in points],
            label=f"TPF {gain}",
            **tone(index),
        )
    axes.axhline(1, color=INK, linewidth=1, linestyle="--")
    _over_tokens(axes, [point["tokens"] for point in entry["points"]])
    axes.set_ylim(bottom=0)
    axes.set_ylabel("speed-up over one token a forward (×)")
    axes.set_title(f"What a TPF is worth, context {entry['context']}")
    legend_below(axes)


def _share(axes: Axes, entry: Form) -> None:
    """Which part of the device's limits a forward uses."""
    sizes = [point["tokens"] for point in entry["points"]]
    for index, (name, label) in enumerate((("bandwidth_share", "memory bandwidth"), ("compute_share", "arithmetic"))):
        axes.plot(sizes, [100 * point[name] for point in entry["points"]], label=label, **tone(index))
    if entry["ridge"] and entry["ridge"] <= sizes[-1]:
        axes.axvline(entry["ridge"], color=INK, linewidth=1, linestyle="--", label=f"ridge: {entry['ridge']} tokens")
    _over_tokens(axes, sizes)
    axes.set_ylim(bottom=0)
    axes.set_ylabel("share of what this device does at best (%)")
    axes.set_title(f"Use of the device, context {entry['context']}")
    legend_below(axes)
