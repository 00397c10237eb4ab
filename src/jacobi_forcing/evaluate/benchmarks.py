"""GSM8K, MATH, HumanEval and MBPP: how each asks, and how an answer to it is graded.

Everything that looks at a record's fields stands here, so that the harness, the check of the reference answers and
filters of collected answers grade alike.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from jacobi_forcing.errors import ConfigError, DataError
from jacobi_forcing.evaluate.code import (
    after_thinking,
    assertions_program,
    extract_code,
    function_program,
    name_under_test,
)
from jacobi_forcing.evaluate.mathematics import math_answer, same_mathematics
from jacobi_forcing.evaluate.sandbox import Isolation, SandboxLimits, run_program
from jacobi_forcing.evaluate.tasks import final_number, grade

Record = Mapping[str, Any]
"""One row of a data set."""


@dataclasses.dataclass(frozen=True)
class Grade:
    """What an answer is worth.

    Attributes:
        right: Whether it is right.
        answer: What was graded: a number, an expression, or the source that was run.
        detail: Why it is wrong, where more can be said than that it differs.
        isolation: The walls around the code that was run; None where none was.
    """

    right: bool
    answer: str
    detail: str = ""
    isolation: Isolation | None = None


@dataclasses.dataclass(frozen=True)
class Benchmark:
    """A data set, its prompts and its grader.

    Attributes:
        name: As `--tasks` names it.
        path, subset, split: Where the hub has it.
        fields: What a record must have; for some, one of several names.
        max_new_tokens: Longest answer by default, tokens.
        until: What ends an answer to a raw prompt, beside the end token.
        ask: The prompt of a record, for a chat template (True) or raw.
        reference: The data set's own answer, as a model would give it.
        grade: Grades an answer.
    """

    name: str
    path: str
    subset: str | None
    split: str
    fields: tuple[tuple[str, ...], ...]
    max_new_tokens: int
    until: tuple[str, ...]
    ask: Callable[[Record, bool], str]
    reference: Callable[[Record], str]
    grade: Callable[[Record, str, SandboxLimits | None], Grade]

    def check(self, record: Any, where: str) -> None:
        """Refuse a record that lacks a field.

        Raises:
            DataError: It does.
        """
        if not isinstance(record, Mapping):
            raise DataError(f"{where} is not an object", seen=type(record).__name__, expected='{"key": value, ...}')
        for names in self.fields:
            if all(record.get(name) is None for name in names):
                raise DataError(
                    f"{where} lacks '{names[0]}', which {self.name} needs",
                    seen=", ".join(map(str, record)),
                    expected=" or ".join(names),
                )


def benchmark(name: str) -> Benchmark:
    """The benchmark of a name.

    Raises:
        ConfigError: There is none.
    """
    found = next((entry for entry in BENCHMARKS if entry.name == name), None)
    if found is None:
        raise ConfigError(f"There is no task '{name}'", expected="one of " + ", ".join(e.name for e in BENCHMARKS))
    return found


# GSM8K and MATH ---------------------------------------------------------------------------------------------------


def _ask_gsm8k(record: Record, chat: bool) -> str:
    if chat:
        return f"{record['question']}\nThink step by step, and end with a line that says: #### and the final number."
    return f"Question: {record['question']}\nAnswer:"


def _grade_gsm8k(record: Record, text: str, limits: SandboxLimits | None) -> Grade:
    text = after_thinking(text)
    number = final_number(text)
    return Grade(grade("gsm8k", text, record["answer"]), "" if number is None else str(number))


def _ask_math(record: Record, chat: bool) -> str:
    if chat:
        return f"{record['problem']}\nThink step by step, and put the final answer within \\boxed{{}}."
    return f"Problem:\n{record['problem']}\n\nSolution:"


def _math_reference(record: Record) -> str:
    answer = record.get("answer")
    return str(record["solution"] if answer is None else answer)


def _grade_math(record: Record, text: str, limits: SandboxLimits | None) -> Grade:
    found = math_answer(text)
    return Grade(same_mathematics(text, _math_reference(record)), str(found[-1]) if found else "")


# HumanEval and MBPP -----------------------------------------------------------------------------------------------


def _ask_humaneval(record: Record, chat: bool) -> str:
    if chat:
        return f"Complete this Python function. Answer with the whole function.\n```python\n{record['prompt']}```"
    return str(record["prompt"])


def _grade_humaneval(record: Record, text: str, limits: SandboxLimits | None) -> Grade:
    name = record["entry_point"]
    program = function_program(record["prompt"], text, name, record["test"])
    return _run(program, extract_code(text, name), limits)


def _mbpp_question(record: Record) -> str:
    return str(record["text"] if record.get("text") is not None else record["prompt"])


def _ask_mbpp(record: Record, chat: bool) -> str:
    tests = "\n".join(record["test_list"])
    if chat:
        return f"{_mbpp_question(record)}\nYour Python code should pass these tests:\n```python\n{tests}\n```"
    return f'"""\n{_mbpp_question(record)}\n\n{tests}\n"""\n'


def _grade_mbpp(record: Record, text: str, limits: SandboxLimits | None) -> Grade:
    setup = "\n".join([record.get("test_setup_code") or "", *(record.get("test_imports") or ())])
    tests = list(record["test_list"])
    return _run(assertions_program(text, tests, setup), extract_code(text, name_under_test(tests)), limits)


def _run(program: str, code: str, limits: SandboxLimits | None) -> Grade:
    outcome = run_program(program, limits)
    detail = "" if outcome.passed else f"{outcome.status}: {outcome.detail}"
    return Grade(outcome.passed, code, detail, outcome.isolation)


_TOP = ("\ndef ", "\nclass ", "\n#", "\nif ", "\nprint(", "\n```")
"""What begins the next thing at the top of a file, behind a function that is complete."""

BENCHMARKS = (
    Benchmark(
        "gsm8k",
        "openai/gsm8k",
        "main",
        "test",
        (("question",), ("answer",)),
        512,
        ("Question:",),
        _ask_gsm8k,
        lambda record: str(record["answer"]),
        _grade_gsm8k,
    ),
    Benchmark(
        "math",
        "HuggingFaceH4/MATH-500",
        None,
        "test",
        (("problem",), ("answer", "solution")),
        1024,
        ("Problem:",),
        _ask_math,
        lambda record: str(record.get("solution") or f"\\boxed{{{record['answer']}}}"),
        _grade_math,
    ),
    Benchmark(
        "humaneval",
        "openai/openai_humaneval",
        None,
        "test",
        (("prompt",), ("test",), ("entry_point",)),
        768,
        _TOP,
        _ask_humaneval,
        lambda record: str(record["canonical_solution"]),
        _grade_humaneval,
    ),
    Benchmark(
        "mbpp",
        "google-research-datasets/mbpp",
        "sanitized",
        "test",
        (("text", "prompt"), ("test_list",)),
        768,
        ('\n"""', "\nassert ", "\n```"),
        _ask_mbpp,
        lambda record: str(record["code"]),
        _grade_mbpp,
    ),
)
