"""The built-in sentences to turn into JSON: distinct, reproducible, graded, and never on both sides of the split."""

from __future__ import annotations

import json

import pytest
from jsonschema import Draft202012Validator

from jacobi_forcing.config import PromptsConfig
from jacobi_forcing.embedded.structured import EXAMPLE, SCHEMA, follows_schema, orders, read_object
from jacobi_forcing.errors import DataError
from jacobi_forcing.evaluate import quality_of
from jacobi_forcing.evaluate.tasks import grade, grade_parts
from jacobi_forcing.formats import common
from jacobi_forcing.trajectories.prompts import Prompt, load_prompts
from tiny_folder import EOS, byte_tokenizer


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


@pytest.mark.parametrize(
    ("text", "parses", "schema", "fields"),
    [
        ("no object", False, False, False),
        ("{}", True, False, False),
        (json.dumps({**EXAMPLE.values, "quantity": "7"}), True, False, False),
        (json.dumps({**EXAMPLE.values, "quantity": 7.0}), True, False, False),
        (json.dumps({**EXAMPLE.values, "more": 1}), True, False, False),
        (json.dumps({**EXAMPLE.values, "city": "Oslo"}), True, True, False),
        (json.dumps(dict(reversed(EXAMPLE.values.items()))), True, True, True),
    ],
)
def test_an_answer_is_graded_in_three_parts_and_the_last_is_the_grade(
    text: str, parses: bool, schema: bool, fields: bool
) -> None:
    assert grade_parts("orders", text, EXAMPLE.answer) == {"parses": parses, "schema": schema, "fields": fields}
    assert grade("orders", text, EXAMPLE.answer) is fields


def test_the_shares_of_the_parts_stand_beside_the_solve_rate() -> None:
    tokenizer = byte_tokenizer()
    texts = ["none", "{}", json.dumps({**EXAMPLE.values, "city": "Oslo"}), EXAMPLE.answer]
    prompts = [Prompt(index, "", [2], EXAMPLE.answer) for index in range(4)]
    responses = [[*tokenizer(text)["input_ids"], EOS] for text in texts]
    value = quality_of(responses, prompts, tokenizer, [EOS], "orders").to_dict()
    assert {name: part["count"] for name, part in value["parts"].items()} == {"parses": 3, "schema": 2, "fields": 1}
    assert value["parts"]["fields"]["share"] == value["solve_rate"] == 0.25
    assert value["parts"]["fields"]["interval"] == value["solve_rate_interval"]
    validator = Draft202012Validator(common()["$defs"]["quality"] | {"$defs": common()["$defs"]})
    validator.validate(value)
    assert not validator.is_valid({**value, "parts": {"parses": {"count": 3}}})
    assert "parts" not in quality_of(responses, prompts, tokenizer, [EOS]).to_dict()


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


def test_braces_in_a_sentence_are_no_object_and_a_key_stands_once() -> None:
    assert read_object('Sure {as asked}: {"city": "Bern"}') == {"city": "Bern"}
    assert read_object('{"city": "Nowhere", "city": "Bern"}') is None
    assert read_object('{"a":' * 3000) is None
