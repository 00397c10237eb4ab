"""What people see: notes on standard error, results on standard output."""

from __future__ import annotations

import json
import logging
import os
import sys
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from jacobi_forcing.processes import is_main


def quiet() -> None:
    """Switch off the libraries' warnings and bars: what people need to know is said by this package."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"
    os.environ["HF_DATASETS_DISABLE_PROGRESS_BARS"] = "1"
    os.environ["TRANSFORMERS_VERBOSITY"] = "error"
    warnings.filterwarnings("ignore")
    if "transformers" in sys.modules:  # it has read these variables already, when it was imported
        import transformers

        transformers.logging.set_verbosity_error()
        transformers.logging.disable_progress_bar()
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)
    own = logging.getLogger("jacobi_forcing")
    own.setLevel(logging.INFO)
    own.handlers = [handler for handler in own.handlers if not isinstance(handler, _Once)] + [_Once()]


class _Once(logging.Handler):
    """Prints each message of this package once, however many stages repeat it."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self._seen: set[str] = set()

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        if text not in self._seen:
            self._seen.add(text)
            note(text)


def stderr() -> Console:
    """A console on the standard error of this moment (tests replace it); silent but in the main process."""
    return Console(file=sys.stderr, highlight=False, soft_wrap=True, quiet=not is_main())


def note(text: str) -> None:
    """One line for people."""
    stderr().print(f"[dim]{escape(text)}[/dim]")


def error_line(text: str) -> None:
    """The one line that says what is wrong."""
    # Whichever process it is: the others may know nothing of it.
    console = stderr()
    console.quiet = False
    console.print(f"[bold red]Error:[/bold red] {escape(text)}")


def print_json(value: Mapping[str, Any]) -> None:
    """One JSON object on one line of standard output."""
    print(json.dumps(value, ensure_ascii=False), flush=True)


def print_report(report: Mapping[str, Any], *, json: bool) -> None:
    """The JSON line under a measurement's table: for programs, so a terminal gets it only where it was asked for."""
    if json or not sys.stdout.isatty():
        print_json(report)


def print_text(text: str, *, to_stderr: bool = False) -> None:
    """A result as it is, without markup."""
    print(text, file=sys.stderr if to_stderr else sys.stdout, flush=True)


def print_result(text: str, figures: Mapping[str, Any], *, json: bool) -> None:
    """What a verb hands on: one line of text, or all its figures as JSON."""
    if json:
        print_json(figures)
    else:
        print_text(text)


def print_table(columns: Sequence[str], rows: Sequence[Sequence[str]], *, to_stderr: bool = False) -> None:
    """A table for people; figures stand right."""
    table = Table(*columns, header_style="bold", box=None, pad_edge=False)
    for column in table.columns[2:]:
        column.justify = "right"
    for row in rows:
        table.add_row(*map(escape, row))
    # A table that is piped must not be folded to the width of no terminal.
    file = sys.stderr if to_stderr else sys.stdout
    Console(file=file, highlight=False, width=None if file.isatty() else 160).print(table)
