"""What a run tells while it works. This one keeps silent; the command line draws bars."""

from __future__ import annotations


class Reporter:
    """Told about stages, in order; a subclass shows what it likes."""

    def begin(self, stage: str, title: str) -> None:
        """A stage starts or goes on."""

    def progress(self, done: int, total: int, detail: str = "") -> None:
        """The current stage has done `done` of `total` pieces of work."""

    def end(self, stage: str, summary: str) -> None:
        """The current stage has ended."""

    def skip(self, stage: str, summary: str) -> None:
        """A stage was done before and is kept."""

    def note(self, text: str) -> None:
        """Something worth a line."""
