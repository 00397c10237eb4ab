"""Figures that stand on their own, as PNG or SVG: a transparent ground and mid tones, readable on white and black."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jacobi_forcing.errors import ConfigError, MissingExtraError
from jacobi_forcing.files import write_file

if TYPE_CHECKING:
    from matplotlib.axes import Axes

INK = "#7d7d7d"
"""Text and axes; its contrast is 4.1 to 1 on white and 4.6 to 1 on GitHub's dark ground."""
TONES = ("#2f86d6", "#d9681d", "#2c9a5b", "#b355c4", "#a98600", "#d6455d", "#1b98a6", "#8a6d5a")
MARKERS = "osD^vPXd"
FORMATS = (".png", ".svg")
_PANEL = (5.2, 4.0)  # inches


def check_figure(path: str | Path) -> None:
    """See, before anything is measured, that a figure can be drawn and in which format.

    Raises:
        ConfigError: The file's name ends in neither .png nor .svg.
        MissingExtraError: matplotlib is not installed.
    """
    if Path(path).suffix.lower() not in FORMATS:
        raise ConfigError(f"A figure cannot be written as '{path}'", expected="a name that ends in .png or .svg")
    try:
        import matplotlib  # noqa: F401  # only whether it is there
    except ImportError as error:
        raise MissingExtraError("matplotlib", "eval") from error


@contextlib.contextmanager
def panels(path: str | Path, count: int, title: str) -> Iterator[list[Axes]]:
    """Axes side by side to draw on; when the block ends without an error the figure is written.

    Args:
        path: File to write, .png or .svg.
        count: Number of axes.
        title: Above them.

    Raises:
        ArtefactError: The disk refuses.
        ConfigError, MissingExtraError: See `check_figure`.
    """
    check_figure(path)
    import matplotlib
    from matplotlib.figure import Figure

    kind = Path(path).suffix.lower().removeprefix(".")
    with matplotlib.rc_context(_SETTINGS):
        figure = Figure(figsize=(_PANEL[0] * count, _PANEL[1]), layout="constrained")
        yield [figure.add_subplot(1, count, place + 1) for place in range(count)]
        figure.suptitle(title, fontsize=12)
        stamp: dict[str, Any] = {"Date": None} if kind == "svg" else {"Software": None}
        write_file(path, lambda target: figure.savefig(target, format=kind, dpi=140, transparent=True, metadata=stamp))


def measured_on(result: Mapping[str, Any]) -> str:
    """The model, its dtype, and the device with its threads: what a figure's title begins with."""
    return f"{result['label']}, {result['dtype']}, {result['device_name']}{processor(result)}"


def processor(result: Mapping[str, Any]) -> str:
    """How a CPU was used: `, 2 threads, weights packed`; empty where nothing is known of it."""
    count = result.get("threads")
    threads = f", {count} thread{'' if count == 1 else 's'}" if count else ""
    return threads + (", weights packed" if result.get("packed_weights") else "")


def tone(index: int) -> dict[str, Any]:
    """Colour and marker of a series: told apart without colour too."""
    return {"color": TONES[index % len(TONES)], "marker": MARKERS[index % len(MARKERS)]}


def legend_below(axes: Axes) -> None:
    """A legend that covers no line."""
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=3)


_SETTINGS: Any = {
    "svg.hashsalt": "jforce",
    "svg.fonttype": "path",
    "font.size": 10,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.titlecolor": INK,
    "axes.edgecolor": INK,
    "axes.facecolor": "none",
    "axes.titlesize": 11,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": INK,
    "grid.alpha": 0.3,
    "grid.linewidth": 0.6,
    "xtick.color": INK,
    "ytick.color": INK,
    "legend.frameon": False,
    "legend.fontsize": 9,
    "legend.labelcolor": INK,
    "lines.linewidth": 1.8,
    "lines.markersize": 5,
}
