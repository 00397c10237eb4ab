"""Any model behind one call: masks, heads, end tokens, and what is refused."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedModel

from decoding import prompt
from jacobi_forcing.backbone import Backbone, additive, as_ids
from jacobi_forcing.errors import CacheError, ModelError
from jacobi_forcing.sweep import Line, Lines, sweep_logits
from tiny_models import ARCHITECTURES, VOCAB, shared_model, tiny_model

each_architecture = pytest.mark.parametrize("arch", ARCHITECTURES)
LOWEST = torch.finfo(torch.float32).min


def other_model(model_type: str, **settings: Any) -> PreTrainedModel:
    common = {"vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    common |= {"intermediate_size": 48, "num_key_value_heads": 2, "max_position_embeddings": 64, "pad_token_id": None}
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **common, **settings)).eval()


# Masks -----------------------------------------------------------------------------------------------------------


def test_a_mask_adds_nothing_where_visible_and_the_lowest_value_elsewhere() -> None:
    mask = additive(torch.tensor([[True, False]]), torch.float32)
    assert mask.tolist() == [[0.0, LOWEST]]
    assert additive(torch.tensor([False]), torch.bfloat16).item() == torch.finfo(torch.bfloat16).min


def test_a_sliding_window_hides_what_lies_too_far_back() -> None:
    backbone = Backbone(tiny_model("mistral", sliding_window=3))
    positions = torch.arange(5)[None]
    mask = backbone.attention_mask(torch.ones(1, 5, 5, dtype=torch.bool).tril(), positions, positions)
    assert isinstance(mask, torch.Tensor)
    assert (mask[0, 0] == 0).int().tolist() == [
        [1, 0, 0, 0, 0],
        [1, 1, 0, 0, 0],
        [1, 1, 1, 0, 0],
        [0, 1, 1, 1, 0],
        [0, 0, 1, 1, 1],
    ]


def test_kinds_of_layers_get_a_mask_each() -> None:
    backbone = Backbone(shared_model("gemma3"))
    assert backbone.windows == {"sliding_attention": 6, "full_attention": None}
    positions = torch.arange(8)[None]
    masks = backbone.attention_mask(torch.ones(1, 8, 8, dtype=torch.bool).tril(), positions, positions)
    assert isinstance(masks, dict)
    assert (masks["full_attention"] == 0).sum() == 36
    assert (masks["sliding_attention"] == 0).sum() == 36 - 3


@each_architecture
@pytest.mark.parametrize(("committed", "queries"), [(4, 1), (5, 1), (6, 1), (4, 3), (9, 5), (30, 16)])
def test_the_causal_mask_equals_the_general_one(arch: str, committed: int, queries: int) -> None:
    backbone = Backbone(shared_model(arch))
    cache = backbone.new_cache()
    with torch.no_grad():
        sweep_logits(backbone, cache, Lines.pack([[Line(prompt(committed), 0)]]))
    cache.commit([range(committed)])
    lines = Lines.pack([[Line(prompt(queries), committed)]])
    general = backbone.attention_mask(lines.visible(committed), lines.positions, lines.kv_positions(committed))
    causal = backbone.causal_mask(queries, cache)
    if causal is None:
        assert queries == 1
        causal = torch.zeros(1, 1, 1, committed + 1)
        causal = causal if isinstance(general, torch.Tensor) else dict.fromkeys(general, causal)
    if isinstance(general, torch.Tensor):
        general, causal = {"all": general}, {"all": causal}
    assert general.keys() == causal.keys()
    for kind, mask in general.items():
        assert torch.equal(mask, causal[kind])


def test_nothing_committed_needs_no_mask() -> None:
    backbone = Backbone(shared_model("gemma3"))
    assert backbone.causal_mask(20, backbone.new_cache()) is None


# Heads -----------------------------------------------------------------------------------------------------------

HEADS: dict[str, dict[str, Any]] = {
    "gemma2": {"head_dim": 8, "final_logit_softcapping": 2.0, "attn_implementation": "eager"},
    "cohere": {"logit_scale": 0.3},
    "granite": {"logits_scaling": 3.0},
}


@each_architecture
def test_hidden_states_and_head_equal_the_models_own_logits(arch: str) -> None:
    backbone = Backbone(shared_model(arch))
    ids, positions = torch.tensor([prompt()]), torch.arange(11)[None]
    mask = backbone.attention_mask(torch.ones(1, 11, 11, dtype=torch.bool).tril(), positions, positions)
    with torch.no_grad():
        ours = backbone.logits(backbone.hidden(ids, positions, mask))
        theirs = shared_model(arch)(input_ids=ids).logits
    torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)
    backbone.verify_head()


@pytest.mark.parametrize("model_type", HEADS)
def test_scaled_and_capped_heads_are_known(model_type: str) -> None:
    backbone = Backbone(other_model(model_type, **HEADS[model_type]))
    for parameter in backbone.model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    ids, positions = torch.tensor([prompt()]), torch.arange(11)[None]
    hidden = backbone.hidden(ids, positions, None)
    torch.testing.assert_close(backbone.logits(hidden), backbone.forward(ids, positions, None), atol=1e-4, rtol=1e-4)
    assert not torch.allclose(backbone.logits(hidden), backbone.model.get_output_embeddings()(hidden), atol=1e-2)
    backbone.verify_head()


def test_a_head_that_does_something_unknown_is_found_out() -> None:
    model = tiny_model("llama")
    backbone = Backbone(model)
    own = model.forward

    def doubled(*args: Any, **kwargs: Any) -> Any:
        out = own(*args, **kwargs)
        out.logits = out.logits * 2
        return out

    model.forward = doubled
    with pytest.raises(ModelError, match="changes its logits"):
        backbone.verify_head()


def test_checking_the_head_leaves_the_training_mode_alone() -> None:
    model = tiny_model("gpt2").train()
    Backbone(model).verify_head()
    assert model.training


def test_gradients_flow_through_hidden_and_logits() -> None:
    model = tiny_model("llama")
    backbone = Backbone(model)
    backbone.logits(backbone.hidden(torch.tensor([prompt()]), torch.arange(11)[None], None)).sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_columns_are_cut_for_models_that_cannot_do_it_themselves() -> None:
    model = tiny_model("gpt2")
    own = model.forward
    model.forward = lambda input_ids, **kwargs: own(input_ids, **kwargs)
    backbone = Backbone(model)
    ids, positions = torch.tensor([prompt()]), torch.arange(11)[None]
    with torch.no_grad():
        cut = backbone.forward(ids, positions, None, keep=torch.tensor([3, 10]))
        assert torch.equal(cut, backbone.forward(ids, positions, None)[:, [3, 10]])


# Facts about a model ---------------------------------------------------------------------------------------------


def test_facts_come_from_the_config() -> None:
    backbone = Backbone(shared_model("llama"))
    assert (backbone.vocab_size, backbone.context_length) == (VOCAB, 256)
    assert (backbone.device.type, backbone.dtype) == ("cpu", torch.float32)


def test_a_model_without_a_stated_context_has_none() -> None:
    backbone = Backbone(tiny_model("llama"))
    backbone.config = SimpleNamespace()
    assert backbone.context_length is None


def test_end_tokens_come_from_the_generation_config_first() -> None:
    model = tiny_model("llama", eos_token_id=5)
    assert Backbone(model).eos_ids == [5]
    model.generation_config = GenerationConfig(eos_token_id=[7, 8])
    assert Backbone(model).eos_ids == [7, 8]
    assert Backbone(shared_model("llama")).eos_ids == []


@pytest.mark.parametrize(
    ("value", "ids"),
    [(None, []), (3, [3]), ([3, 4], [3, 4]), ((3,), [3]), (torch.tensor(3), [3]), (torch.tensor([3, 4]), [3, 4])],
)
def test_ids_may_come_in_any_form(value: Any, ids: list[int]) -> None:
    assert as_ids(value) == ids


# Refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kernel", ["flash_attention_2", "flex_attention", "paged|sdpa"])
def test_kernels_that_take_no_mask_are_refused(kernel: str) -> None:
    model = tiny_model("llama")
    model.config._attn_implementation_internal = kernel
    with pytest.raises(ModelError, match=r'attn_implementation="sdpa"'):
        Backbone(model)


def test_a_model_without_a_head_is_refused() -> None:
    with pytest.raises(ModelError, match="no language-modelling head"):
        Backbone(tiny_model("llama").model)


def test_chunked_attention_is_refused_although_its_cache_looks_like_a_window() -> None:
    model = tiny_model("llama")
    model.config.attention_chunk_size = 8
    with pytest.raises(CacheError, match="chunked_attention"):
        Backbone(model)


def test_layers_of_an_unknown_kind_are_refused() -> None:
    model = tiny_model("qwen3")
    model.config.layer_types = ["full_attention", "a_new_kind"]
    with pytest.raises(CacheError, match="a_new_kind"):
        Backbone(model)
