"""Graders: whether a text answers its prompt, given the reference."""

from __future__ import annotations

import ast
import dataclasses
import re
import typing
from decimal import Decimal, InvalidOperation

from jacobi_forcing.config import Task
from jacobi_forcing.embedded.problems import extract_result, is_solved
from jacobi_forcing.embedded.structured import examine, read_object
from jacobi_forcing.errors import DataError
from jacobi_forcing.evaluate.code import assertions_program
from jacobi_forcing.evaluate.mathematics import same_mathematics
from jacobi_forcing.evaluate.sandbox import run_program

_NUMBER = re.compile(r"(?<![\w.])([-−]?)[$€£]?([-−]?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?|[-−]?\.\d+)")
"""A number as people write it: an optional sign and currency, thousands with commas or not, an optional fraction."""
_MARKED = re.compile(r"####|\\boxed\s*\{|\banswer\b\s*(?:is|:|=|would be)", re.IGNORECASE)
"""What announces a final answer."""
_SENTENCE_END = re.compile(r"\n|[.!?](?:\s|$)")


def grade(task: Task, text: str, reference: str) -> bool:
    """Whether an answer is right.

    Args:
        task: `word_problems`: the number that the answer states last with "The answer is". `gsm8k`: see `final_number`.
            `orders`: the first JSON object of the text has the reference's keys and values, types included.
            `math`: equality by math-verify. `mbpp`: the reference's tests pass in the sandbox.
        text: What the model wrote, without the prompt.
        reference: The reference answer: a number, or a worked answer that ends with one; for `math` an expression, or
            a solution that ends in a box; for `mbpp` a list of assertions, as Python or JSON writes it.

    Raises:
        DataError: The reference holds no number, object, expression or assertion.
        MissingExtraError: math-verify is needed and not installed.
    """
    if task == "none":
        raise DataError("Nothing can be graded", seen="task: none", expected=", ".join(typing.get_args(Task)[1:]))
    if task == "math":
        return same_mathematics(text, reference)
    if task == "mbpp":
        return run_program(assertions_program(text, _assertions(reference))).passed
    if task == "word_problems":
        stated = extract_result(reference)
        return is_solved(text, int(_reference(reference)) if stated is None else stated)
    if task == "orders":
        return grade_parts(task, text, reference)["fields"]
    return final_number(text) == _reference(reference)


def grade_parts(task: Task, text: str, reference: str) -> dict[str, bool]:
    """The steps on the way to a right answer, each of which needs the one before; nothing for tasks without any.

    `orders`: `parses` (there is a JSON object), `schema` (with the reference's keys and types), `fields` (with its
    values: what `grade` asks for).

    Args:
        task: How answers are graded.
        text: What the model wrote, without the prompt.
        reference: The reference answer.

    Raises:
        DataError: The reference holds no object.
    """
    if task != "orders":
        return {}
    wanted = read_object(reference)
    if wanted is None:
        raise DataError("A reference answer holds no JSON object", seen=repr(reference[:80]))
    return dataclasses.asdict(examine(text, wanted))


def final_number(text: str) -> Decimal | None:
    r"""The number that an answer ends with.

    It is the first number behind the last `####`, `\boxed{` or "answer is" (behind the last equals sign of that
    sentence, where it holds a calculation); where none of these is followed by a number, it is the last one of the
    text. Currency signs, commas between thousands, units, full stops and bold marks around it do not matter, and 18,
    18.0 and 18.00 are one number.
    """
    text = text.replace("**", "").replace("\\$", "$").replace("\\!", "")
    for mark in reversed(list(_MARKED.finditer(text))):
        end = _SENTENCE_END.search(text, mark.end())
        equals = text.rfind("=", mark.end(), end.start() if end else len(text))
        found = _NUMBER.search(text, max(mark.end(), equals + 1))
        if found is not None:
            return _value(found)
    numbers = list(_NUMBER.finditer(text))
    return _value(numbers[-1]) if numbers else None


def _assertions(reference: str) -> list[str]:
    """The tests in a field that held a list, or text with one test a line."""
    try:
        found = ast.literal_eval(reference)
    except (ValueError, SyntaxError):
        found = reference.splitlines()
    tests = [str(test) for test in found if str(test).strip()] if isinstance(found, (list, tuple)) else []
    if not tests:
        raise DataError("A reference answer holds no test", seen=repr(reference[:80]), remedy="check answer_field")
    return tests


def _reference(reference: str) -> Decimal:
    number = final_number(reference)
    if number is None:
        raise DataError("A reference answer holds no number", seen=repr(reference[:80]), remedy="check answer_field")
    return number


def _value(match: re.Match[str]) -> Decimal | None:
    digits = (match[1] + match[2]).replace("−", "-").replace("--", "-").replace(",", "")
    try:
        return Decimal(digits)
    except InvalidOperation:
        return None
