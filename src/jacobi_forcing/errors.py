"""Typed errors: each says what was seen, what was expected and how to mend it, in one line."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable

OK, FAULT, BAD_INPUT, INTERRUPTED = 0, 1, 2, 130
"""Exit statuses of a program."""


class JForceError(Exception):
    """Base of every error that this package raises on purpose.

    The command line prints it as one line and exits with status 2; a traceback is shown only with `--debug`.

    Args:
        message: What went wrong.
        seen: The offending value, if it helps.
        expected: What would have been right.
        remedy: What to do about it.
    """

    def __init__(
        self, message: str, *, seen: object = None, expected: object = None, remedy: str | None = None
    ) -> None:
        parts = [message.rstrip(".")]
        if seen is not None:
            parts.append(f"seen: {seen}")
        if expected is not None:
            parts.append(f"expected: {expected}")
        if remedy is not None:
            parts.append(remedy.rstrip("."))
        super().__init__("; ".join(parts) + ".")
        self.seen = seen
        self.expected = expected
        self.remedy = remedy


class ConfigError(JForceError, ValueError):
    """A setting is unknown, of the wrong type or out of range."""


class DataError(JForceError, ValueError):
    """Input data (prompts, responses, shards) cannot be used as it is."""


class ModelError(JForceError, ValueError):
    """A model or tokenizer cannot be loaded or does not fit the request."""


class CacheError(ModelError):
    """A model's cache cannot be rolled back, so it cannot verify a draft."""


class ArtefactError(JForceError):
    """A file or folder that this package wrote is missing, damaged or of another run."""


class CollapseError(JForceError):
    """A training has gone wrong beyond repair."""


class MissingExtraError(JForceError, ImportError):
    """An optional dependency is needed and not installed."""

    def __init__(self, package: str, extra: str) -> None:
        super().__init__(
            f"The package '{package}' is not installed",
            remedy=f"install it with: pip install 'jacobi-forcing[{extra}]'",
        )


def error_line(text: str) -> None:
    """The one line on standard error that says what is wrong."""
    print(f"Error: {text}", file=sys.stderr)


def guarded(work: Callable[[], int | None], *, say: Callable[[str], object] = error_line, debug: bool = False) -> int:
    """Run a program's work and turn its expected ends into exit statuses.

    Args:
        work: Returns an exit status, or None for 0.
        say: Prints what was wrong.
        debug: Let errors of this package pass, so that a traceback is shown.

    Returns:
        What `work` returned; 2 after a `JForceError` and one line; 130 after Ctrl-C. Other errors are faults and pass.
    """
    try:
        return work() or OK
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:  # the reader of our output has gone, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return OK
    except JForceError as error:
        if debug:
            raise
        say(str(error))
        return BAD_INPUT
