"""Time limits for parts of a script, and how fast the work inside them goes."""

from __future__ import annotations

import contextlib
import signal
import sys
import time
from collections.abc import Iterator
from typing import Any

from jacobi_forcing.recipe.reporter import Reporter


class OutOfTimeError(BaseException):
    """A part has used up its time. No `Exception`, so that nothing on the way takes it for a fault of its own."""


@contextlib.contextmanager
def within(seconds: float) -> Iterator[None]:
    """Interrupt the block once `seconds` have passed, wherever it is."""

    def stop(signum: int, frame: Any) -> None:
        raise OutOfTimeError(f"cut short after {seconds:.0f} s")

    handler = signal.signal(signal.SIGALRM, stop)
    # Again every five seconds: an error inside a destructor is only printed.
    left, _ = signal.setitimer(signal.ITIMER_REAL, max(seconds, 0.01), 5.0)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)
        signal.setitimer(signal.ITIMER_REAL, left)


class Pace(Reporter):
    """Tells what goes on, and how long one piece of the last work took."""

    def __init__(self) -> None:
        self.marks: list[tuple[float, int]] = []
        self.total = 0

    def begin(self, stage: str, title: str) -> None:
        """A stage starts."""
        print(f"  {title}", file=sys.stderr, flush=True)

    def progress(self, done: int, total: int, detail: str = "") -> None:
        """Note the time."""
        if total != self.total or (self.marks and done <= self.marks[-1][1]):
            self.marks = []
        self.total = total
        self.marks.append((time.perf_counter(), done))

    @property
    def seconds(self) -> float | None:
        """Seconds a piece, the first third left out as warm-up; None where too few were seen."""
        kept = self.marks[len(self.marks) // 3 :]
        return (kept[-1][0] - kept[0][0]) / (kept[-1][1] - kept[0][1]) if len(kept) > 1 else None
