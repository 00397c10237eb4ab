"""The built-in word problems: right, distinct, reproducible, and never on both sides of the split."""

from __future__ import annotations

import random
import re

import pytest

from jacobi_forcing.embedded.problems import (
    MAX_VALUE,
    Problem,
    extract_result,
    is_solved,
    make_problem,
    problems,
    split_of,
)

VERBS = "buys|finds|gets|wins|gives|loses|sells|uses|doubles|triples"
QUESTION = (
    "Omar has 21 pears. Omar triples the pears. Then Omar sells 60 pears. Then Omar doubles the pears. "
    "How many pears does Omar have now?"
)
ANSWER = (
    "First, Omar has 21 pears. Next, Omar triples the pears, so Omar now has 21 * 3 = 63 pears. Next, "
    "Omar sells 60 pears, so Omar now has 63 - 60 = 3 pears. Next, Omar doubles the pears, so Omar now "
    "has 3 * 2 = 6 pears. In the end, Omar has 6 pears. The answer is 6."
)


@pytest.fixture(scope="module")
def many() -> list[Problem]:
    return [*problems("train", seed=0, count=600), *problems("heldout", seed=0, count=100)]


def test_a_problem_reads_as_it_always_did() -> None:
    """A literal: another wording or generator would silently part from what the embedded model was trained on."""
    problem = make_problem(random.Random(0))
    assert problem.prompt == f"Question: {problem.question}\nAnswer:"
    assert problem.completion == f" {problem.answer}"
    assert problem.question == QUESTION
    assert problem.answer == ANSWER


def test_every_answer_computes_rightly_and_ends_with_the_result(many: list[Problem]) -> None:
    for problem in many:
        sums = re.findall(r"now has (\d+) ([-+*]) (\d+) = (\d+)", problem.answer)
        value = int(re.match(r"First, \w+ has (\d+)", problem.answer)[1])
        assert len(sums) == problem.steps
        for left, sign, right, result in sums:
            assert int(left) == value
            value = {"+": value + int(right), "-": value - int(right), "*": value * int(right)}[sign]
            assert int(result) == value
            assert 1 <= value <= MAX_VALUE
        assert value == problem.result
        assert problem.answer.endswith(f"The answer is {value}.")


def test_every_step_of_the_question_is_in_the_answer(many: list[Problem]) -> None:
    for problem in many:
        steps = re.findall(rf"(?:Then )?(\w+ (?:{VERBS})[^.]*)\.", problem.question)
        assert len(steps) == problem.steps
        for step in steps:
            assert f"Next, {step}, so" in problem.answer


def test_problems_have_two_to_four_steps_unless_told(many: list[Problem]) -> None:
    assert {problem.steps for problem in many} == {2, 3, 4}
    assert {problem.steps for problem in problems("train", seed=1, count=20, steps=5)} == {5}


def test_problems_are_distinct(many: list[Problem]) -> None:
    assert len({problem.question for problem in many}) == len(many)


def test_the_same_seed_gives_the_same_problems_and_another_does_not() -> None:
    first, again, other = (list(problems("train", seed=seed, count=20)) for seed in (0, 0, 1))
    assert first == again
    assert not {problem.question for problem in first} & {problem.question for problem in other}


def test_a_longer_run_starts_with_the_shorter_one() -> None:
    assert list(problems("train", seed=0, count=30))[:10] == list(problems("train", seed=0, count=10))


def test_no_seed_puts_a_held_out_problem_into_training() -> None:
    for seed in range(5):
        assert {split_of(problem.question) for problem in problems("train", seed, 50)} == {"train"}
        assert {split_of(problem.question) for problem in problems("heldout", seed, 50)} == {"heldout"}


def test_about_a_tenth_is_held_out() -> None:
    rng = random.Random(0)
    share = sum(split_of(make_problem(rng).question) == "heldout" for _ in range(2000)) / 2000
    assert 0.07 < share < 0.13


def test_an_endless_source_goes_on() -> None:
    source = problems("train", seed=0)
    assert len([next(source) for _ in range(50)]) == 50


@pytest.mark.parametrize(
    ("text", "result"),
    [
        ("In the end, Mia has 17 apples. The answer is 17.", 17),
        ("The answer is 5. No. The answer is 6.", 6),
        ("The answer is 17", 17),
        ("The answer is many.", None),
        ("17", None),
        ("", None),
    ],
)
def test_the_result_is_the_last_stated_answer(text: str, result: int | None) -> None:
    assert extract_result(text) == result


def test_only_the_right_number_solves() -> None:
    assert is_solved("The answer is 17.", 17)
    assert not is_solved("The answer is 170.", 17)
    assert not is_solved("The answer is 7.", 17)
    assert not is_solved("17", 17)


def test_reference_answers_solve_their_problems(many: list[Problem]) -> None:
    assert all(is_solved(problem.completion, problem.result) for problem in many)
