"""An adapter's folder is a `custom_generate` of its base: it drafts for one call, and the model is what it was."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from decoding import library, prompt, prompt_tensor, reference
from jacobi_forcing import DecodeConfig, GatedAdapter, generate_with_adapter
from jacobi_forcing.decode import borrowed
from jacobi_forcing.errors import ArtefactError, ConfigError, ModelError
from test_adapter import adapted
from test_saved_settings import TRUST, modules  # noqa: F401  # a fixture
from tiny_models import shared_model, tiny_model

OPTIONS: dict[str, Any] = {"max_new_tokens": 20, "return_dict_in_generate": True}


@pytest.fixture
def folder(tmp_path: Path, modules: None) -> Path:  # noqa: F811  # the fixture
    adapted("llama")[1].save(tmp_path / "my.adapter", decode=DecodeConfig(block_size=6))
    return tmp_path / "my.adapter"


def state(model: PreTrainedModel) -> tuple[list[str], list[torch.Tensor], list[bool]]:
    return (
        [f"{name} {type(module).__name__}" for name, module in model.named_modules()],
        [value.clone() for value in model.state_dict().values()],
        [value.requires_grad for value in model.parameters()],
    )


@pytest.mark.parametrize("way", ["library", "direct"])
def test_the_adapter_drafts_and_the_model_is_left_as_it_was(folder: Path, way: str) -> None:
    model = tiny_model("llama")
    next(model.parameters()).requires_grad_(False)
    before = state(model)
    for _ in range(2):  # the second call takes the layers of the first
        if way == "library":
            inputs = {"input_ids": prompt_tensor(), "attention_mask": torch.ones(1, 11, dtype=torch.long)}
            out = model.generate(**inputs, custom_generate=str(folder), **TRUST, **OPTIONS)
        else:
            out = generate_with_adapter(model, prompt_tensor(), adapter=folder, **OPTIONS)
        assert out.sequences[0, 11:].tolist() == reference("llama")[:20]
        # Prompt and verified text, then the draft of the saved settings: an adapter was there.
        assert out.stats.rows[0].sweeps[0].slots == 11 + 7
        after = state(model)
        assert (after[0], after[2]) == (before[0], before[2])
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(after[1], before[1], strict=True))
        assert library(model, prompt(), 20) == reference("llama")[:20]


def test_settings_of_the_call_come_before_those_of_the_folder(folder: Path) -> None:
    model = tiny_model("llama")
    out = model.generate(
        prompt_tensor(), custom_generate=str(folder), **TRUST, **OPTIONS, decode=DecodeConfig(block_size=3)
    )
    assert out.stats.rows[0].sweeps[0].slots == 11 + 4


def test_an_adapter_that_was_trained_on_is_read_anew(folder: Path) -> None:
    model = tiny_model("llama")
    traces = []
    for step in range(2):
        out = generate_with_adapter(model, prompt_tensor(), adapter=folder, **OPTIONS)
        traces.append(borrowed._known[model][0])
        other = adapted("llama", seed=1 + step)[1]
        other.save(folder)
        assert out.sequences[0, 11:].tolist() == reference("llama")[:20]
    assert traces[0] != traces[1]
    layers = borrowed._known[model][1]
    assert torch.equal(next(iter(layers.values())).lora_A, adapted("llama", seed=1)[1].parameters()[0])


def test_an_adapter_that_is_on_the_model_drafts_and_stays(folder: Path) -> None:
    model, own = adapted("llama", seed=5)
    out = generate_with_adapter(model, prompt_tensor(), adapter=folder, **OPTIONS)
    assert out.sequences[0, 11:].tolist() == reference("llama")[:20]
    assert GatedAdapter.of(model) is not None
    assert model not in borrowed._known
    assert own.layers


def test_the_model_is_bare_again_after_an_error(folder: Path) -> None:
    model = tiny_model("llama")
    with pytest.raises(ConfigError):
        generate_with_adapter(model, prompt_tensor(), adapter=folder, num_beams=4, max_new_tokens=4)
    assert GatedAdapter.of(model) is None


def test_nothing_keeps_a_model_alive(folder: Path) -> None:
    model = tiny_model("llama")
    generate_with_adapter(model, prompt_tensor(), adapter=folder, max_new_tokens=4)
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None


def test_what_is_missing_or_does_not_fit_is_named(folder: Path, tmp_path: Path) -> None:
    model = tiny_model("llama")
    with pytest.raises(ArtefactError, match="holds no adapter"):
        generate_with_adapter(model, prompt_tensor(), adapter=tmp_path, max_new_tokens=4)
    with pytest.raises(ConfigError, match="not known where the adapter is"):
        generate_with_adapter(model, prompt_tensor(), max_new_tokens=4)
    with pytest.raises(ModelError, match="another model"):
        generate_with_adapter(tiny_model("gpt2"), prompt_tensor(), adapter=folder, max_new_tokens=4)


def test_a_name_that_is_no_folder_is_asked_for_once_and_only_on_the_hub(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def unreachable(self: object, name: str, **settings: Any) -> None:
        asked.append(name)
        raise ConnectionError("no network")

    monkeypatch.setattr("huggingface_hub.HfApi.model_info", unreachable)
    model = tiny_model("llama")
    with pytest.raises(ModelError, match="There is no adapter 'nope/x' on this machine, and the hub cannot be reached"):
        generate_with_adapter(model, prompt_tensor(), adapter="nope/x", max_new_tokens=4)
    assert asked == ["nope/x"]
    with pytest.raises(ConfigError, match="an empty name"):
        generate_with_adapter(model, prompt_tensor(), adapter="", max_new_tokens=4)
    monkeypatch.setenv("HOME", str(folder.parent))
    out = generate_with_adapter(model, prompt_tensor(), adapter=f"~/{folder.name}", max_new_tokens=4)
    assert isinstance(out, torch.Tensor) and out[0, 11:].tolist() == reference("llama")[:4]


def test_detaching_gives_back_what_took_gradients() -> None:
    model = tiny_model("llama")
    first = next(model.parameters()).requires_grad_(False)
    adapter = GatedAdapter.attach(model, rank=2)
    assert [part for part in model.parameters() if part.requires_grad] == adapter.parameters()
    adapter.detach()
    assert [part is first for part in model.parameters() if not part.requires_grad] == [True]
    assert all(part.requires_grad for part in shared_model("llama").parameters())
