"""How figures look, and how they become a part of a page: vector graphics whose colours follow the page's."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import re
from collections.abc import Iterable, Iterator, Mapping
from html import escape
from typing import TYPE_CHECKING, Any

from jacobi_forcing.errors import MissingExtraError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

INK, SOFT, LINE = "#010101", "#020202", "#030303"
SERIES = tuple(f"#0{index}0a0b" for index in range(8))
"""Colours that stand for those of the page, which replaces them: series 0 to 7."""
MARKERS = "osD^vPXd"
DASHES = ("-", "--", "-.", ":", "-", "--", "-.", ":")
_KEY_DASHES = ("", "6 3", "7 2 1 2", "2 2")
_SHAPES = {
    "o": '<circle cx="14" cy="6" r="3.5"/>',
    "s": '<rect x="11" y="3" width="6" height="6"/>',
    "D": '<path d="M14 1.5 18.5 6 14 10.5 9.5 6z"/>',
    "^": '<path d="M14 2 18 9.5H10z"/>',
    "v": '<path d="M14 10 18 2.5H10z"/>',
    "P": '<path d="M12.5 2h3v2.5H18v3h-2.5V10h-3V7.5H10v-3h2.5z"/>',
    "X": '<path d="M10.5 3.5 11.5 2.5 14 5 16.5 2.5 17.5 3.5 15 6 17.5 8.5 16.5 9.5 14 7 11.5 9.5 10.5 8.5 13 6z"/>',
    "d": '<path d="M14 1 16.5 6 14 11 11.5 6z"/>',
}
_NAMES: Mapping[str, str] = {
    INK: "var(--ink)",
    SOFT: "var(--soft)",
    LINE: "var(--line)",
    **{colour: f"var(--s{index})" for index, colour in enumerate(SERIES)},
}
SIZE = (5.0, 3.4)
"""Width and height of a figure, inches."""


@dataclasses.dataclass(frozen=True)
class Figure:
    """A drawn figure.

    Attributes:
        svg: The `<svg>` element, without what only a file needs.
        title: What it shows.
        text: What is seen in it, for those who cannot see it.
        key: Names of its series in order; they stand below the drawing, where long ones find room.
    """

    svg: str
    title: str
    text: str
    key: tuple[str, ...] = ()


@contextlib.contextmanager
def drawing(title: str, text: str, name: str, key: Iterable[str] = ()) -> Iterator[tuple[Axes, list[Figure]]]:
    """Axes to draw on; when the block ends the figure is in the list.

    Args:
        title: What it shows.
        text: What is seen in it.
        name: Distinguishes the ids in it from those of other figures of the page.
        key: Names of its series in order, where there are several.

    Raises:
        MissingExtraError: matplotlib is not installed.
    """
    try:
        import matplotlib
        from matplotlib.figure import Figure as Canvas
    except ImportError as error:
        raise MissingExtraError("matplotlib", "eval") from error
    done: list[Figure] = []
    with matplotlib.rc_context(_settings()):
        canvas = Canvas(figsize=SIZE, layout="constrained")
        axes: Any = canvas.add_subplot()
        yield axes, done
        buffer = io.StringIO()
        canvas.savefig(buffer, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    done.append(Figure(_inline(buffer.getvalue(), name, f"{title}. {text}"), title, text, tuple(key)))


def _settings() -> Any:
    return {
        "svg.hashsalt": "jforce",
        "font.size": 10,
        "text.color": INK,
        "axes.labelcolor": INK,
        "axes.edgecolor": SOFT,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.grid": True,
        "axes.axisbelow": True,
        "grid.color": LINE,
        "grid.linewidth": 0.6,
        "xtick.color": INK,
        "ytick.color": INK,
        "lines.linewidth": 1.8,
        "lines.markersize": 5,
    }


def _inline(text: str, name: str, label: str) -> str:
    """The `<svg>` element of a file, with ids of its own and the page's colours."""
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r' xmlns(:\w+)?="[^"]*"', "", text)
    text = re.sub(r'\bid="', f'id="{name}-', text)
    text = re.sub(r'(?:xlink:)?href="#', f'href="#{name}-', text)
    text = text.replace("url(#", f"url(#{name}-")
    for colour, variable in _NAMES.items():
        text = text.replace(colour, variable)
    return text.replace("<svg", f'<svg role="img" aria-label="{escape(label, quote=True)}"', 1)


def look(series: int) -> dict[str, Any]:
    """Colour, marker and dashes of a series: told apart without colour too."""
    index = series % len(SERIES)
    return {"color": SERIES[index], "marker": _marker(series), "linestyle": DASHES[index]}


def _marker(series: int) -> str:
    """Behind the last colour they begin anew, and markers are moved by one."""
    return MARKERS[(series + series // len(SERIES)) % len(MARKERS)]


def sample(series: int) -> str:
    """A small drawing of how a series looks, for a key."""
    colour = f"var(--s{series % len(SERIES)})"
    dashes = _KEY_DASHES[series % len(_KEY_DASHES)]
    return (
        f'<svg class="key" viewBox="0 0 28 12" aria-hidden="true" fill="{colour}">'
        f'<path d="M0 6H28" stroke="{colour}" stroke-width="2" stroke-dasharray="{dashes}"/>'
        f"{_SHAPES[_marker(series)]}</svg>"
    )
