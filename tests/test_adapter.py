"""The gated adapter: per token on or off, the base untouched, and a plain peft adapter on disk."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from transformers import PreTrainedModel

from jacobi_forcing.adapter import GatedAdapter
from jacobi_forcing.adapter_file import SETTINGS, WEIGHTS
from jacobi_forcing.errors import ArtefactError, ConfigError, ModelError
from tiny_models import ARCHITECTURES, VOCAB, shared_model, tiny_model

each_architecture = pytest.mark.parametrize("arch", ARCHITECTURES)
IDS = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6], [2, 7, 1, 8, 2, 8, 1, 8]])


def adapted(arch: str, seed: int = 0) -> tuple[PreTrainedModel, GatedAdapter]:
    """A tiny model with an adapter whose product is not zero."""
    model = tiny_model(arch)
    adapter = GatedAdapter.attach(model, rank=4, seed=seed)
    torch.manual_seed(seed)
    for weight in adapter.parameters():
        torch.nn.init.normal_(weight, std=0.2)
    return model, adapter


@torch.no_grad()
def logits(model: torch.nn.Module) -> torch.Tensor:
    return model(input_ids=IDS).logits


@each_architecture
def test_with_the_gate_closed_the_model_is_its_base_to_the_bit(arch: str) -> None:
    model, _ = adapted(arch)
    assert torch.equal(logits(model), logits(shared_model(arch)))


@each_architecture
def test_a_gated_token_changes_itself_and_what_looks_at_it_and_nothing_else(arch: str) -> None:
    model, adapter = adapted(arch)
    plain = logits(model)
    with adapter.gated(torch.tensor([8 + 5, 8 + 6])):  # second row, columns 5 and 6
        some = logits(model)
    torch.testing.assert_close(some[0], plain[0])
    torch.testing.assert_close(some[1, :5], plain[1, :5])
    assert (some[1, 5:] - plain[1, 5:]).abs().amax(-1).min() > 1e-3
    assert torch.equal(logits(model), plain)


@each_architecture
def test_every_token_by_index_equals_all_tokens(arch: str) -> None:
    model, adapter = adapted(arch)
    with adapter.gated():
        everything = logits(model)
    for index in (torch.arange(16), slice(0, 16)):
        with adapter.gated(index):
            torch.testing.assert_close(logits(model), everything)
            torch.testing.assert_close(model(input_ids=IDS).logits, everything)  # with gradients, another way


@each_architecture
def test_a_slice_equals_the_same_tokens_by_index(arch: str) -> None:
    model, adapter = adapted(arch)
    found = []
    for index in (torch.arange(5, 13), slice(5, 13)):
        with adapter.gated(index):
            found += [logits(model), model(input_ids=IDS).logits.detach()]
    for other in found[1:]:
        torch.testing.assert_close(other, found[0])


@each_architecture
def test_on_disk_it_is_a_plain_peft_adapter(arch: str, tmp_path: Path) -> None:
    model, adapter = adapted(arch)
    with adapter.gated():
        expected = logits(model)
    adapter.save(tmp_path, base="some/base")
    assert json.loads((tmp_path / SETTINGS).read_text())["base_model_name_or_path"] == "some/base"
    torch.testing.assert_close(logits(PeftModel.from_pretrained(tiny_model(arch), str(tmp_path))), expected)


def test_in_bfloat16_it_is_half_as_large_and_loads_as_the_rounded_weights(tmp_path: Path) -> None:
    model = tiny_model("llama")
    adapter = GatedAdapter.attach(model, rank=4)
    for part in adapter.parameters():
        torch.nn.init.normal_(part)
    exact = [part.detach().clone() for part in adapter.parameters()]
    adapter.save(tmp_path / "whole")
    adapter.save(tmp_path / "half", dtype=torch.bfloat16)
    assert all(torch.equal(part, other) for part, other in zip(adapter.parameters(), exact, strict=True))
    adapter.detach()
    sizes = [(tmp_path / name / WEIGHTS).stat().st_size for name in ("whole", "half")]
    assert sizes[1] < 0.65 * sizes[0]  # what is left is the header
    ids = torch.arange(VOCAB - 8, VOCAB)[None]
    base = model(ids).logits
    again = GatedAdapter.load(model, tmp_path / "half")
    for part, other in zip(again.parameters(), exact, strict=True):
        assert part.dtype == torch.float32
        assert torch.equal(part, other.bfloat16().float())
    assert torch.equal(model(ids).logits, base)  # what verifies has not heard of it
    with again.gated():
        assert not torch.equal(model(ids).logits, base)


@each_architecture
def test_load_generate_unload_leaves_the_base_bit_equal(arch: str, tmp_path: Path) -> None:
    adapted(arch)[1].save(tmp_path)
    model = tiny_model(arch)
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    adapter = GatedAdapter.load(model, tmp_path)
    with adapter.gated():
        assert not torch.equal(logits(model), logits(shared_model(arch)))
    adapter.detach()
    after = model.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(weight, after[name]) for name, weight in before.items())
    assert torch.equal(logits(model), logits(shared_model(arch)))
    assert GatedAdapter.of(model) is None


def test_a_fresh_adapter_does_nothing_yet() -> None:
    model = tiny_model("llama")
    adapter = GatedAdapter.attach(model, rank=2)
    with adapter.gated():
        assert torch.equal(logits(model), logits(shared_model("llama")))


def test_only_its_own_weights_are_trained() -> None:
    model, adapter = adapted("llama")
    with adapter.gated(torch.tensor([3, 4])):
        model(input_ids=IDS).logits.square().mean().backward()
    assert {id(p) for p in model.parameters() if p.requires_grad} == {id(p) for p in adapter.parameters()}
    assert all(weight.grad is not None and weight.grad.abs().sum() > 0 for weight in adapter.parameters())


def test_it_goes_on_the_layers_that_are_named() -> None:
    model = tiny_model("llama")
    adapter = GatedAdapter.attach(model, rank=2, targets=["q_proj", "v_proj"])
    assert {name.rsplit(".", 1)[1] for name in adapter.layers} == {"q_proj", "v_proj"}
    assert GatedAdapter.attach(tiny_model("llama")).layers.keys() > adapter.layers.keys()
    assert not any("lm_head" in name for name in GatedAdapter.attach(tiny_model("gpt2")).layers)


def test_the_same_seed_draws_the_same_weights_and_leaves_the_global_generator_alone() -> None:
    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    first, second = (GatedAdapter.attach(tiny_model("llama"), seed=7) for _ in range(2))
    torch.manual_seed(5)
    GatedAdapter.attach(tiny_model("llama", seed=5), seed=7)
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))
    torch.manual_seed(5)
    model = shared_model("llama")
    GatedAdapter.attach(model, seed=7).detach()
    assert torch.equal(torch.rand(1), expected)
    model.requires_grad_(True)


def test_merging_is_refused_with_the_reason() -> None:
    with pytest.raises(ModelError, match="would no longer be the base's"):
        adapted("llama")[1].merge()


def test_what_cannot_be_is_refused(tmp_path: Path) -> None:
    model, adapter = adapted("llama")
    with pytest.raises(ModelError, match="already"):
        GatedAdapter.attach(model)
    with pytest.raises(ConfigError, match="at least 1"):
        GatedAdapter.attach(tiny_model("llama"), rank=0)
    with pytest.raises(ConfigError, match="No linear layer"):
        GatedAdapter.attach(tiny_model("llama"), targets=["nothing"])
    with pytest.raises(ArtefactError, match="holds no adapter"):
        GatedAdapter.load(tiny_model("llama"), tmp_path)
    adapter.save(tmp_path)
    with pytest.raises(ModelError, match="another model"):
        GatedAdapter.load(tiny_model("gpt2"), tmp_path)
    with pytest.raises(ModelError, match="does not fit"):
        other = tiny_model("llama", hidden_size=16)
        GatedAdapter.load(other, tmp_path)
    assert GatedAdapter.of(other) is None
    settings = json.loads((tmp_path / SETTINGS).read_text())
    (tmp_path / SETTINGS).write_text(json.dumps(settings | {"use_dora": True}))
    with pytest.raises(ArtefactError, match="plain LoRA"):
        GatedAdapter.load(tiny_model("llama"), tmp_path)
    assert (tmp_path / WEIGHTS).is_file()
    assert IDS.max() < VOCAB
