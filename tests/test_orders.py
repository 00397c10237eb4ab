"""The built-in sentences to turn into JSON: distinct, reproducible, graded, and never on both sides of the split."""

from __future__ import annotations

import json

import pytest

from jacobi_forcing.config import PromptsConfig
from jacobi_forcing.embedded.structured import EXAMPLE, SCHEMA, follows_schema, orders, read_object
from jacobi_forcing.errors import DataError
from jacobi_forcing.evaluate.tasks import grade
from jacobi_forcing.trajectories.prompts import load_prompts
from tiny_folder import byte_tokenizer


def test_an_order_reads_as_it_always_did() -> None:
    """A literal: adapters that ship were trained on this wording."""
    order = next(orders("train", 0, 1))
    assert order.prompt == (
        'Turn the sentence into one JSON object with the keys "customer", "city", "quantity", "item" and "day".\n\n'
        "Sentence: Emil Sandberg from Geneva ordered 7 brown kettles for Friday.\n"
        'JSON: {"customer": "Emil Sandberg", "city": "Geneva", "quantity": 7, "item": "brown kettles", '
        '"day": "Friday"}\n\n'
        f"Sentence: {order.sentence}\nJSON:"
    )


def test_every_value_stands_in_its_sentence_and_every_object_follows_the_schema() -> None:
    for order in orders("train", 3, 300):
        value = json.loads(order.answer)
        assert follows_schema(value)
        assert list(value) == list(SCHEMA)
        assert all(str(part) in order.sentence for part in value.values())


def test_orders_are_distinct_reproducible_and_apart() -> None:
    train = [order.sentence for order in orders("train", 0, 2000)]
    heldout = [order.sentence for order in orders("heldout", 0, 300)]
    assert len(set(train)) == 2000
    assert not set(train) & set(heldout)
    assert train[:50] == [order.sentence for order in orders("train", 0, 50)]
    assert train[:50] != [order.sentence for order in orders("train", 1, 50)]
    assert EXAMPLE.sentence not in train + heldout


@pytest.mark.parametrize("around", ["{}", "```json\n{}\n```", "Here it is: {} I hope it helps.", "\n\n{}"])
def test_an_object_is_found_whatever_stands_around_it(around: str) -> None:
    answer = json.dumps(EXAMPLE.values, indent=2)
    assert grade("orders", around.replace("{}", answer), EXAMPLE.answer)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "no object",
        "{",
        '{"customer": "Emil Sandberg"}',
        json.dumps({**EXAMPLE.values, "quantity": "7"}),
        json.dumps({**EXAMPLE.values, "city": "Oslo"}),
        json.dumps({**EXAMPLE.values, "more": 1}),
        "[1, 2]",
    ],
)
def test_anything_else_is_wrong(text: str) -> None:
    assert not grade("orders", text, EXAMPLE.answer)


def test_a_truth_value_is_no_number_and_a_list_no_object() -> None:
    assert not follows_schema({**EXAMPLE.values, "quantity": True})
    assert read_object("[1]") is None


def test_a_reference_without_an_object_is_refused() -> None:
    with pytest.raises(DataError, match="no JSON object"):
        grade("orders", "{}", "7")


def test_the_source_gives_prompts_and_answers() -> None:
    config = PromptsConfig("builtin:orders", split="heldout", limit=3, offset=2, template="raw")
    prompts = load_prompts(config, byte_tokenizer())
    wanted = list(orders("heldout", 0, 5))[2:]
    assert [(prompt.text, prompt.answer) for prompt in prompts] == [(order.prompt, order.answer) for order in wanted]


def test_the_source_has_no_subsets() -> None:
    config = PromptsConfig("builtin:orders", subset="regular", limit=1, template="raw")
    with pytest.raises(DataError, match="no such subset"):
        load_prompts(config, byte_tokenizer())
