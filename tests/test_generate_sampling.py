"""Sampling and logits processors through the public entry: the library's settings, with every decoder."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList

from decoding import DECODERS, library, ours, prompt, prompt_tensor, reference
from jacobi_forcing import DecodeConfig, generate
from tiny_models import shared_model, tiny_model

WARPED = ({"temperature": 0.7}, {"top_k": 5}, {"top_p": 0.8, "temperature": 1.4}, {"min_p": 0.05, "top_k": 0})


def sampled(decoder: str = "window", direct: bool = True, seed: int | None = 3, **options: Any) -> torch.Tensor:
    """A sampled text of the llama."""
    options = {"do_sample": True, "max_new_tokens": 16, "pad_token_id": 0, **options}
    options["decode"] = DecodeConfig(decoder=decoder, block_size=5, sample_seed=seed)
    ids, model = options.pop("ids", prompt_tensor()), shared_model("llama")
    return generate(model, ids, **options) if direct else model.generate(ids, custom_generate=generate, **options)


# Sampling ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("settings", WARPED, ids=str)
def test_every_decoder_and_both_ways_in_give_the_text_of_a_seed(settings: dict[str, Any]) -> None:
    texts = [sampled(decoder, direct, **settings).tolist() for decoder in DECODERS for direct in (True, False)]
    assert texts == [texts[0]] * len(texts)
    assert texts[0] != sampled("ar", seed=4, **settings).tolist()


def test_sampling_among_one_is_greedy() -> None:
    for options in ({"top_k": 1}, {"temperature": 1e-4}, {"top_p": 1e-6}):
        assert sampled(**options)[0, 11:].tolist() == reference("llama")[:16]


def test_the_settings_of_the_model_are_gone_by_and_those_of_the_call_before_them() -> None:
    model = tiny_model("llama")
    decode = DecodeConfig(sample_seed=3, block_size=5)
    options: dict[str, Any] = {"decode": decode, "max_new_tokens": 16, "pad_token_id": 0}
    model.generation_config = GenerationConfig(do_sample=True, temperature=0.7)
    expected = sampled(temperature=0.7)
    assert torch.equal(generate(model, prompt_tensor(), **options), expected)
    assert torch.equal(model.generate(prompt_tensor(), custom_generate=generate, **options), expected)
    settings = GenerationConfig(temperature=1.4, max_new_tokens=16, pad_token_id=0)
    assert torch.equal(
        generate(model, prompt_tensor(), generation_config=settings, decode=decode), sampled(temperature=1.4)
    )
    assert ours(model, prompt(), 16, do_sample=False) == reference("llama")[:16]


def test_without_a_seed_torchs_own_decides() -> None:
    torch.manual_seed(5)
    first, second = sampled(seed=None), sampled(seed=None)
    assert not torch.equal(first, second)
    torch.manual_seed(5)
    assert torch.equal(sampled(seed=None), first)


def test_several_samples_of_a_prompt_differ_and_come_in_the_librarys_order() -> None:
    ids = torch.tensor([[0] * 4 + prompt(7), prompt(11)])
    options: dict[str, Any] = {"ids": ids, "attention_mask": (ids != 0).long(), "top_k": 20}
    for direct in (True, False):
        out = sampled(direct=direct, num_return_sequences=3, **options)
        assert out[:, :11].tolist() == [ids[0].tolist()] * 3 + [ids[1].tolist()] * 3
        texts = [tuple(row) for row in out[:, 11:].tolist()]
        assert len(set(texts)) == 6
        # Each prompt's first sample is the one that it has alone; its batch and its padding do not matter.
        alone = [sampled(ids=torch.tensor([prompt(length)]), top_k=20)[0, length:].tolist() for length in (7, 11)]
        assert [list(texts[0]), list(texts[3])] == alone
        assert torch.equal(sampled("multiblock", direct, num_return_sequences=3, **options), out)


# Greedy at temperature 0 ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["keyword", "config", "model"])
def test_a_temperature_of_zero_is_greedy(where: str) -> None:
    cold: dict[str, Any] = {"temperature": 0.0, "do_sample": True, "top_k": 7}
    model, options = shared_model("llama"), {"max_new_tokens": 16, "pad_token_id": 0}
    if where == "keyword":
        options |= cold
    elif where == "config":
        options = {"generation_config": GenerationConfig(**cold, **options)}
    else:
        model = tiny_model("llama")
        model.generation_config = GenerationConfig(**cold)
    assert generate(model, prompt_tensor(), **options)[0, 11:].tolist() == reference("llama")[:16]
    if where == "config":
        assert (options["generation_config"].temperature, options["generation_config"].do_sample) == (0.0, True)
    # By the other way in the library comes first, and says what to do instead.
    with pytest.raises(ValueError, match="set `do_sample=False`"):
        model.generate(prompt_tensor(), custom_generate=generate, **options)


def test_a_temperature_of_the_call_comes_before_the_models_zero() -> None:
    model = tiny_model("llama")
    model.generation_config = GenerationConfig(temperature=0.0, do_sample=True)
    options: dict[str, Any] = {"decode": DecodeConfig(sample_seed=3), "max_new_tokens": 16, "pad_token_id": 0}
    assert torch.equal(generate(model, prompt_tensor(), temperature=1.5, **options), sampled(temperature=1.5))


# Processors -------------------------------------------------------------------------------------------------------

PLAIN = reference("llama")[:20]
END = PLAIN[3]
PROCESSED: tuple[dict[str, Any], ...] = (
    {"repetition_penalty": 3.0},
    {"no_repeat_ngram_size": 1},
    {"min_new_tokens": 9, "eos_token_id": END},
    {"min_length": 15, "eos_token_id": END},
    {"bad_words_ids": [[PLAIN[4]], PLAIN[8:10]], "suppress_tokens": [PLAIN[6]]},
    {"sequence_bias": [[PLAIN[:2], -9.0], [[PLAIN[5]], 5.0]]},
    {"forced_eos_token_id": 1},
    {"exponential_decay_length_penalty": (4, 1.5), "eos_token_id": 1},
)


@pytest.mark.parametrize("settings", PROCESSED, ids=str)
@pytest.mark.parametrize("decoder", DECODERS)
def test_processed_greedy_texts_equal_the_librarys(decoder: str, settings: dict[str, Any]) -> None:
    model, options = shared_model("llama"), {"pad_token_id": 0, **settings}
    expected = library(model, prompt(), 20, **options)
    assert expected != PLAIN
    assert len(expected) > 4
    assert ours(model, prompt(), 20, decoder=decoder, block_size=5, **options) == expected
    decode = DecodeConfig(decoder=decoder, block_size=5)
    out = model.generate(prompt_tensor(), custom_generate=generate, decode=decode, max_new_tokens=20, **options)
    assert out[0, 11:].tolist() == expected


@pytest.mark.parametrize("decoder", DECODERS)
def test_lengths_count_the_padding_of_the_callers_batch(decoder: str) -> None:
    ids = torch.tensor([[0] * 4 + prompt(7), prompt(11)])
    end = reference("llama", 7)[2]
    options: dict[str, Any] = {"attention_mask": (ids != 0).long(), "eos_token_id": end, "pad_token_id": 0}
    options |= {"max_new_tokens": 16, "min_length": 17, "repetition_penalty": 1.4}
    expected = shared_model("llama").generate(ids, **options)
    assert torch.equal(generate(shared_model("llama"), ids, decode=DecodeConfig(decoder=decoder), **options), expected)


class OnlyEven(LogitsProcessor):
    prefix_only = True

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores.index_fill(1, torch.arange(1, scores.shape[1], 2), -torch.inf)


def test_a_processor_of_the_caller_that_promises_to_read_its_prefix_alone_is_taken() -> None:
    options: dict[str, Any] = {"logits_processor": LogitsProcessorList([OnlyEven()])}
    expected = library(shared_model("llama"), prompt(), 16, **options)
    assert ours(shared_model("llama"), prompt(), 16, **options) == expected
    assert not any(token % 2 for token in expected)
