"""The figure of `jforce tune`: TPS over block size and candidates, measured points on the fitted surface (Fig. 8)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from jacobi_forcing.viz.canvas import INK, legend_below, measured_on, panels, tone

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Form = Mapping[str, Any]
_STEPS = 80  # places along each axis


def draw_tune(result: Form, path: str | Path) -> None:
    """Draw a result of `tune`: TPS over block size for every kind of setting, then a contour plot for each surface.

    Args:
        result: What `tune` returned.
        path: File to write, .png or .svg.

    Raises:
        ArtefactError, ConfigError, MissingExtraError: See `panels`.
    """
    title = f"{measured_on(result)}: settings without a fault"
    surfaces = [surface for surface in result["surfaces"] if _flat(surface)]
    with panels(path, 1 + len(surfaces), title) as (curves, *contours):
        _curves(curves, result)
        for axes, surface in zip(contours, surfaces, strict=True):
            _contour(axes, surface)


def _flat(surface: Form) -> bool:
    """Whether a surface has an extent along both axes."""
    return all(len(set(surface[axis])) > 1 for axis in ("block_sizes", "candidates"))


def _curves(axes: Axes, result: Form) -> None:
    """The best candidates, K and r at each block size, for each decoder; and `ar`."""
    found: dict[str, dict[int, float]] = {}
    for one in result["settings"]:
        if one["block_size"] is not None and not one["faults"]:
            points = found.setdefault(one["decoder"], {})
            points[one["block_size"]] = max(points.get(one["block_size"], 0.0), one["tokens_per_second"])
    for index, (name, points) in enumerate(found.items()):
        axes.plot(*zip(*sorted(points.items()), strict=True), label=name, **tone(index))
    axes.axhline(result["settings"][0]["tokens_per_second"], color=INK, linestyle="--", linewidth=1, label="ar")
    _sizes(axes, sorted({size for points in found.values() for size in points}))
    axes.set_ylim(bottom=0)
    axes.set_ylabel("tokens per second (TPS)")
    axes.set_title("Best setting at each block size")
    legend_below(axes)


def _sizes(axes: Axes, sizes: list[int]) -> None:
    axes.set_xscale("log", base=2)
    axes.set_xticks(sizes, [str(size) for size in sizes])
    axes.minorticks_off()
    axes.set_xlabel("block size n (tokens)")


def _contour(axes: Axes, surface: Form) -> None:
    (low, high), (least, most) = surface["block_sizes"], surface["candidates"]
    sizes, lines = np.geomspace(low, high, _STEPS), np.linspace(least, most, _STEPS)
    heights = sum(
        coefficient * np.log2(sizes)[None, :] ** i * lines[:, None] ** j
        for coefficient, (i, j) in zip(surface["coefficients"], surface["terms"], strict=True)
    )
    heights = np.broadcast_to(heights, (_STEPS, _STEPS))
    filled = axes.contourf(sizes, lines, heights, levels=12, cmap="viridis", alpha=0.9)
    bar = axes.figure.colorbar(filled, ax=axes)
    bar.set_label("fitted TPS")
    bar.outline.set_edgecolor(INK)
    points = surface["measured"]
    axes.scatter(
        [point[0] for point in points],
        [point[1] for point in points],
        color="white",
        edgecolor="black",
        s=22,
        zorder=3,
        clip_on=False,
    )
    best = surface["optimum"]
    place = f"n={best['block_size']:.0f}, {best['candidates']:.1f} candidates, {best['tokens_per_second']:.0f} TPS"
    star: dict[str, Any] = {
        "marker": "*",
        "s": 190,
        "color": "#ff5a4f",
        "edgecolor": "black",
        "zorder": 4,
        "clip_on": False,
    }
    axes.scatter(best["block_size"], best["candidates"], label=f"optimum: {place}", **star)
    _sizes(axes, sorted({int(point[0]) for point in points}))
    axes.set_yticks(sorted({int(point[1]) for point in points}))
    axes.set_ylabel("candidates (lines)")
    more = f", K={surface['num_blocks']}, r={surface['spawn_ratio']:g}" if "num_blocks" in surface else ""
    axes.set_title(f"{surface['decoder']}{more}; dots: measured, R² {surface['fit']:.2f}")
    legend_below(axes)
