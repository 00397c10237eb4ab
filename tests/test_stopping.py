"""Stop strings and stopping criteria end a text where the library ends it, in the middle of an accepted run too."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from transformers import (
    EosTokenCriteria,
    GenerationConfig,
    MaxLengthCriteria,
    PreTrainedModel,
    StoppingCriteria,
    StoppingCriteriaList,
    StopStringCriteria,
)

from decoding import DECODERS, ScriptedModel, library, ours, prompt, reference
from jacobi_forcing import DecodeConfig, generate
from jacobi_forcing.errors import ConfigError
from tiny_folder import EOS, byte_tokenizer
from tiny_models import shared_model

TOKENIZER = byte_tokenizer()
FILLER = "so it goes on and on, "
BUDGET = 40


def ids_of(text: str) -> list[int]:
    return TOKENIZER(text).input_ids


def scripted(text: str, start: str = "ab:") -> tuple[ScriptedModel, torch.Tensor]:
    """A model that writes `text`, and its prompt."""
    return ScriptedModel(ids_of(text), len(start), vocab_size=258), torch.tensor([ids_of(start)])


def config(decoder: str = "window", block_size: int = 8) -> DecodeConfig:
    return DecodeConfig(decoder=decoder, block_size=block_size)


def criteria(*wanted: StoppingCriteria) -> StoppingCriteriaList:
    return StoppingCriteriaList(wanted)


# Stop strings -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("decoder", DECODERS)
def test_a_stop_string_ends_the_text_at_every_offset_of_a_run(decoder: str) -> None:
    for offset in range(12):
        text = (FILLER * 2)[:offset] + "STOP" + FILLER * 3
        model, ids = scripted(text)
        options: dict[str, Any] = {"stop_strings": ["STOP", "never"], "tokenizer": TOKENIZER, "max_new_tokens": BUDGET}
        expected = model.generate(ids, **options)
        assert TOKENIZER.decode(expected[0, 3:]) == text[: offset + 4]
        direct = generate(model, ids, decode=config(decoder), **options)
        through = model.generate(ids, custom_generate=generate, decode=config(decoder), **options)
        assert direct.tolist() == through.tolist() == expected.tolist()


def test_no_forward_follows_the_run_that_holds_a_stop_string() -> None:
    model, ids = scripted(FILLER + "STOP" + FILLER)
    options: dict[str, Any] = {"max_new_tokens": BUDGET, "decode": config(), "return_dict_in_generate": True}
    out = generate(model, ids, stop_strings="STOP", tokenizer=TOKENIZER, **options)
    # The trace of an endless text: 1, then 8 a sweep with one sweep of 1 between; 26 tokens are there with the third 8.
    assert out.stats.rows[0].accepted == [1, 8, 1, 8, 1, 7]


@pytest.mark.parametrize("decoder", DECODERS)
def test_a_stop_string_may_begin_in_the_prompt_and_end_inside_a_token(decoder: str) -> None:
    model, ids = scripted("OP" + FILLER, start="aST")
    options: dict[str, Any] = {"stop_strings": ["STOP"], "tokenizer": TOKENIZER, "max_new_tokens": 9}
    out = generate(model, ids, decode=config(decoder), **options)
    assert out.tolist() == model.generate(ids, **options).tolist()
    assert TOKENIZER.decode(out[0]) == "aSTOP"


@pytest.mark.parametrize("decoder", DECODERS)
def test_rows_of_unequal_length_end_each_at_its_own_stop_string(decoder: str) -> None:
    model, _ = scripted("one. two STOP" + FILLER * 3)
    ids = torch.tensor([[0, *ids_of("b:")], ids_of("ab:"), ids_of("P::"), [0, 0, *ids_of(":")]])
    options: dict[str, Any] = {"attention_mask": (ids != 0).long(), "eos_token_id": EOS, "pad_token_id": 0}
    options |= {"stop_strings": ["STOP", "e. t"], "tokenizer": TOKENIZER, "max_new_tokens": BUDGET}
    expected = model.generate(ids, **options)
    assert len({row.count(0) for row in expected[:, 3:].tolist()}) > 1
    assert torch.equal(generate(model, ids, decode=config(decoder), **options), expected)
    through = model.generate(ids, custom_generate=generate, decode=config(decoder), **options)
    assert torch.equal(through, expected)


@pytest.mark.parametrize("whose", ["model", "call"])
def test_stop_strings_in_a_generation_config_are_honoured_directly(whose: str) -> None:
    model, ids = scripted("one STOP two three")
    settings = GenerationConfig(stop_strings=["STOP"], max_new_tokens=16)
    if whose == "model":
        model.generation_config = settings
    options: dict[str, Any] = {} if whose == "model" else {"generation_config": settings}
    out = generate(model, ids, tokenizer=TOKENIZER, **options)
    assert TOKENIZER.decode(out[0, 3:]) == "one STOP"
    assert settings.stop_strings == ["STOP"]
    assert TOKENIZER.decode(generate(model, ids, tokenizer=TOKENIZER, stop_strings="ne", **options)[0, 3:]) == "one"
    # The library forgets the tokenizer before a callable is asked; it does so loudly.
    with pytest.raises(ValueError, match="could not locate a tokenizer"):
        model.generate(ids, custom_generate=generate, tokenizer=TOKENIZER, **options)


def test_stop_strings_of_both_generation_configs_are_those_of_the_call() -> None:
    model, ids = scripted("one STOP two three")
    model.generation_config.stop_strings = ["STOP"]
    settings = GenerationConfig(stop_strings=["ne"], max_new_tokens=16)
    out = generate(model, ids, tokenizer=TOKENIZER, generation_config=settings)
    assert TOKENIZER.decode(out[0, 3:]) == "one"
    assert model.generation_config.stop_strings == ["STOP"]


@pytest.mark.parametrize("direct", [True, False])
def test_stop_strings_without_a_tokenizer_say_what_to_pass(direct: bool) -> None:
    model, ids = scripted("one STOP")
    with pytest.raises(ConfigError, match="pass tokenizer=tokenizer"):
        if direct:
            generate(model, ids, stop_strings=["STOP"], max_new_tokens=4)
        else:
            model.generate(ids, custom_generate=generate, stop_strings=["STOP"], max_new_tokens=4)


def test_the_librarys_own_criterion_for_stop_strings_may_be_passed_too() -> None:
    model, ids = scripted("one STOP two three")
    stops = criteria(StopStringCriteria(TOKENIZER, ["STOP"]))
    direct = generate(model, ids, stopping_criteria=stops, max_new_tokens=16)
    through = model.generate(ids, custom_generate=generate, stopping_criteria=stops, max_new_tokens=16)
    assert TOKENIZER.decode(direct[0, 3:]) == TOKENIZER.decode(through[0, 3:]) == "one STOP"


# Other criteria ---------------------------------------------------------------------------------------------------


class SumStops(StoppingCriteria):
    """Ends a text whose ids add up to a multiple of 13; keeps the ids that it was asked about."""

    def __init__(self) -> None:
        self.asked: list[list[int]] = []

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        self.asked += input_ids.tolist()
        return input_ids.sum(dim=1) % 13 == 0


@pytest.mark.parametrize("decoder", DECODERS)
def test_a_criterion_of_the_caller_ends_the_text_where_it_ends_the_librarys(decoder: str) -> None:
    model = shared_model("llama")
    lengths = set()
    for seed in range(6):
        expected = library(model, prompt(seed=seed), BUDGET, stopping_criteria=criteria(SumStops()))
        got = ours(model, prompt(seed=seed), BUDGET, decoder=decoder, stopping_criteria=criteria(SumStops()))
        assert got == expected
        lengths.add(len(expected))
    assert len(lengths) > 2


@pytest.mark.parametrize("decoder", DECODERS)
def test_a_criterion_is_asked_about_every_token_in_order_and_without_padding(decoder: str) -> None:
    model, _ = scripted(FILLER * 3)
    asked = SumStops()
    ids = torch.tensor([[0, 0, *ids_of(":")]])
    options: dict[str, Any] = {"attention_mask": (ids != 0).long(), "pad_token_id": 0, "max_new_tokens": 20}
    out = generate(model, ids, stopping_criteria=criteria(asked), decode=config(decoder), **options)
    text = out[0, 2:].tolist()
    assert asked.asked == [text[:length] for length in range(2, len(text) + 1)]


class Keeping(StoppingCriteria):
    """Adds up, in place, what it was shown first."""

    def __init__(self) -> None:
        self.kept: torch.Tensor | None = None

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> bool:
        if self.kept is None:
            self.kept = input_ids
        self.kept += 1
        return False


def test_a_criterion_may_keep_what_it_is_shown_and_answer_with_a_plain_bool() -> None:
    keeping = Keeping()
    generate(shared_model("llama"), torch.tensor([prompt()]), stopping_criteria=criteria(keeping), max_new_tokens=4)
    assert keeping.kept is not None
    keeping.kept += 1  # would be an error, were it a tensor of inference mode
    assert keeping.kept[0, 0] == prompt()[0] + 5


def run_both(model: PreTrainedModel, *wanted: StoppingCriteria, **options: Any) -> tuple[list[int], list[int]]:
    given: dict[str, Any] = {"stopping_criteria": criteria(*wanted), **options}
    return library(model, prompt(), BUDGET, **given), ours(model, prompt(), BUDGET, **given)


def test_an_end_token_or_a_length_as_a_criterion_counts_like_the_setting() -> None:
    model = shared_model("llama")
    end = reference("llama")[6]
    expected, got = run_both(model, MaxLengthCriteria(16))
    assert expected == got == reference("llama")[:5]
    expected, got = run_both(model, EosTokenCriteria(end), pad_token_id=0)
    assert expected == got == reference("llama")[: reference("llama").index(end) + 1]


def test_the_time_is_looked_at_behind_every_token() -> None:
    model = shared_model("llama")
    assert (
        library(model, prompt(), 12, max_time=0.0) == ours(model, prompt(), 12, max_time=0.0) == reference("llama")[:1]
    )
    assert ours(model, prompt(), 12, max_time=1000.0) == reference("llama")[:12]


def test_criteria_and_end_tokens_together_end_at_the_first_of_them() -> None:
    model, ids = scripted("abcdefghijklmnop")
    for end, stop in itertools.product("cgk", "dgj"):
        settings: dict[str, Any] = {"eos_token_id": ids_of(end)[0], "pad_token_id": 0, "max_new_tokens": 9}
        out = generate(model, ids, stop_strings=stop, tokenizer=TOKENIZER, decode=config(), **settings)
        first = min("abcdefghi".find(mark) % 99 for mark in (end, stop))
        assert TOKENIZER.decode(out[0, 3:]) == "abcdefghi"[: first + 1]
