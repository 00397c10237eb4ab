"""The table of measured models, and the lines that say what it means."""

from __future__ import annotations

from typing import Any

from jacobi_forcing.bench.table import COLUMNS, LEGEND, notes, rows
from jacobi_forcing.cli.console import note, print_table


def show_models(models: list[dict[str, Any]], *, to_stderr: bool) -> None:
    """Print the table; the notes go to standard error."""
    print_table(COLUMNS, rows(models), to_stderr=to_stderr)
    for text in [LEGEND, *notes(models)]:
        note(text)
