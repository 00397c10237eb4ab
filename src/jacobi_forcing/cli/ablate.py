"""`jforce ablate`: a grid of recipes that differ in named keys, and one table."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from jacobi_forcing.cli import options
from jacobi_forcing.cli.console import note, print_json, print_table


def ablate(
    grid: Annotated[str, typer.Argument(help="Grid file, or the name of one that ships with the package.")],
    overrides: Annotated[
        list[str] | None,
        typer.Option("--set", help="Replace one key of the grid: train_tokens=100000, seeds=[0]. May be repeated."),
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Folder of the grid.", show_default="output of the grid")
    ] = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Throw away what an earlier call left in the folder.")] = False,
    json: options.Json = False,
) -> None:
    """Run recipes that differ in named keys, each with several seeds, and set them side by side.

    Finished runs are kept, and a run that was killed goes on where it was. Tokens per forward and quality are counted
    on the held-out prompts of the base recipe; nothing is timed but core-seconds. docs/ablations.md tells what the
    shipped grids vary.
    """
    from jacobi_forcing.ablate import load_grid, run_grid
    from jacobi_forcing.ablate.table import LEGEND, columns, rows
    from jacobi_forcing.cli.bars import Bars

    settings, recipe = load_grid(grid, overrides or [], output)
    with Bars() as bars:
        report = run_grid(settings, recipe, fresh=fresh, reporter=bars)
    print_table(columns(report), rows(report), to_stderr=json)
    note(LEGEND)
    folder = Path(settings.output)
    note(f"Table: {folder / 'table.md'}   figures: {folder / 'ablation.json'}")
    if json:
        print_json({**report, "output": settings.output})
