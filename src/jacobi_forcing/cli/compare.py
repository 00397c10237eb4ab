"""`jforce compare`: two results of one kind."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from jacobi_forcing.cli import options
from jacobi_forcing.cli.console import error_line, note, print_json, print_table
from jacobi_forcing.formats import read_lines, read_result

BELOW = 3
"""Exit status where a bound is not met."""
Bounds = Annotated[
    list[str] | None,
    typer.Option(
        "--fail-below",
        help="Least value of a metric, as metric=number: ratios second/first tpf, tps and speedup (tps=0.95), the "
        "difference solved (solved=-0.02), the second's share exact (exact=1). Exit status 3 where one is not met. "
        "Repeatable.",
    ),
]
Only = Annotated[list[str] | None, typer.Option("--decoder", "-d", help="Compare this decoder only. Repeatable.")]


def compare(
    first: Annotated[Path, typer.Argument(help="Result file of jforce bench, eval or run: what was before.")],
    second: Annotated[Path, typer.Argument(help="One of the same kind and prompts: what is now.")],
    decoder: Only = None,
    fail_below: Bounds = None,
    json: options.Json = False,
) -> None:
    """Set two results side by side: tokens per forward, speed, quality with intervals, exactness.

    Results of unlike kinds, or on different prompts, are refused.
    """
    import dataclasses

    from jacobi_forcing.viz.compare import COLUMNS, bounds, failures, remarks, rows
    from jacobi_forcing.viz.compare import compare as set_against

    least = bounds(fail_below or [])
    found = set_against(read_result(first), read_result(second), (_items(first), _items(second)))
    if decoder:
        kept = [change for change in found.changes if change.first.decoder in decoder]
        found = dataclasses.replace(found, changes=kept)
    print_table(COLUMNS, rows(found), to_stderr=json)
    for text in remarks(found):
        note(text)
    failed = failures(found, least)
    if not found.changes and least:
        failed = ["nothing was compared"]
    for text in failed:
        error_line(text)
    if json:
        changes = [change.to_dict() for change in found.changes]
        print_json({"changes": changes, "notes": found.notes, "failures": failed})
    if failed:
        raise typer.Exit(BELOW)


def _items(path: Path) -> list[dict[str, Any]]:
    """The answers of an evaluation one by one, where they lie beside it."""
    beside = path.with_name("items.jsonl")
    return read_lines(beside, "eval-item") if beside.is_file() else []
