"""Graders of the benchmarks: reference answers are right, other writings of them too, and nothing else."""

from __future__ import annotations

from typing import Any

import pytest

from jacobi_forcing.errors import ConfigError, DataError
from jacobi_forcing.evaluate import BENCHMARKS, benchmark, grade
from jacobi_forcing.evaluate.mathematics import same_mathematics

RECORDS: dict[str, dict[str, Any]] = {
    "gsm8k": {"question": "How many are 48 and 24?", "answer": "48+24 = <<48+24=72>>72.\n#### 72"},
    "math": {"problem": "Halve $\\pi$.", "solution": "It is $\\boxed{\\frac{\\pi}{2}}.$", "answer": "\\frac{\\pi}{2}"},
    "humaneval": {
        "prompt": 'def one():\n    """ One. """\n',
        "entry_point": "one",
        "canonical_solution": "    return 1\n",
        "test": "def check(candidate):\n    assert candidate() == 1\n",
    },
    "mbpp": {"text": "Give one.", "code": "def one():\n    return 1", "test_list": ["assert one() == 1"]},
}


@pytest.mark.parametrize("name", RECORDS)
def test_the_reference_answer_is_right_and_nothing_is_not(name: str) -> None:
    task, record = benchmark(name), RECORDS[name]
    task.check(record, "line 1")
    assert task.grade(record, task.reference(record), None).right
    assert not task.grade(record, "", None).right
    for chat in (True, False):
        question = task.ask(record, chat)
        assert question and task.reference(record) not in question


@pytest.mark.parametrize(
    ("text", "right"),
    [
        ("so \\boxed{\\pi/2}", True),
        ("so $\\boxed{0.5\\pi}$.", True),
        ("The answer is $\\frac{\\pi}{2}$.", True),
        ("<think>\\boxed{3}</think> It is \\boxed{\\tfrac{\\pi}{2}}", True),
        ("\\boxed{\\pi}", False),
        ("\\boxed{\\frac{\\pi}{2}} no, \\boxed{\\pi}", False),
        ("pi halves", False),
    ],
)
def test_mathematics_is_compared_by_value(text: str, right: bool) -> None:
    assert same_mathematics(text, "\\frac{\\pi}{2}") is right
    assert same_mathematics(text, "thus $\\boxed{\\frac{\\pi}{2}}$") is right
    assert grade("math", text, "\\frac{\\pi}{2}") is right


@pytest.mark.parametrize(
    ("text", "reference", "right"),
    [
        ("\\boxed{Evelyn}", "\\text{Evelyn}", True),
        ("\\boxed{\\text{Ann}}", "\\text{Evelyn}", False),
        ("\\boxed{(3, \\frac{\\pi}{2})}", "\\left( 3, \\frac{\\pi}{2} \\right)", True),
        ("\\boxed{(\\frac{\\pi}{2}, 3)}", "\\left( 3, \\frac{\\pi}{2} \\right)", False),
        ("\\boxed{10\\%}", "10\\%", True),
        ("\\boxed{1,000}", "1000", True),
        ("\\boxed{", "3", False),
    ],
)
def test_names_tuples_and_units_are_mathematics_too(text: str, reference: str, right: bool) -> None:
    assert same_mathematics(text, reference) is right


@pytest.mark.parametrize("tests", ['["assert one() == 1"]', "['assert one() == 1']", "assert one() == 1\n"])
def test_a_recipes_references_may_be_tests(tests: str) -> None:
    assert grade("mbpp", "```python\ndef one():\n    return 1\n```", tests)
    assert not grade("mbpp", "```python\ndef one():\n    return 2\n```", tests)


@pytest.mark.parametrize(("task", "reference"), [("mbpp", "[]"), ("mbpp", ""), ("math", " ")])
def test_a_reference_that_says_nothing_is_an_error(task: Any, reference: str) -> None:
    with pytest.raises(DataError, match="A reference answer"):
        grade(task, "x", reference)


@pytest.mark.parametrize("name", RECORDS)
def test_a_record_without_a_field_is_refused_by_name(name: str) -> None:
    task = benchmark(name)
    for names in task.fields:
        record = {key: value for key, value in RECORDS[name].items() if key not in names}
        with pytest.raises(DataError, match=f"line 3 lacks '{names[0]}'"):
            task.check(record, "line 3")
    with pytest.raises(DataError, match="not an object"):
        task.check([], "line 1")


def test_an_unknown_task_names_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="gsm8k, math, humaneval, mbpp"):
        benchmark("mmlu")
    assert [entry.name for entry in BENCHMARKS] == list(RECORDS)
