"""Packed weights: the same model, faster for a few tokens; nothing about it may depend on them but the speed."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from decoding import DECODERS, library, ours, prompt
from jacobi_forcing import pack_weights
from jacobi_forcing.adapter import GatedAdapter
from jacobi_forcing.backbone import Backbone
from jacobi_forcing.cli.app import app
from jacobi_forcing.config import ModelConfig
from jacobi_forcing.errors import ModelError
from jacobi_forcing.loading import load
from jacobi_forcing.packed import PackedConv1D, PackedLinear
from test_adapter import IDS, adapted, logits
from tiny_folder import save_tiny
from tiny_models import ARCHITECTURES, shared_model, tiny_model

each_architecture = pytest.mark.parametrize("arch", ARCHITECTURES)


@each_architecture
def test_logits_are_those_of_the_plain_layers(arch: str) -> None:
    model = tiny_model(arch)
    count = pack_weights(model)
    assert count == sum(isinstance(layer, (PackedLinear, PackedConv1D)) for layer in model.modules()) > 8
    packed, plain = logits(model), logits(shared_model(arch))
    torch.testing.assert_close(packed, plain, rtol=1e-4, atol=1e-4)
    assert all(layer._copy is not None for layer in model.modules() if isinstance(layer, PackedLinear))


@each_architecture
@pytest.mark.parametrize("decoder", DECODERS)
def test_every_decoder_equals_the_library_on_the_same_weights(arch: str, decoder: str) -> None:
    model = tiny_model(arch)
    pack_weights(model)
    assert ours(model, prompt(), 40, decoder=decoder, block_size=8) == library(model, prompt(), 40)


@each_architecture
def test_gradients_are_those_of_the_plain_layers_to_the_bit(arch: str) -> None:
    grads = []
    for pack in (False, True):
        model = tiny_model(arch)
        if pack:
            pack_weights(model)
        model(input_ids=IDS, labels=IDS).loss.backward()
        grads.append({name: weight.grad for name, weight in model.named_parameters()})
    assert all(torch.equal(grads[0][name], grads[1][name]) for name in grads[0])


@pytest.mark.parametrize("kind", [{"fused": True}, {"foreach": True}, {"foreach": False}])
@pytest.mark.parametrize("arch", ["llama", "gpt2"])
def test_a_step_of_any_optimiser_is_seen(arch: str, kind: dict[str, bool]) -> None:
    model = tiny_model(arch)
    pack_weights(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, **kind)
    for _ in range(2):
        before = logits(model)
        model(input_ids=IDS, labels=IDS).loss.backward()
        optimizer.step()
        plain = tiny_model(arch)
        plain.load_state_dict(model.state_dict())
        torch.testing.assert_close(logits(model), logits(plain), rtol=1e-4, atol=1e-4)
        assert not torch.allclose(before, logits(model), atol=1e-2)


@pytest.mark.parametrize("arch", ["llama", "gpt2"])
def test_a_step_is_seen_where_something_was_measured_before_it(arch: str) -> None:
    model = tiny_model(arch)
    pack_weights(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
    model(input_ids=IDS, labels=IDS).loss.backward()
    before = logits(model)
    optimizer.step()
    plain = tiny_model(arch)
    plain.load_state_dict(model.state_dict())
    torch.testing.assert_close(logits(model), logits(plain), rtol=1e-4, atol=1e-4)
    assert not torch.allclose(before, logits(model), atol=1e-2)


def test_frozen_weights_are_not_packed_anew_for_the_steps_of_others() -> None:
    model = tiny_model("llama")
    model.requires_grad_(False)
    pack_weights(model)
    logits(model)
    layers = [module for module in model.modules() if isinstance(module, PackedLinear)]
    copies = [layer._copy for layer in layers]
    other = nn.Linear(2, 2)
    other(torch.ones(2)).sum().backward()
    torch.optim.SGD(other.parameters(), lr=0.1).step()
    logits(model)
    assert all(copy_ is layer._copy for copy_, layer in zip(copies, layers, strict=True))


@pytest.mark.parametrize("arch", ["llama", "gpt2"])
def test_what_torch_does_not_count_is_seen_when_decoding_begins(arch: str) -> None:
    model, plain = tiny_model(arch), tiny_model(arch)
    pack_weights(model)
    ours(model, prompt(), 8)
    for weights in (model.parameters(), plain.parameters()):
        for weight in weights:
            weight.data.mul_(-1.5)
    pack_weights(plain)
    assert ours(model, prompt(), 20) == ours(plain, prompt(), 20)
    torch.testing.assert_close(logits(model), logits(plain), rtol=1e-4, atol=1e-4)
    for weights in (model.parameters(), plain.parameters()):
        for weight in weights:
            weight.data.mul_(-0.5)
    assert pack_weights(model) == pack_weights(plain) == 0  # before a bare forward pass
    torch.testing.assert_close(logits(model), logits(plain), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("arch", ["llama", "gpt2"])
def test_a_weight_that_changes_is_packed_anew(arch: str) -> None:
    model, plain = tiny_model(arch), tiny_model(arch)
    pack_weights(model)
    before = logits(model)
    for changed in (model, plain):
        optimizer = torch.optim.SGD(changed.parameters(), lr=0.1)
        changed(input_ids=IDS, labels=IDS).loss.backward()
        optimizer.step()
    after = logits(model)
    assert not torch.allclose(before, after, atol=1e-2)
    torch.testing.assert_close(after, logits(plain), rtol=1e-4, atol=1e-4)
    plain.load_state_dict(shared_model(arch).state_dict())
    model.load_state_dict(plain.state_dict())
    torch.testing.assert_close(logits(model), before, rtol=1e-4, atol=1e-4)
    # Another dtype and back: the copy is of weights that are gone.
    model.to(torch.bfloat16).to(torch.float32)
    torch.testing.assert_close(logits(model), logits(plain.to(torch.bfloat16).to(torch.float32)), rtol=1e-4, atol=1e-4)


def test_in_another_dtype_and_under_autocast_the_plain_product_is_taken() -> None:
    model, plain = tiny_model("llama"), tiny_model("llama")
    pack_weights(model)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(logits(model), logits(plain))
    assert torch.equal(logits(model.bfloat16()), logits(plain.bfloat16()))


def test_it_is_saved_copied_and_pickled_as_the_plain_model(tmp_path: Path) -> None:
    model, plain = tiny_model("gpt2"), shared_model("gpt2")
    pack_weights(model)
    packed = logits(model)
    assert model.state_dict().keys() == plain.state_dict().keys()
    assert model.lm_head.weight is model.transformer.wte.weight  # tied weights stay tied
    model.save_pretrained(tmp_path)
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(tmp_path)), logits(plain))
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(logits(other), packed)


@each_architecture
@pytest.mark.parametrize("first", ["pack", "attach"])
def test_an_adapter_drafts_on_packed_weights_and_is_taken_off_them(arch: str, first: str) -> None:
    if first == "pack":
        model = tiny_model(arch)
        pack_weights(model)
        base = logits(model)
        adapter = GatedAdapter.attach(model, rank=4)
    else:
        model, adapter = adapted(arch)
        pack_weights(model)
        base = logits(model)
    for weight in adapter.parameters():
        torch.nn.init.normal_(weight, std=0.2)
    text = library(model, prompt(), 40)
    assert ours(model, prompt(), 40, decoder="window", block_size=8) == text
    adapter.detach()
    assert torch.equal(logits(model), base)


def test_what_cannot_be_packed_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        ModelError,
        match=r"no weights to pack; seen: bfloat16 on cpu; expected: .*float32 on a CPU; leave pack_weights out",
    ):
        pack_weights(tiny_model("llama").bfloat16())
    model = tiny_model("llama")
    assert not Backbone(model).packed_weights
    assert pack_weights(model) > 0
    assert Backbone(model).packed_weights
    assert pack_weights(model) == 0  # packed already
    folder = save_tiny(tmp_path / "model")
    with pytest.raises(ModelError, match="no weights to pack"):
        load(ModelConfig(str(folder), device="cpu", dtype="bfloat16", pack_weights=True))


def test_a_torch_that_cannot_pack_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(weight: torch.Tensor) -> torch.Tensor:
        raise AttributeError("no such operator")

    monkeypatch.setattr("jacobi_forcing.packed._packed", missing)
    model = tiny_model("llama")
    with pytest.raises(ModelError, match="cannot pack weights; seen: no such operator"):
        pack_weights(model)
    assert not any(isinstance(layer, PackedLinear) for layer in model.modules())


def test_the_command_line_packs(tmp_path: Path) -> None:
    folder = save_tiny(tmp_path / "model")
    assert any(isinstance(x, PackedLinear) for x in load(ModelConfig(str(folder), pack_weights=True)).model.modules())
    texts = [
        CliRunner().invoke(app, ["generate", "--model", str(folder), "--max-new-tokens", "12", "hello", *flags])
        for flags in ([], ["--pack-weights"])
    ]
    assert texts[0].exit_code == texts[1].exit_code == 0, texts[1].output
    assert texts[0].stdout == texts[1].stdout
