"""Sentences about orders, each to be turned into one JSON object of a fixed schema: text as production traffic has it.

An order is a pure function of a random generator, so any number of distinct ones can be drawn, and a stable hash of the
sentence puts each into exactly one split. The prompt states the schema and shows one example; the reference answer is
the object itself, so grading needs no judge::

    Sentence: Vera Lindholm in Porto wants 12 green folders by Monday.
    JSON: {"customer": "Vera Lindholm", "city": "Porto", "quantity": 12, "item": "green folders", "day": "Monday"}
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from jacobi_forcing.embedded.problems import Split, split_of

FIRST_NAMES = (
    "Vera Omar Lena Hugo Ines Karl Mona Paul Rosa Ivan Clara Felix Greta Jonas Marta Nadia Oscar Petra Simon Tessa "
    "Amina Bruno Carla David Elena Frank Hanna Julia Laura Peter"
).split()
LAST_NAMES = (
    "Lindholm Haddad Novak Moreau Silva Becker Rossi Larsen Kowalski Petrov Keller Jensen Molina Fischer Laurent "
    "Santos Weber Dubois Romano Nilsen Hansen Castro Meyer Bianchi Olsen Duarte Wagner Blanc Ferrari Costa"
).split()
CITIES = (
    "Porto Vienna Bergen Lyon Madrid Turin Gdansk Zurich Ghent Malmo Prague Bristol Dublin Athens Leeds Seville Basel "
    "Bremen Naples Oslo Riga Tampere Utrecht Verona Warsaw Boston Denver Austin Seattle Toronto"
).split()
COLOURS = "red blue green black white yellow orange purple grey pink".split()
THINGS = (
    "folders lamps chairs mugs notebooks towels candles blankets baskets bottles cushions plates umbrellas backpacks "
    "clocks bowls scarves shelves vases pillows"
).split()
DAYS = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split()
TEMPLATES = (
    "{customer} from {city} ordered {quantity} {item} for {day}.",
    "{customer} in {city} wants {quantity} {item} by {day}.",
    "{customer} of {city} needs {quantity} {item} on {day}.",
)
SCHEMA: dict[str, type] = {"customer": str, "city": str, "quantity": int, "item": str, "day": str}
"""Keys of the object, in their order, and the types of their values."""

_KEYS = [f'"{key}"' for key in SCHEMA]
_HEAD = f"Turn the sentence into one JSON object with the keys {', '.join(_KEYS[:-1])} and {_KEYS[-1]}."


@dataclass(frozen=True)
class Order:
    """One order: the sentence, and the values of `SCHEMA` that it states."""

    sentence: str
    values: dict[str, Any]

    @property
    def answer(self) -> str:
        """The object as JSON on one line."""
        return json.dumps(self.values)

    @property
    def prompt(self) -> str:
        """What a model is asked: the schema, one example, and the sentence."""
        return f"{_HEAD}\n\nSentence: {EXAMPLE.sentence}\nJSON: {EXAMPLE.answer}\n\nSentence: {self.sentence}\nJSON:"


def make_order(rng: random.Random) -> Order:
    """Draw one order from `rng`."""
    values = {
        "customer": f"{rng.choice(FIRST_NAMES)} {rng.choice(LAST_NAMES)}",
        "city": rng.choice(CITIES),
        "quantity": rng.randint(2, 60),
        "item": f"{rng.choice(COLOURS)} {rng.choice(THINGS)}",
        "day": rng.choice(DAYS),
    }
    return Order(rng.choice(TEMPLATES).format(**values), values)


EXAMPLE = Order(
    "Emil Sandberg from Geneva ordered 7 brown kettles for Friday.",
    {"customer": "Emil Sandberg", "city": "Geneva", "quantity": 7, "item": "brown kettles", "day": "Friday"},
)
"""Shown in every prompt; its names and things occur in no order that is drawn."""


def orders(split: Split, seed: int, count: int) -> Iterator[Order]:
    """Yield `count` distinct orders of a split."""
    rng = random.Random(f"orders/{seed}")
    seen: set[str] = set()
    while len(seen) < count:
        order = make_order(rng)
        if split_of(order.sentence) == split and order.sentence not in seen:
            seen.add(order.sentence)
            yield order


_BEGINNING = re.compile(r'\{\s*["}]')


def read_object(text: str) -> dict[str, Any] | None:
    """The first JSON object of a text, whatever stands before and behind it; None where there is none.

    It begins with a brace and a quotation mark, so braces in a sentence do not count. One that has a key twice is none.
    """
    start = _BEGINNING.search(text)
    if start is None:
        return None
    try:
        value, _ = json.JSONDecoder(object_pairs_hook=_once_each).raw_decode(text, start.start())
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def _once_each(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) < len(pairs):
        raise ValueError("a key stands twice")
    return value


def follows_schema(value: dict[str, Any]) -> bool:
    """Whether an object has the keys of `SCHEMA`, no other, with values of their types."""
    return _has_form(value, SCHEMA)


@dataclass(frozen=True)
class Parts:
    """How far an answer is right; each part needs the one before.

    Attributes:
        parses: It holds a JSON object.
        schema: The first one has the reference's keys, no other, with values of the reference's types.
        fields: All of its values are the reference's.
    """

    parses: bool
    schema: bool
    fields: bool


def examine(text: str, wanted: dict[str, Any]) -> Parts:
    """Grade an answer part by part.

    Args:
        text: What a model wrote, without the prompt.
        wanted: The reference object. The order of keys does not matter.
    """
    value = read_object(text)
    if value is None:
        return Parts(False, False, False)
    schema = _has_form(value, {key: type(part) for key, part in wanted.items()})
    return Parts(True, schema, schema and value == wanted)


def _has_form(value: dict[str, Any], form: dict[str, type]) -> bool:
    return value.keys() == form.keys() and all(type(value[key]) is kind for key, kind in form.items())
