"""`jforce run`: a whole recipe."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from jacobi_forcing.bench.table import COLUMNS, LEGEND, notes, rows
from jacobi_forcing.cli import options
from jacobi_forcing.cli.console import Bars, note, print_json, print_table
from jacobi_forcing.recipe import load_recipe, run_recipe

Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", help="Replace one setting: key.path=value, such as rounds.0.steps=50. May be repeated."),
]
Output = Annotated[
    Path | None, typer.Option("--output", "-o", help="Folder of the run.", show_default="output of the recipe")
]
Fresh = Annotated[bool, typer.Option("--fresh", help="Throw away what an earlier run left in the folder.")]
Redo = Annotated[
    str | None, typer.Option(help="Do this stage anew and all that follow, such as train-2; keep what comes before.")
]


def run(
    recipe: Annotated[str, typer.Argument(help="Recipe file, or the name of one that ships with the package.")],
    overrides: Overrides = None,
    output: Output = None,
    fresh: Fresh = False,
    redo: Redo = None,
    json: options.Json = False,
) -> None:
    """Run a recipe: rounds of collecting and training, then what was gained. Goes on where it was stopped.

    Paths in a recipe are relative to the working folder.
    """
    settings = load_recipe(recipe, overrides or [], output)
    with Bars() as bars:
        report = run_recipe(settings, fresh=fresh, redo=redo, reporter=bars)
    show_report(report, to_stderr=json)
    note(f"Model: {Path(settings.output) / 'model'}   report: {Path(settings.output) / 'report.json'}")
    if json:
        print_json({**report, "output": settings.output})


def show_report(report: dict[str, Any], *, to_stderr: bool) -> None:
    """The table of a run, and what it means."""
    if report["models"]:
        print_table(COLUMNS, rows(report["models"]), to_stderr=to_stderr)
        for text in [LEGEND, *notes(report["models"])]:
            note(text)
