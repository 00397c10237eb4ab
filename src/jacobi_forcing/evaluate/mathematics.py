"""Grading of mathematical answers, by math-verify: two expressions that are equal are one answer."""

from __future__ import annotations

import contextlib
import logging
import threading
from typing import Any

from jacobi_forcing.errors import DataError, MissingExtraError
from jacobi_forcing.evaluate.code import after_thinking

_SECONDS = 5
"""Time for parsing and for comparing one answer; it needs the main thread, elsewhere there is no limit."""
_PLAIN = (
    "\\left",
    "\\right",
    "\\!",
    "\\,",
    "\\;",
    "\\text",
    "\\mathrm",
    "\\dfrac",
    "\\tfrac",
    "$",
    " ",
    "{",
    "}",
    "^\\circ",
)


def math_answer(text: str) -> list[Any]:
    """What an answer states last: a parsed expression and its text, or nothing.

    Raises:
        MissingExtraError: math-verify is not installed.
    """
    try:
        import math_verify
    except ImportError as error:
        raise MissingExtraError("math-verify", "eval") from error
    with _silence():
        found: list[Any] = math_verify.parse(after_thinking(text), parsing_timeout=_limit(), raise_on_error=False)
    return found


def same_mathematics(text: str, reference: str) -> bool:
    r"""Whether an answer equals the reference.

    Args:
        text: What the model wrote; the last `\boxed{}`, or else the last expression, counts.
        reference: A worked solution that ends in `\boxed{}`, or the bare answer in LaTeX.

    Raises:
        DataError: The reference states nothing.
        MissingExtraError: math-verify is not installed.
    """
    if not reference.strip():
        raise DataError("A reference answer is empty", expected="LaTeX", remedy="check answer_field")
    given = math_answer(text)
    stated = math_answer(reference if "\\boxed" in reference else f"$\\boxed{{{reference}}}$")
    import math_verify

    with _silence():
        if given and stated and math_verify.verify(stated, given, timeout_seconds=_limit(), raise_on_error=False):
            return True
    # Names and words are no expressions: there the texts are compared.
    wanted, found = _boxed(reference) or reference, _boxed(text)
    return found is not None and bool(_plain(found)) and _plain(found) == _plain(wanted)


def _limit() -> int | None:
    """math-verify keeps time by a signal, which only the main thread may set."""
    return _SECONDS if threading.current_thread() is threading.main_thread() else None


@contextlib.contextmanager
def _silence() -> Any:
    """It logs each expression that it cannot read."""
    logger = logging.getLogger("math_verify")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)


def _boxed(text: str) -> str | None:
    """What stands in the last box."""
    start = after_thinking(text).rfind("\\boxed{")
    if start < 0:
        return None
    rest, depth = after_thinking(text)[start + len("\\boxed{") :], 1
    for index, letter in enumerate(rest):
        depth += {"{": 1, "}": -1}.get(letter, 0)
        if not depth:
            return rest[:index]
    return None


def _plain(text: str) -> str:
    for piece in _PLAIN:
        text = text.replace(piece, "\\frac" if piece.endswith("frac") else "")
    return text.rstrip(".")
