"""What people see: progress and notes on standard error, results on standard output."""

from __future__ import annotations

import json
import logging
import os
import sys
import time
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table

from jacobi_forcing.recipe.reporter import Reporter

SILENCE = 30.0
"""Seconds between signs of life where standard error is no terminal, so that a bar cannot be drawn."""


def quiet() -> None:
    """Switch off the libraries' warnings and bars: what people need to know is said by this package."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"
    os.environ["HF_DATASETS_DISABLE_PROGRESS_BARS"] = "1"
    warnings.filterwarnings("ignore")
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
    """A console on the standard error of this moment (tests replace it)."""
    return Console(file=sys.stderr, highlight=False, soft_wrap=True)


def note(text: str) -> None:
    """One line for people."""
    stderr().print(f"[dim]{escape(text)}[/dim]")


def error_line(text: str) -> None:
    """The one line that says what is wrong."""
    stderr().print(f"[bold red]Error:[/bold red] {escape(text)}")


def print_json(value: Mapping[str, Any]) -> None:
    """One JSON object on one line of standard output."""
    print(json.dumps(value, ensure_ascii=False), flush=True)


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


class Bars(Reporter):
    """Draws a bar for the stage at work and leaves a line for each that is done."""

    def __init__(self) -> None:
        self.console = stderr()
        self._progress: Progress | None = None
        self._task: TaskID | None = None
        self._title = ""
        self._last = time.monotonic()

    def begin(self, stage: str, title: str) -> None:
        """Show the title."""
        self._stop()
        self._title = title
        if not self.console.is_terminal:
            self.console.print(f"{stage}: {title} …", markup=False)
            return
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("[dim]{task.fields[detail]}"),
            console=self.console,
            transient=True,
        )
        self._task = self._progress.add_task(title, total=None, detail="")
        self._progress.start()

    def progress(self, done: int, total: int, detail: str = "") -> None:
        """Move the bar."""
        if self._progress is not None and self._task is not None:
            self._progress.update(self._task, completed=done, total=total, detail=escape(detail))
        elif time.monotonic() - self._last > SILENCE:
            self._last = time.monotonic()
            self.console.print(f"  {done} of {total} {detail}", markup=False)

    def end(self, stage: str, summary: str) -> None:
        """Leave a line."""
        self._stop()
        self.console.print(f"[green]✓[/green] {stage}: {escape(summary)}")

    def skip(self, stage: str, summary: str) -> None:
        """Leave a line."""
        self.console.print(f"[dim]✓ {stage}: {escape(summary)} (done before)[/dim]")

    def note(self, text: str) -> None:
        """Leave a line."""
        self.console.print(f"  [dim]{escape(text)}[/dim]")

    def __enter__(self) -> Bars:
        return self

    def __exit__(self, *_: object) -> None:
        self._stop()

    def _stop(self) -> None:
        if self._progress is not None:
            self._progress.stop()
        self._progress, self._task = None, None
