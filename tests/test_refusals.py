"""What is not supported is refused by name: settings, models, prompts; never ignored."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    DynamicCache,
    PreTrainedModel,
)
from transformers.generation.stopping_criteria import ConfidenceCriteria

from decoding import DECODERS, library, ours, prompt, prompt_tensor
from jacobi_forcing import JForceError, generate
from jacobi_forcing.errors import CacheError, ConfigError, DataError, ModelError
from tiny_models import VOCAB, shared_model, tiny_model


class Strange(transformers.LogitsProcessor):
    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores


CONFIDENCE = transformers.StoppingCriteriaList([ConfidenceCriteria(0.5)])


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"num_beams": 3}, "num_beams=3"),
        ({"num_beams": 2, "num_return_sequences": 2}, "num_beams=2"),
        ({"num_beams": 2, "do_sample": True}, "num_beams=2"),
        ({"guidance_scale": 1.5}, "ClassifierFreeGuidance"),
        ({"logits_processor": transformers.LogitsProcessorList([Strange()])}, "Strange"),
        ({"stopping_criteria": CONFIDENCE}, "ConfidenceCriteria"),
        ({"output_scores": True, "return_dict_in_generate": True}, "output_scores=True"),
        ({"output_logits": True, "return_dict_in_generate": True}, "output_logits=True"),
        ({"output_hidden_states": True, "return_dict_in_generate": True}, "output_hidden_states=True"),
        ({"prompt_lookup_num_tokens": 3}, "assisted_generation"),
        ({"penalty_alpha": 0.6, "top_k": 4}, "contrastive_search"),
        ({"position_ids": torch.arange(11)[None] + 1}, "position_ids of the caller"),
    ],
)
@pytest.mark.parametrize("direct", [True, False])
def test_what_would_change_the_text_or_the_output_is_refused_by_name(
    options: dict[str, Any], named: str, direct: bool
) -> None:
    model = shared_model("llama")
    options = {"max_new_tokens": 4, "pad_token_id": 0, **options}
    with pytest.raises(ConfigError, match=named):
        if direct:
            generate(model, prompt_tensor(), **options)
        else:
            model.generate(prompt_tensor(), custom_generate=generate, **options)


@pytest.mark.parametrize("direct", [True, False])
def test_an_assistant_is_refused(direct: bool) -> None:
    options: dict[str, Any] = {"assistant_model": tiny_model("llama"), "max_new_tokens": 4}
    with pytest.raises(ConfigError, match="assisted_generation"):
        if direct:
            generate(shared_model("llama"), prompt_tensor(), **options)
        else:
            shared_model("llama").generate(prompt_tensor(), custom_generate=generate, **options)


def test_an_input_that_only_some_models_take_is_refused() -> None:
    with pytest.raises(ConfigError, match="token_type_ids"):
        generate(
            shared_model("gpt2"), prompt_tensor(), token_type_ids=torch.ones_like(prompt_tensor()), max_new_tokens=4
        )


@pytest.mark.parametrize("direct", [True, False])
def test_several_greedy_texts_of_one_prompt_are_refused_as_the_library_refuses_them(direct: bool) -> None:
    with pytest.raises(ValueError, match="num_return_sequences"):
        if direct:
            generate(shared_model("llama"), prompt_tensor(), num_return_sequences=2)
        else:
            shared_model("llama").generate(prompt_tensor(), custom_generate=generate, num_return_sequences=2)


@pytest.mark.parametrize("length", [1, 2])
def test_padding_on_the_right_is_refused(length: int) -> None:
    ids = torch.tensor([prompt(7), [*prompt(5), 0, 0]])[2 - length :]
    with pytest.raises(DataError, match=r"padded on the right.*padding_side"):
        generate(shared_model("llama"), ids, attention_mask=(ids != 0).long(), max_new_tokens=4)


def test_a_hole_in_the_mask_is_refused_where_the_library_would_count_it_in_a_window() -> None:
    ids = torch.tensor([[0, *prompt(5), 0, *prompt(4)]])
    with pytest.raises(DataError, match=r"masked in its middle.*sliding window"):
        generate(shared_model("gemma3"), ids, attention_mask=(ids != 0).long(), max_new_tokens=4)


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
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
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


def test_a_model_that_looks_ahead_is_refused_before_the_first_forward() -> None:
    model = _tiny("bert")
    model.forward = _boom
    with pytest.raises(ModelError, match="is_decoder=False"):
        generate(model, prompt_tensor(), max_new_tokens=4)


def test_an_encoder_decoder_is_refused_before_any_part_of_it_runs() -> None:
    config = AutoConfig.for_model("t5", vocab_size=VOCAB, d_model=16, d_kv=4, d_ff=16, num_layers=1, num_heads=2)
    model = AutoModelForSeq2SeqLM.from_config(config)
    model.forward = model.get_encoder().forward = _boom
    with pytest.raises(ModelError, match="encoder-decoder"):
        generate(model, prompt_tensor(), max_new_tokens=4)
