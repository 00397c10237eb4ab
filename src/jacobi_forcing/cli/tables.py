"""The tables of measured models, and the lines that say what they mean."""

from __future__ import annotations

from typing import Any

from jacobi_forcing.bench.details import details as small_tables
from jacobi_forcing.bench.details import overhead
from jacobi_forcing.bench.table import LEGEND, columns, notes, rows
from jacobi_forcing.cli.console import note, print_table, print_text


def show_models(models: list[dict[str, Any]], *, to_stderr: bool, details: bool = False) -> None:
    """Print the table, and smaller ones where there are any; the notes go to standard error.

    Args:
        models: `ModelResult.to_dict()` of each.
        to_stderr: Keep standard output free.
        details: Also show how far drafts were right, and which lines won.
    """
    print_table(columns(models), rows(models), to_stderr=to_stderr)
    for table in [*(small_tables(models) if details else []), *overhead(models)]:
        print_text(f"\n{table.title}", to_stderr=to_stderr)
        print_table(table.columns, table.rows, to_stderr=to_stderr)
    for text in [LEGEND, *notes(models)]:
        note(text)
