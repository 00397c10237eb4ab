"""A report as one page of HTML that needs nothing else."""

from __future__ import annotations

import importlib.resources
import itertools
import re
from collections.abc import Sequence
from html import escape

from jacobi_forcing.viz.gather import Found
from jacobi_forcing.viz.page import fill
from jacobi_forcing.viz.parts import Block, Items, Section, Table, Text
from jacobi_forcing.viz.sections import Report
from jacobi_forcing.viz.style import Figure, sample

_NUMBER = re.compile(r"[+-]?[\d,.]*\d(?:e[+-]?\d+)?( ?[×%]| ms| s)?( of \d+)?( \(n=\d+\))?|\d+/\d+|–")
_FOLDED = 8
"""Items above which a list is folded."""
_LONG = 40
"""Characters from which on a cell may be folded."""


def page(found: Found, report: Report) -> str:
    """The page of a report."""
    template = (importlib.resources.files(__package__) / "report.html").read_text(encoding="utf-8")
    links = "".join(f'<a href="#{_anchor(section.title)}">{escape(section.title)}</a>' for section in report.sections)
    missing = report.missing or ["Nothing is missing."]
    return fill(
        template,
        title=escape(f"What was gained: {found.name}"),
        about=escape(about(found)),
        contents=links + '<a href="#missing">What is not in here</a>',
        verdicts="\n".join(f"<p>{escape(text)}</p>" for text in report.verdicts)
        or "<p>Nothing was measured, so nothing can be said about a speed-up.</p>",
        sections="\n".join(map(_section, report.sections)),
        missing=_block(Items(missing)),
    )


def about(found: Found) -> str:
    """What the report is about, in one line."""
    if found.run is None:
        return "Results of: " + ", ".join(sorted(found.results))
    recipe = found.run["recipe"]
    rounds = ", then ".join(f"{entry['steps']} steps at n={entry['block_size']}" for entry in recipe["rounds"])
    return f"{recipe['model']['name']}, mode {recipe.get('mode', 'full')}: {rounds}"


def _section(section: Section) -> str:
    parts = [f'<h2 id="{_anchor(section.title)}">{escape(section.title)}</h2>']
    for drawn, group in itertools.groupby(section.blocks, key=lambda block: isinstance(block, Figure)):
        blocks = "\n".join(map(_block, group))
        parts.append(f'<div class="figures">\n{blocks}\n</div>' if drawn else blocks)
    return "\n".join(parts)


def _anchor(title: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", title.lower()).strip("-")


def _block(block: Block) -> str:
    if isinstance(block, Figure):
        key = "".join(f"<li>{sample(series)}{escape(name)}</li>" for series, name in enumerate(block.key))
        below = f'<ul class="key">{key}</ul>' if key else ""
        return f"<figure><figcaption>{escape(block.title)}</figcaption>\n{block.svg}{below}</figure>"
    if isinstance(block, Table):
        table = _table(block.columns, block.rows)
        return f"<details><summary>{escape(block.title)}</summary>{table}</details>" if block.title else table
    if isinstance(block, Text):
        return f"<p>{escape(block.text)}</p>"
    return _items(block.items)


def _items(items: Sequence[str]) -> str:
    """A list; a long one is folded."""
    listed = "<ul>" + "".join(f"<li>{escape(item)}</li>" for item in items) + "</ul>" if items else ""
    return f"<details><summary>{len(items)} remarks</summary>{listed}</details>" if len(items) > _FOLDED else listed


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    numeric = [
        all(_NUMBER.fullmatch(row[place]) for row in rows) and any(row[place] != "–" for row in rows)
        for place in range(len(columns))
    ]
    head = "".join(f"<th{_class(numeric[place], name)}>{escape(name)}</th>" for place, name in enumerate(columns))
    body = "\n".join(
        "<tr>"
        + "".join(f"<td{_class(numeric[place], cell)}>{escape(cell)}</td>" for place, cell in enumerate(row))
        + "</tr>"
        for row in rows
    )
    return (
        f'<div class="scroll" tabindex="0"><table><thead><tr>{head}</tr></thead>\n<tbody>{body}</tbody></table></div>'
    )


def _class(number: bool, cell: str) -> str:
    return ' class="number"' if number else ' class="long"' if len(cell) > _LONG else ""
