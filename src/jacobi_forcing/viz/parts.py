"""The pieces that a report is made of, whatever it is written as."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from jacobi_forcing.viz.style import Figure


@dataclasses.dataclass(frozen=True)
class Table:
    """A table of text cells; one with a title is folded up under it until somebody asks."""

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    title: str = ""


@dataclasses.dataclass(frozen=True)
class Text:
    """A paragraph."""

    text: str


@dataclasses.dataclass(frozen=True)
class Items:
    """A list of sentences."""

    items: Sequence[str]


Block = Table | Text | Items | Figure


@dataclasses.dataclass(frozen=True)
class Section:
    """A part with a heading; without blocks there is nothing to tell."""

    title: str
    blocks: Sequence[Block]
