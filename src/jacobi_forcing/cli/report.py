"""`jforce report`: one page and one model card out of a run's files."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from jacobi_forcing.cli import options
from jacobi_forcing.cli.console import note, print_json, print_text

PAGE, CARD = "report.html", "MODEL_CARD.md"
With = Annotated[
    list[Path] | None,
    typer.Option(
        "--with", help="A result file from elsewhere to tell of too, such as one of `jforce bench`. Repeatable."
    ),
]
Output = Annotated[Path | None, typer.Option("--output", "-o", help="Where both go.", show_default="the folder itself")]


def report(
    folder: Annotated[Path, typer.Argument(help="Output of `jforce run`, or a folder of result files.")],
    extra: With = None,
    output: Output = None,
    json: options.Json = False,
) -> None:
    """Write what was gained: report.html, with tables and figures, and, of a run, MODEL_CARD.md.

    Everything comes out of the files that are there; what was not measured is named.
    """
    from jacobi_forcing.files import write_text
    from jacobi_forcing.viz.card import card
    from jacobi_forcing.viz.gather import gather
    from jacobi_forcing.viz.report_page import page
    from jacobi_forcing.viz.sections import build

    found = gather(folder, extra or ())
    built = build(found)
    place = output or folder
    written = [write_text(place / PAGE, page(found, built))]
    if found.run is not None:
        written.append(write_text(place / CARD, card(found, built)))
    for text in [*built.verdicts, *(f"Missing: {text}" for text in built.missing), *found.notes]:
        note(text)
    if json:
        print_json({"files": [str(path) for path in written], "verdicts": built.verdicts, "missing": built.missing})
        return
    for path in written:
        print_text(str(path))
