"""`jforce run`: a whole recipe."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from jacobi_forcing.cli import options
from jacobi_forcing.cli.console import note, print_json
from jacobi_forcing.config import RecipeConfig

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
    settings, report = run_and_show(recipe, overrides, output, fresh=fresh, redo=redo, to_stderr=json)
    note_places(settings)
    if json:
        print_json({**report, "output": settings.output})


def run_and_show(
    recipe: str, overrides: list[str] | None, output: Path | None, *, fresh: bool, redo: str | None, to_stderr: bool
) -> tuple[RecipeConfig, dict[str, Any]]:
    """Run a recipe and show its table; returns its settings and its report."""
    from jacobi_forcing.cli.tables import show_models

    settings, report = run_quietly(recipe, overrides or [], output, fresh=fresh, redo=redo)
    if report["models"]:
        show_models(report["models"], to_stderr=to_stderr)
    return settings, report


def run_quietly(
    recipe: str, overrides: list[str], output: Path | None, *, fresh: bool, redo: str | None
) -> tuple[RecipeConfig, dict[str, Any]]:
    """Run a recipe, with progress and without a table."""
    from jacobi_forcing.cli.bars import Bars
    from jacobi_forcing.recipe import load_recipe, run_recipe

    settings = load_recipe(recipe, overrides, output)
    with Bars() as bars:
        return settings, run_recipe(settings, fresh=fresh, redo=redo, reporter=bars)


def note_places(settings: RecipeConfig) -> None:
    """Say where a run has left its model and report."""
    note(f"Model: {Path(settings.output) / 'model'}   report: {Path(settings.output) / 'report.json'}")
    note(f"As one page, with figures: jforce report {settings.output}")
