"""Progress on standard error: a bar for the stage at work, a line for each that is done."""

from __future__ import annotations

import time

from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from jacobi_forcing.cli.console import stderr
from jacobi_forcing.recipe.reporter import Reporter

SILENCE = 30.0
"""Seconds between signs of life where standard error is no terminal, so that a bar cannot be drawn."""


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
