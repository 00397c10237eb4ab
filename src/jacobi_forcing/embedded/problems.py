"""Multi-step arithmetic word problems whose answers check themselves.

The embedded base model is trained on these, and the quickstart trains and evaluates on fresh ones. A problem is a pure
function of a random generator, so any number of distinct ones can be drawn; a stable hash of the question puts each
into exactly one split, so that no seed can ever leak a held-out problem into training.

Example::

    Question: Mia has 14 apples. Mia buys 8 more apples. How many apples does Mia have now?
    Answer: First, Mia has 14 apples. Next, Mia buys 8 more apples, so Mia now has 14 + 8 = 22 apples. ...
"""

from __future__ import annotations

import random
import re
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

Split = Literal["train", "heldout"]
Level = Literal["mixed", "regular"]
"""mixed: everything below. regular: adding and taking away tens, in phrases of one length, so that each step of an
answer has the same number of tokens, as machine-made text often has."""

NAMES = (
    "Mia Ben Ana Tom Zoe Max Eva Leo Ida Sam Amy Dan Lily Omar Nina Paul Rosa Hugo Vera Karl Emma Noah Ruth Ivan"
).split()
ITEMS = (
    "apples pears books coins cards stamps pens shells marbles stickers beads buttons cookies plums "
    "tickets stones candles ribbons flowers carrots lemons badges boxes keys"
).split()
GAINS = ("buys {k} more {item}", "finds {k} more {item}", "gets {k} more {item}", "wins {k} more {item}")
LOSSES = ("gives away {k} {item}", "loses {k} {item}", "sells {k} {item}", "uses {k} {item}")
REGULAR_LOSSES = ("gives away {k} {item}",)
TIMES = {2: "doubles the {item}", 3: "triples the {item}"}
HELDOUT_SHARE = 10
"""One question in this many belongs to the held-out split."""
MAX_VALUE, MAX_OPERAND = 99, 50
"""The largest number of a problem, and the most that is added at once."""

_FINAL = re.compile(r"The answer is (\d+)")


@dataclass(frozen=True)
class Problem:
    """One problem: the question text, a worked answer, and the number the answer must end with."""

    question: str
    answer: str
    result: int
    steps: int

    @property
    def prompt(self) -> str:
        """The text a model is given; `completion` is what it is expected to continue with."""
        return f"Question: {self.question}\nAnswer:"

    @property
    def completion(self) -> str:
        """The worked answer as it follows `prompt` (leading space included)."""
        return f" {self.answer}"


def _step(rng: random.Random, value: int, item: str) -> tuple[str, str, int]:
    """Draw one operation that keeps 1 <= value <= MAX_VALUE; returns (phrase, symbol and operand, new value)."""
    while True:
        kind = rng.choice(("gain", "gain", "loss", "loss", "times"))
        if kind == "gain" and value <= MAX_VALUE - 2:
            k = rng.randint(2, min(MAX_OPERAND, MAX_VALUE - value))
            return rng.choice(GAINS).format(k=k, item=item), f"+ {k}", value + k
        if kind == "loss" and value >= 4:
            k = rng.randint(2, value - 1)
            return rng.choice(LOSSES).format(k=k, item=item), f"- {k}", value - k
        if kind == "times" and value * 2 <= MAX_VALUE:
            k = rng.choice([m for m in TIMES if value * m <= MAX_VALUE])
            return TIMES[k].format(item=item), f"* {k}", value * k


def _regular_step(rng: random.Random, value: int, item: str) -> tuple[str, str, int]:
    """As `_step`, with tens only."""
    most_gained, most_lost = min(MAX_OPERAND, MAX_VALUE // 10 * 10 - value), value - 10
    if (rng.random() < 0.5 and most_gained > 0) or most_lost == 0:
        k = rng.randrange(10, most_gained + 1, 10)
        return rng.choice(GAINS).format(k=k, item=item), f"+ {k}", value + k
    k = rng.randrange(10, most_lost + 1, 10)
    return rng.choice(REGULAR_LOSSES).format(k=k, item=item), f"- {k}", value - k


def make_problem(rng: random.Random, steps: int | None = None, level: Level = "mixed") -> Problem:
    """Draw one problem of 2 to 4 operations (or exactly `steps`) from `rng`."""
    steps = rng.randint(2, 4) if steps is None else steps
    name, item = rng.choice(NAMES), rng.choice(ITEMS)
    value = rng.randint(5, 60) if level == "mixed" else rng.randrange(10, 61, 10)
    draw = _step if level == "mixed" else _regular_step
    question = [f"{name} has {value} {item}."]
    answer = [f"First, {name} has {value} {item}."]
    for index in range(steps):
        phrase, operation, new = draw(rng, value, item)
        opener = "" if index == 0 else "Then "
        question.append(f"{opener}{name} {phrase}.")
        answer.append(f"Next, {name} {phrase}, so {name} now has {value} {operation} = {new} {item}.")
        value = new
    question.append(f"How many {item} does {name} have now?")
    answer.append(f"In the end, {name} has {value} {item}. The answer is {value}.")
    return Problem(" ".join(question), " ".join(answer), value, steps)


def split_of(question: str) -> Split:
    """The split that a question belongs to, by a hash that is the same on every machine."""
    return "heldout" if zlib.crc32(question.encode()) % HELDOUT_SHARE == 0 else "train"


def problems(
    split: Split, seed: int, count: int | None = None, steps: int | None = None, level: Level = "mixed"
) -> Iterator[Problem]:
    """Yield `count` distinct problems of a split (endless and not deduplicated when `count` is None)."""
    rng = random.Random(seed)
    seen: set[str] = set()
    produced = 0
    while count is None or produced < count:
        problem = make_problem(rng, steps, level)
        if split_of(problem.question) != split:
            continue
        if count is not None:
            if problem.question in seen:
                continue
            seen.add(problem.question)
        produced += 1
        yield problem


def extract_result(text: str) -> int | None:
    """The number that an answer ends with, or None when it states none."""
    matches = _FINAL.findall(text)
    # No problem has so long a result, and Python reads no number of thousands of digits.
    return int(matches[-1]) if matches and len(matches[-1]) < 20 else None


def is_solved(text: str, result: int) -> bool:
    """Whether an answer states the right final number."""
    return extract_result(text) == result
