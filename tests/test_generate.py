"""The public entry: the library's conventions, padding, and what drafts are drawn from."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
import transformers
from transformers import DynamicCache, GenerationConfig, PreTrainedModel

from decoding import DECODERS, SCRIPT, ScriptedModel, library, ours, prompt, prompt_tensor, reference
from jacobi_forcing import DecodeConfig, generate
from jacobi_forcing.errors import ConfigError
from tiny_models import shared_model, tiny_model

# Two ways in -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("decoder", DECODERS)
def test_both_ways_in_give_the_same_output(decoder: str) -> None:
    model, decode = shared_model("gpt2"), DecodeConfig(decoder=decoder, block_size=4)
    options: dict[str, Any] = {"decode": decode, "max_new_tokens": 20, "return_dict_in_generate": True}
    direct = generate(model, prompt_tensor(), **options)
    through = model.generate(prompt_tensor(), custom_generate=generate, do_sample=False, **options)
    assert direct.sequences.tolist() == through.sequences.tolist() == [prompt() + reference("gpt2")[:20]]
    assert direct.stats == through.stats


def test_the_default_decoder_needs_no_settings() -> None:
    out = shared_model("llama").generate(prompt_tensor(), custom_generate=generate, max_new_tokens=8)
    assert out[0].tolist() == prompt() + reference("llama")[:8]


def test_settings_in_a_generation_config_are_honoured() -> None:
    config = GenerationConfig(max_new_tokens=30, eos_token_id=reference("llama")[6], pad_token_id=0)
    out = generate(shared_model("llama"), prompt_tensor(), generation_config=config)
    assert out[0, 11:].tolist() == reference("llama")[:7]


def test_max_length_counts_the_prompt() -> None:
    assert generate(shared_model("llama"), prompt_tensor(), max_length=16).shape == (1, 16)


def test_the_library_is_left_as_it_was() -> None:
    model = tiny_model("llama", seed=3)
    before = library(model, prompt(), 12)
    settings = model.generation_config.to_dict()
    attributes = dict(vars(model))
    ours(model, prompt(), 12)
    assert model.generation_config.to_dict() == settings
    assert vars(model) == attributes
    assert library(model, prompt(), 12) == before
    for owner in (type(model), PreTrainedModel, transformers.GenerationMixin, DynamicCache, DynamicCache.__mro__[1]):
        for name, member in inspect.getmembers(owner, inspect.isfunction):
            assert not inspect.unwrap(member).__module__.startswith("jacobi_forcing"), f"{owner}.{name} is patched"


def test_the_output_stays_on_the_type_of_the_input() -> None:
    out = generate(shared_model("llama"), prompt_tensor(), max_new_tokens=4)
    assert out.dtype == torch.long
    assert not out.is_inference()


# Padding ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pad", ["eos", None])
def test_rows_that_end_early_are_padded_like_the_librarys(pad: str | None) -> None:
    end = reference("llama", 7)[4]
    ids = torch.tensor([prompt(7), prompt(7, seed=5)])
    mask = torch.ones_like(ids)
    options: dict[str, Any] = {"attention_mask": mask, "max_new_tokens": 12, "eos_token_id": end}
    if pad is not None:
        options["pad_token_id"] = end
    expected = shared_model("llama").generate(ids, do_sample=False, **options)
    assert expected[0, 12:].tolist() == [end] * 7
    assert torch.equal(generate(shared_model("llama"), ids, **options), expected)


def test_without_end_and_pad_tokens_rows_simply_run_to_the_budget() -> None:
    ids = torch.tensor([prompt(7), prompt(7, seed=5)])
    expected = shared_model("llama").generate(ids, do_sample=False, max_new_tokens=12)
    assert torch.equal(generate(shared_model("llama"), ids, max_new_tokens=12), expected)


def test_a_left_padded_prompt_equals_the_unpadded_one() -> None:
    ids = torch.tensor([[0] * 9 + prompt()])
    mask = torch.tensor([[0] * 9 + [1] * 11])
    out = generate(shared_model("gpt2"), ids, attention_mask=mask, max_new_tokens=12)
    assert out[0, 20:].tolist() == reference("gpt2")[:12]


# Drafts ----------------------------------------------------------------------------------------------------------


class Vocabulary:
    """A tokenizer, as far as drafts are concerned."""

    def get_vocab(self) -> dict[str, int]:
        return {"a": 7, "b": 9, "same as b": 9}


def test_a_prompt_fill_draws_only_tokens_of_the_prompt() -> None:
    model = ScriptedModel(SCRIPT, prompt_length=3)
    generate(model, torch.tensor([[1, 2, 3]]), decode=DecodeConfig(block_size=16), max_new_tokens=20)
    assert set(model.fed[0][0][3:]) == {1, 2, 3}


@pytest.mark.parametrize("given", [{"tokenizer": Vocabulary()}, {"vocabulary": [7, 9]}])
def test_a_vocabulary_fill_draws_only_ids_that_the_tokenizer_has(given: dict[str, Any]) -> None:
    model = ScriptedModel(SCRIPT, prompt_length=3)
    decode = DecodeConfig(draft_init="vocabulary", block_size=16)
    generate(model, torch.tensor([[1, 2, 3]]), decode=decode, max_new_tokens=20, **given)
    assert set(model.fed[0][0][3:]) == {7, 9}


def test_a_vocabulary_may_be_passed_through_the_library() -> None:
    model = ScriptedModel(SCRIPT, prompt_length=3)
    decode = DecodeConfig(draft_init="vocabulary", block_size=16)
    options: dict[str, Any] = {"decode": decode, "vocabulary": [7, 9], "max_new_tokens": 20}
    model.generate(torch.tensor([[1, 2, 3]]), custom_generate=generate, **options)
    assert set(model.fed[0][0][3:]) == {7, 9}


def test_a_vocabulary_fill_without_a_vocabulary_says_what_to_pass() -> None:
    with pytest.raises(ConfigError, match=r"vocabulary=\[ids\]"):
        generate(shared_model("gpt2"), prompt_tensor(), decode=DecodeConfig(draft_init="vocabulary"), max_new_tokens=4)
