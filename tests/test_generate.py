"""The public entry: the library's conventions, padding, and what drafts are drawn from."""

from __future__ import annotations

import inspect
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import DynamicCache, GenerationConfig, PreTrainedModel

from decoding import DECODERS, SCRIPT, ScriptedModel, library, prompt, prompt_tensor, reference
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


OWNERS = (PreTrainedModel, transformers.GenerationMixin, GenerationConfig, DynamicCache, DynamicCache.__mro__[1])


@pytest.mark.parametrize("decoder", DECODERS)
def test_the_library_is_left_as_it_was(decoder: str) -> None:
    model = tiny_model("llama", seed=3)
    owners = (type(model), *OWNERS)
    before, sampled = library(model, prompt(), 12), sample(model)
    settings = model.generation_config.to_dict()
    attributes, members = dict(vars(model)), [dict(vars(owner)) for owner in owners]
    decode = DecodeConfig(decoder=decoder, block_size=4)
    options: dict[str, Any] = {"decode": decode, "max_new_tokens": 12, "stopping_criteria": [lambda *_: False]}
    generate(model, prompt_tensor(), **options)
    generate(model, prompt_tensor(), do_sample=True, temperature=0.7, **options)
    model.generate(prompt_tensor(), custom_generate=generate, **options)
    assert model.generation_config.to_dict() == settings
    assert vars(model) == attributes
    assert [dict(vars(owner)) for owner in owners] == members
    assert (library(model, prompt(), 12), sample(model)) == (before, sampled)
    for owner in owners:
        for name, member in inspect.getmembers(owner, inspect.isfunction):
            assert not inspect.unwrap(member).__module__.startswith("jacobi_forcing"), f"{owner}.{name} is patched"


def sample(model: PreTrainedModel) -> list[int]:
    """A sampled text of the library's."""
    torch.manual_seed(1)
    return model.generate(prompt_tensor(), do_sample=True, max_new_tokens=12)[0].tolist()


def test_importing_changes_nothing_in_the_library() -> None:
    script = """
        import inspect, transformers
        from transformers import DynamicCache, GenerationConfig, GenerationMixin, LlamaForCausalLM, PreTrainedModel
        from transformers.generation import stopping_criteria, utils
        owners = [DynamicCache, GenerationConfig, GenerationMixin, LlamaForCausalLM, PreTrainedModel,
                  stopping_criteria, utils]
        before = [dict(vars(owner)) for owner in owners]
        from jacobi_forcing import generate, save_custom_generate
        print([owner for owner, then in zip(owners, before) if dict(vars(owner)) != then])
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        cwd=Path(__file__).resolve().parents[1] / "src",
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.stdout.strip() == "[]", done.stderr


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


@pytest.mark.parametrize("arch", ["llama", "gpt2"])
def test_a_prompt_with_a_hole_in_its_mask_is_read_as_the_library_reads_it(arch: str) -> None:
    ids = torch.tensor([[0, *prompt(5), 0, 0, *prompt(6)], [*prompt(8), 0, *prompt(5, seed=1)]])
    options: dict[str, Any] = {"attention_mask": (ids != 0).long(), "max_new_tokens": 12, "pad_token_id": 0}
    expected = shared_model(arch).generate(ids, **options)
    assert torch.equal(generate(shared_model(arch), ids, decode=DecodeConfig(block_size=4), **options), expected)


def test_positions_that_say_nothing_new_may_be_passed() -> None:
    ids, mask = torch.tensor([[0] * 3 + prompt()]), torch.tensor([[0] * 3 + [1] * 11])
    positions = torch.tensor([[0] * 3 + list(range(11))])
    out = generate(shared_model("llama"), ids, attention_mask=mask, position_ids=positions, max_new_tokens=12)
    assert out[0, 14:].tolist() == reference("llama")[:12]


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


@pytest.mark.parametrize("given", [{"tokenizer": Vocabulary()}, {"vocabulary": [7, 9]}])
def test_a_vocabulary_may_be_passed_through_the_library(given: dict[str, Any]) -> None:
    model = ScriptedModel(SCRIPT, prompt_length=3)
    decode = DecodeConfig(draft_init="vocabulary", block_size=16)
    options: dict[str, Any] = {"decode": decode, "max_new_tokens": 20, **given}
    model.generate(torch.tensor([[1, 2, 3]]), custom_generate=generate, **options)
    assert set(model.fed[0][0][3:]) == {7, 9}


def test_a_vocabulary_fill_without_a_vocabulary_says_what_to_pass() -> None:
    with pytest.raises(ConfigError, match=r"vocabulary=\[ids\]"):
        generate(shared_model("gpt2"), prompt_tensor(), decode=DecodeConfig(draft_init="vocabulary"), max_new_tokens=4)
