"""A right solution scores whatever it is wrapped in, and a wrong one never does."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from jacobi_forcing.evaluate import benchmark
from jacobi_forcing.evaluate.code import assertions_program, defines, extract_code, function_program, name_under_test

HUMANEVAL = {
    "task_id": "HumanEval/900",
    "prompt": "from typing import List\n\n\ndef half(value):\n    return value / 2\n\n\n"
    'def middle(numbers: List[float]) -> float:\n    """ The middle of sorted numbers.\n'
    '    >>> middle([1, 2, 3])\n    2\n    """\n',
    "entry_point": "middle",
    "canonical_solution": "    numbers = sorted(numbers)\n    n = len(numbers)\n    if n % 2:\n"
    "        return numbers[n // 2]\n\n    return half(numbers[n // 2 - 1] + numbers[n // 2])\n",
    "test": "\n\nMETADATA = {}\n\n\ndef check(candidate):\n    assert candidate([3, 1, 2]) == 2\n"
    "    assert candidate([4, 1]) == 2.5\n",
}
MBPP = {
    "task_id": 900,
    "text": "Write a function to add the squares of the numbers up to n.",
    "code": "import math\r\ndef squares(n):\r\n    total = 0\r\n    for i in range(n + 1):\r\n"
    "        total += i * i\r\n\r\n    return math.floor(total)",
    "test_list": ["assert squares(3) == 14", "assert math.isclose(squares(0), 0)"],
}
WHOLE = HUMANEVAL["prompt"].split("def half")[0] + HUMANEVAL["prompt"].rpartition("\n\n\n")[2]
SOLUTIONS = {
    "humaneval": WHOLE.split('    """')[0].strip() + "\n" + HUMANEVAL["canonical_solution"],
    "mbpp": MBPP["code"].replace("\r\n", "\n"),
}
RECORDS = {"humaneval": HUMANEVAL, "mbpp": MBPP}


def indented(code: str) -> str:
    return "\n".join("   " + line for line in f"```python\n{code}\n```".split("\n"))


FENCES: dict[str, Callable[[str], str]] = {
    "python": lambda code: f"```python\n{code}\n```",
    "py": lambda code: f"```py\n{code}```\n" if code.endswith("\n") else f"```py\n{code}\n```\n",
    "bare": lambda code: f"```\n{code}\n```",
    "tildes": lambda code: f"~~~python\n{code}\n~~~",
    "none": lambda code: f"\n{code}\n",
    "prose around": lambda code: f"Sure! Here is how:\n\n```python\n{code}\n```\n\nIt takes O(n) time, as `n` grows.",
    "unclosed": lambda code: f"Here is the solution:\n```python\n{code}",
    "indented": lambda code: f"1. First we define it:\n\n{indented(code)}\n\n2. Done.",
    "several": lambda code: (
        "Run this first:\n```bash\npip install nothing\n```\nThen the tests:\n```python\nassert undefined(1)\n```\n"
        f"```python\n{code}\n```\nUse it so:\n```python\nprint(undefined)\n```"
    ),
    "no fence, prose around": lambda code: (
        f"Here is the function.\n\n{code}\n\nThis function works well because of math."
    ),
    "capital, attributes": lambda code: f'```Python title="a.py"\n{code}\n```',
    "windows": lambda code: f"```python\r\n{code}\r\n```".replace("\r\n", "\n").replace("\n", "\r\n"),
    "thinking": lambda code: f"<think>\n```python\ndef middle(x):\n    return 0\n```\n</think>\n```python\n{code}\n```",
}


@pytest.mark.parametrize("fence", FENCES)
@pytest.mark.parametrize("name", ["humaneval", "mbpp"])
def test_a_right_solution_passes_in_every_fence_and_a_wrong_one_in_none(name: str, fence: str) -> None:
    grader, record, code = benchmark(name).grade, RECORDS[name], SOLUTIONS[name]
    right = grader(record, FENCES[fence](code), None)
    assert right.right, f"{right.detail}\n{right.answer}"
    wrong = grader(record, FENCES[fence](code.replace("return", "return 1 +")), None)
    assert not wrong.right and wrong.detail.startswith("failed: AssertionError")


BODY = HUMANEVAL["canonical_solution"]
COMPLETIONS = {
    "as it is": BODY,
    "then the next function": BODY + "\n\ndef other(x):\n    return undefined\n",
    "then prose": BODY + "\nThis returns the middle.\n",
    "stripped": BODY.strip(),
    "dedented": "\n".join(line.removeprefix("    ") for line in BODY.split("\n")),
    "in a fence": f"```python\n{BODY}```",
    "in an unclosed fence": f"Here is the body:\n```python\n{BODY}",
    "cut off in a line": BODY + "    if numbers[",
}


@pytest.mark.parametrize("completion", COMPLETIONS)
def test_the_body_alone_completes_the_prompt(completion: str) -> None:
    grade = benchmark("humaneval").grade(HUMANEVAL, COMPLETIONS[completion], None)
    assert grade.right, grade.detail


@pytest.mark.parametrize("name", ["humaneval", "mbpp"])
@pytest.mark.parametrize(
    "text", ["", "I cannot do that.", "```python\n```", "```", "def", "    pass", "```python\npass"]
)
def test_nothing_is_no_solution(name: str, text: str) -> None:
    assert not benchmark(name).grade(RECORDS[name], text, None).right


def test_helpers_in_earlier_blocks_come_along_and_what_they_do_does_not() -> None:
    helper = "import math\nprint(undefined)\ndef h(x):\n    return x"
    text = f"```python\n{helper}\n```\nand\n```python\ndef f(x):\n    return h(x)\n```"
    code = extract_code(text, "f")
    assert "import math" in code and "def h" in code and "undefined" not in code
    assert defines(code, "f")


def test_the_first_block_that_defines_the_function_counts() -> None:
    assert extract_code("```\nf = 1\n```\n```\ndef f(): return 2\n```", "f") == "f = 1"
    assert "return 2" in extract_code("```\ng = 1\n```\n```\ndef f(): return 2\n```", "f")


def test_the_function_that_tests_are_about_is_the_one_they_call() -> None:
    assert name_under_test(["assert set(similar((1, 2))) == set((1,))", "assert similar(()) == ()"]) == "similar"
    assert name_under_test(["assert math.isclose(area(2), 4.0)"]) == "area"
    assert name_under_test(["assert x == 1", "not python ("]) is None


def test_programs_carry_prompt_setup_and_tests() -> None:
    program = function_program(HUMANEVAL["prompt"], "```python\ndef middle(n): ...\n```", "middle", HUMANEVAL["test"])
    assert "def half" in program and program.endswith("check(middle)\n")
    program = assertions_program("def f(): return 1", ["assert f() == ONE", "assert math.pi"], "ONE = 1")
    assert program.startswith("ONE = 1\n") and "\nimport math\n" in program
