"""The public entry: the library's conventions, honest counts, streams, and refusals by name."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    DynamicCache,
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    TextStreamer,
)

from decoding import DECODERS, ScriptedModel, library, ours, prompt, reference
from jacobi_forcing import DecodeConfig, JForceError, generate
from jacobi_forcing.decode.stats import DecodeStats, RowStats
from jacobi_forcing.errors import CacheError, ConfigError, ModelError
from tiny_models import VOCAB, shared_model, tiny_model


def prompt_tensor(length: int = 11) -> torch.Tensor:
    return torch.tensor([prompt(length)])


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


# Counts ----------------------------------------------------------------------------------------------------------

SCRIPT = list(range(20, 60))
"""Tokens that no draft drawn from the prompt can hit."""

# Block size 4, 12 tokens. A draft drawn from the prompt is wrong, so one token is added and the predictions behind it,
# all right, are the next draft. `slots` are those of each forward: the prompt's 3 and 4 guesses first.
TRACES = {
    "ar": {"accepted": [1] * 12, "slots": [3] + [1] * 11},
    "jacobi": {"accepted": [1, 4, 1, 3, 1, 2], "slots": [7, 4, 4, 3, 3, 2]},
    "window": {"accepted": [1, 4, 1, 4, 1, 1], "slots": [7, 4, 4, 4, 2, 1]},
}


def run_script(decoder: str, **options: Any) -> tuple[list[int], RowStats, list[int]]:
    model = ScriptedModel(SCRIPT, prompt_length=3)
    decode = DecodeConfig(decoder=decoder, block_size=4)
    options = {"max_new_tokens": 12, "return_dict_in_generate": True} | options
    out = generate(model, torch.tensor([[1, 2, 3]]), decode=decode, **options)
    return out.sequences[0, 3:].tolist(), out.stats.rows[0], [len(fed[0]) for fed in model.fed]


@pytest.mark.parametrize("decoder", DECODERS)
def test_a_scripted_run_is_counted_exactly(decoder: str) -> None:
    tokens, stats, slots = run_script(decoder)
    assert tokens == SCRIPT[:12]
    assert stats.accepted == TRACES[decoder]["accepted"]
    assert slots == TRACES[decoder]["slots"]
    assert (stats.tokens, stats.forwards) == (12, len(slots))
    assert stats.tokens_per_forward == 12 / len(slots)


def test_tokens_per_forward_of_ar_is_exactly_one() -> None:
    assert run_script("ar")[1].tokens_per_forward == 1.0
    assert run_script("ar", max_new_tokens=1)[1].tokens_per_forward == 1.0
    assert run_script("ar", eos_token_id=SCRIPT[6], pad_token_id=0)[1].tokens_per_forward == 1.0


def test_only_tokens_up_to_the_end_are_counted() -> None:
    tokens, stats, slots = run_script("window", eos_token_id=SCRIPT[6], pad_token_id=0)
    assert tokens == SCRIPT[:7]
    assert stats.accepted == [1, 4, 1, 1]
    assert (stats.tokens, stats.forwards) == (7, len(slots)) == (7, 4)
    assert stats.histogram == {1: 3, 4: 1}


def test_a_batch_counts_each_rows_own_forwards() -> None:
    stats = DecodeStats([RowStats(5, [1, 4]), RowStats(3, [1, 1, 1])])
    assert (stats.tokens, stats.forwards, stats.tokens_per_forward) == (8, 5, 1.6)
    assert DecodeStats([]).tokens_per_forward == 0.0
    assert RowStats().tokens_per_forward == 0.0


def test_a_finished_row_costs_nothing_more() -> None:
    text = {length: reference("llama", length) for length in (7, 11)}
    end = text[7][2]
    late = text[11].index(end) if end in text[11][:20] else 19
    ids = torch.tensor([[0] * 4 + prompt(7), prompt(11)])
    mask = torch.tensor([[0] * 4 + [1] * 7, [1] * 11])
    out = generate(
        shared_model("llama"),
        ids,
        attention_mask=mask,
        max_new_tokens=20,
        eos_token_id=end,
        pad_token_id=0,
        decode=DecodeConfig(decoder="ar"),
        return_dict_in_generate=True,
    )
    assert [row.forwards for row in out.stats.rows] == [text[7].index(end) + 1, late + 1]


# Streams ---------------------------------------------------------------------------------------------------------

TEXT = "Grüße, 世界!\nAn 👩‍🚀 astronaut — naïve?\n\nเป็น 🎉 the end"


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token per byte, so that every character beyond ASCII takes several."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={char: index for index, char in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>")


class Collected(TextStreamer):
    """Keeps what a `TextStreamer` would print, and the drafts that it is shown."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, **options: Any) -> None:
        super().__init__(tokenizer, skip_prompt=True, **options)
        self.parts: list[str] = []
        self.drafts: list[list[int]] = []
        self.ended = 0

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        self.parts.append(text)
        self.ended += stream_end

    def put_draft(self, ids: torch.Tensor) -> None:
        self.drafts.append(ids.tolist())


@pytest.mark.parametrize("decoder", DECODERS)
@pytest.mark.parametrize("block_size", [3, 16])
@pytest.mark.parametrize("direct", [True, False])
def test_the_joined_stream_equals_the_decoded_ids(decoder: str, block_size: int, direct: bool) -> None:
    tokenizer = byte_tokenizer()
    end = tokenizer.eos_token_id
    text = tokenizer(TEXT).input_ids
    # The script goes on behind its end: an end in the middle of a block.
    model = ScriptedModel([*text, end, *tokenizer("never seen" * 9).input_ids], prompt_length=3, vocab_size=300)
    streamer = Collected(tokenizer)
    options: dict[str, Any] = {"max_new_tokens": 200, "eos_token_id": end, "pad_token_id": 0, "streamer": streamer}
    options["decode"] = DecodeConfig(decoder=decoder, block_size=block_size)
    ids = torch.tensor([tokenizer("ab:").input_ids])
    out = generate(model, ids, **options) if direct else model.generate(ids, custom_generate=generate, **options)
    assert out[0, 3:].tolist() == [*text, end]
    assert "".join(streamer.parts) == tokenizer.decode(out[0, 3:]) == TEXT + "<end>"
    assert streamer.ended == 1


@pytest.mark.parametrize("decoder", DECODERS)
def test_a_stream_can_skip_the_end_token(decoder: str) -> None:
    tokenizer = byte_tokenizer()
    text = tokenizer(TEXT).input_ids
    model = ScriptedModel([*text, tokenizer.eos_token_id, *text], prompt_length=3, vocab_size=300)
    streamer = Collected(tokenizer, skip_special_tokens=True)
    ids = torch.tensor([tokenizer("ab:").input_ids])
    decode = DecodeConfig(decoder=decoder, block_size=8)
    generate(
        model,
        ids,
        max_new_tokens=200,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=0,
        streamer=streamer,
        decode=decode,
    )
    assert "".join(streamer.parts) == TEXT


class Runs:
    """Notes everything it is sent."""

    def __init__(self) -> None:
        self.runs: list[list[int]] = []
        self.ended = False

    def put(self, value: torch.Tensor) -> None:
        self.runs.append(value.flatten().tolist())

    def end(self) -> None:
        self.ended = True


def test_a_stream_gets_the_prompt_then_each_accepted_run() -> None:
    streamer = Runs()
    run_script("window", streamer=streamer)
    assert [len(run) for run in streamer.runs] == [3, *TRACES["window"]["accepted"]]
    assert [token for run in streamer.runs for token in run] == [1, 2, 3, *SCRIPT[:12]]
    assert streamer.ended


def test_a_stream_that_can_is_shown_the_draft_of_the_next_sweep() -> None:
    tokenizer = byte_tokenizer()
    streamer = Collected(tokenizer)
    run_script("window", streamer=streamer)
    assert [len(draft) for draft in streamer.drafts] == [slots - 1 for slots in TRACES["window"]["slots"][1:]] + [0]
    assert streamer.drafts[0] == SCRIPT[1:4]


def test_a_stream_of_several_rows_is_refused() -> None:
    ids = torch.tensor([prompt(7), prompt(7, seed=1)])
    with pytest.raises(ConfigError, match="one text at a time"):
        generate(shared_model("llama"), ids, max_new_tokens=4, streamer=Runs())


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


# Refusals --------------------------------------------------------------------------------------------------------


class NeverStop(transformers.StoppingCriteria):
    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        return torch.zeros(len(input_ids), dtype=torch.bool)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"do_sample": True}, "do_sample=True"),
        ({"do_sample": True, "temperature": 0.7}, "do_sample=True"),
        ({"num_beams": 3}, "num_beams=3"),
        ({"repetition_penalty": 1.3}, "RepetitionPenalty"),
        ({"min_new_tokens": 2, "eos_token_id": 3}, "MinNewTokens"),
        ({"bad_words_ids": [[3]]}, "NoBadWords"),
        ({"no_repeat_ngram_size": 2}, "NoRepeatNGram"),
        ({"suppress_tokens": [3]}, "SuppressTokens"),
        ({"max_time": 9.0}, "MaxTime"),
        ({"stopping_criteria": transformers.StoppingCriteriaList([NeverStop()])}, "NeverStop"),
        ({"output_scores": True, "return_dict_in_generate": True}, "output_scores=True"),
    ],
)
@pytest.mark.parametrize("direct", [True, False])
def test_what_would_change_the_text_is_refused_by_name(options: dict[str, Any], named: str, direct: bool) -> None:
    model = shared_model("llama")
    options = {"max_new_tokens": 4, "pad_token_id": 0, **options}
    with pytest.raises(ConfigError, match=named):
        if direct:
            generate(model, prompt_tensor(), **options)
        else:
            model.generate(prompt_tensor(), custom_generate=generate, **options)


@pytest.mark.parametrize("direct", [True, False])
def test_sampling_by_the_models_own_settings_is_refused(direct: bool) -> None:
    model = tiny_model("llama")
    model.generation_config = GenerationConfig(do_sample=True, temperature=0.6, pad_token_id=0)
    with pytest.raises(ConfigError, match=r"do_sample=True.*do_sample=False"):
        if direct:
            generate(model, prompt_tensor(), max_new_tokens=4)
        else:
            model.generate(prompt_tensor(), custom_generate=generate, max_new_tokens=4)
    assert ours(model, prompt(), 4, do_sample=False) == library(model, prompt(), 4)


def test_sampling_in_a_generation_config_is_refused() -> None:
    config = GenerationConfig(do_sample=True, max_new_tokens=4, pad_token_id=0)
    with pytest.raises(ConfigError, match="do_sample=True"):
        generate(shared_model("llama"), prompt_tensor(), generation_config=config)


def test_going_on_from_a_cache_is_refused() -> None:
    with pytest.raises(ConfigError, match="a cache of the caller"):
        generate(shared_model("llama"), prompt_tensor(), max_new_tokens=4, cache=DynamicCache())


def test_embeddings_in_place_of_ids_are_refused() -> None:
    model = shared_model("llama")
    embeddings = model.get_input_embeddings()(prompt_tensor())
    with pytest.raises(ConfigError, match="inputs_embeds"):
        generate(model, inputs_embeds=embeddings, max_new_tokens=4)


def test_a_prompt_longer_than_the_context_is_refused() -> None:
    model = shared_model("gpt2")
    with pytest.raises(ModelError, match=r"longer than the model's context.*256 tokens"):
        generate(model, torch.tensor([prompt(256)]), max_new_tokens=4)


def test_a_budget_beyond_the_context_names_the_most_there_is() -> None:
    model = shared_model("gpt2")
    with pytest.raises(ModelError, match="max_new_tokens=6 or less"):
        generate(model, torch.tensor([prompt(250)]), max_new_tokens=7)
    for decoder in DECODERS:
        assert ours(model, prompt(250), 6, decoder=decoder) == library(model, prompt(250), 6)


def test_an_empty_prompt_is_refused() -> None:
    with pytest.raises(JForceError, match="prompt is empty"):
        ids = torch.tensor([[0, 0], [3, 4]])
        generate(shared_model("llama"), ids, attention_mask=torch.tensor([[0, 0], [1, 1]]), max_new_tokens=4)


def _tiny(model_type: str, **settings: Any) -> PreTrainedModel:
    common = {"vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    common |= {"intermediate_size": 48, "num_key_value_heads": 2, "max_position_embeddings": 64}
    config = AutoConfig.for_model(model_type, **common, **settings)
    return AutoModelForCausalLM.from_config(config).eval()


UNFIT = {
    "mamba": {"state_size": 4},
    "mamba2": {"state_size": 4, "num_heads": 8, "head_dim": 8, "n_groups": 1},
    "falcon_mamba": {"state_size": 4},
    "recurrent_gemma": {"lru_width": 32},
    "rwkv": {"attention_hidden_size": 32},
    "qwen3_next": {"num_experts": 0, "linear_num_value_heads": 4, "linear_num_key_heads": 2},
    "llama4_text": {"num_local_experts": 2, "attention_chunk_size": 8, "intermediate_size_mlp": 48, "head_dim": 8},
}


def _boom(*args: Any, **kwargs: Any) -> None:
    raise AssertionError("the model ran")


@pytest.mark.parametrize("model_type", UNFIT)
@pytest.mark.parametrize("direct", [True, False])
def test_models_that_cannot_roll_back_are_refused_before_the_first_forward(model_type: str, direct: bool) -> None:
    model = _tiny(model_type, **UNFIT[model_type])
    model.forward = _boom
    with pytest.raises(CacheError, match=type(model).__name__):
        if direct:
            generate(model, prompt_tensor(), max_new_tokens=4)
        else:
            model.generate(prompt_tensor(), custom_generate=generate, do_sample=False, max_new_tokens=4)


def test_an_encoder_decoder_is_refused_before_any_part_of_it_runs() -> None:
    config = AutoConfig.for_model("t5", vocab_size=VOCAB, d_model=16, d_kv=4, d_ff=16, num_layers=1, num_heads=2)
    model = AutoModelForSeq2SeqLM.from_config(config)
    model.forward = model.get_encoder().forward = _boom
    with pytest.raises(ModelError, match="encoder-decoder"):
        generate(model, prompt_tensor(), max_new_tokens=4)
