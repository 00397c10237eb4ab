"""What a hostile trial once found: texts that were wrong, hangs, and errors that helped nobody."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from decoding import DECODERS, library, ours, prompt, reference
from jacobi_forcing import DecodeConfig, GatedAdapter, generate
from jacobi_forcing.adapter_file import SETTINGS, WEIGHTS
from jacobi_forcing.config import ModelConfig
from jacobi_forcing.errors import ArtefactError, CacheError, ConfigError, DataError, JForceError, ModelError
from jacobi_forcing.loading import load
from test_adapter import adapted
from tiny_folder import save_tiny
from tiny_models import ARCHITECTURES, shared_model, tiny_model

ROPE: dict[str, Any] = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0] * 4,
    "long_factor": [3.0, 4.0, 5.0, 8.0],
    "original_max_position_embeddings": 32,
}


def longrope(arch: str) -> PreTrainedModel:
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    ends = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    settings = {"vocab_size": 61, "intermediate_size": 48, "max_position_embeddings": 256, "rope_parameters": ROPE}
    config = AutoConfig.for_model(arch, original_max_position_embeddings=32, **sizes, **ends, **settings)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    for parameter in model.parameters():
        if parameter.ndim >= 2:
            torch.nn.init.normal_(parameter, std=0.35)
    return model


@pytest.mark.parametrize("arch", ["phi3", "llama"])
def test_a_text_that_passes_the_boundary_of_longrope_is_refused_and_others_are_exact(arch: str) -> None:
    for length, budget in ((10, 22), (40, 30)):
        expected = library(longrope(arch), prompt(length), budget)
        for decoder in DECODERS:
            assert ours(longrope(arch), prompt(length), budget, decoder=decoder, block_size=8) == expected
    model = longrope(arch)
    for length in (10, 32):
        with pytest.raises(ModelError, match="LongRoPE changes"):
            ours(model, prompt(length), 40)
    ids = torch.randint(1, 61, (2, 40))
    mask = torch.ones_like(ids)
    mask[0, :25] = 0
    with pytest.raises(ModelError, match="both sides"):
        generate(model, ids, attention_mask=mask, max_new_tokens=10)


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("value", [1e30, float("nan"), float("inf")])
def test_an_adapter_that_overflows_does_not_reach_the_bases_text(arch: str, value: float) -> None:
    model = tiny_model(arch)
    for weight in GatedAdapter.attach(model, rank=2).parameters():
        torch.nn.init.constant_(weight, value)
    for decoder in ("window", "recycle"):
        for static_shapes in (False, True):
            found = ours(model, prompt(), 24, decoder=decoder, block_size=6, static_shapes=static_shapes)
            assert found == reference(arch)[:24]


def test_alibi_is_refused() -> None:
    config = AutoConfig.for_model(
        "falcon", alibi=True, vocab_size=61, hidden_size=32, num_hidden_layers=1, num_attention_heads=4
    )
    with pytest.raises(CacheError, match="alibi"):
        ours(AutoModelForCausalLM.from_config(config), prompt(), 4)


@pytest.mark.parametrize("shape", [(2, 5), (1, 5), (1, 12)])
def test_a_mask_of_another_shape_is_refused(shape: tuple[int, int]) -> None:
    with pytest.raises(DataError, match="does not fit the prompts"):
        generate(shared_model("llama"), torch.tensor([prompt()]), attention_mask=torch.ones(shape), max_new_tokens=4)


@pytest.mark.parametrize("static_shapes", [False, True])
def test_settings_far_beyond_the_budget_cost_nothing(static_shapes: bool) -> None:
    started = time.perf_counter()
    for settings in ({"num_blocks": 10**9, "block_size": 4}, {"block_size": 10**9}, {"candidates": 10**9}):
        for decoder in ("window", "multiblock", "recycle"):
            config = {"decoder": decoder, "static_shapes": static_shapes, **settings}
            if "candidates" in settings and static_shapes:
                config["candidates"] = 50
            assert ours(shared_model("llama"), prompt(), 12, **config) == reference("llama")[:12]
    assert time.perf_counter() - started < 60


@pytest.mark.parametrize(
    "settings",
    [
        "[]",
        "null",
        '"s"',
        "{}",
        '{"r": null}',
        '{"r": "x"}',
        '{"r": 1000000000}',
        '{"lora_alpha": null}',
        '{"lora_alpha": 1e308}',
        '{"lora_bias": true}',
        '{"bias": "all"}',
        "{",
    ],
)
def test_an_adapter_with_damaged_settings_is_refused(tmp_path: Path, settings: str) -> None:
    adapted("llama")[1].save(tmp_path)
    whole = json.loads((tmp_path / SETTINGS).read_text())
    try:
        changed = json.loads(settings)
        text = json.dumps({**whole, **changed} if changed else changed) if isinstance(changed, dict) else settings
    except ValueError:
        text = settings
    (tmp_path / SETTINGS).write_text(text)
    model = tiny_model("llama")
    with pytest.raises(ArtefactError):
        GatedAdapter.load(model, tmp_path)
    assert GatedAdapter.of(model) is None


def test_an_adapter_with_damaged_weights_is_refused(tmp_path: Path) -> None:
    adapted("llama")[1].save(tmp_path)
    whole = (tmp_path / WEIGHTS).read_bytes()
    for broken in (b"", whole[: len(whole) // 2]):
        (tmp_path / WEIGHTS).write_bytes(broken)
        with pytest.raises(ArtefactError, match=f"is damaged; seen: {WEIGHTS}"):
            GatedAdapter.load(tiny_model("llama"), tmp_path)


A = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
B = A.replace("lora_A", "lora_B")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({A: torch.full((4, 32), float("nan"))}, "not finite"),
        ({A: None}, "damaged; seen: no .*lora_A.weight; expected: an A and a B"),
        ({B: None}, "damaged; seen: no .*lora_B.weight; expected: an A and a B"),
        ({A: torch.tensor(1.0)}, r"damaged; seen: .*lora_A.weight: float32 \[\]; expected: a matrix"),
        ({A: torch.ones(4, 32, dtype=torch.int8)}, "damaged; seen: .*int8"),
        ({A: torch.ones(4, 1)}, r"does not fit the model; seen: \[4, 1\] for .*q_proj, which takes \[4, 32\]"),
        ({B: torch.ones(1, 4)}, "does not fit the model"),
        ({B: torch.ones(32, 3)}, "damaged; seen: r 4.*expected: r 3 or 4"),
        ({A.replace("lora_A", "lora_C"): torch.ones(4, 4)}, "damaged; seen: a weight '.*lora_C"),
        ({A.removeprefix("base_model.model."): torch.ones(4, 32)}, "damaged; seen: a weight 'model.layers"),
        ({f"base_model.model.lm_head.lora_{part}.weight": torch.ones(4, 4) for part in "AB"}, "is the output head"),
    ],
)
def test_an_adapter_whose_weights_are_none_of_lora_says_which(
    tmp_path: Path, changes: dict[str, torch.Tensor | None], message: str
) -> None:
    adapted("llama")[1].save(tmp_path)
    weights = {**load_file(tmp_path / WEIGHTS), **changes}
    save_file({name: weight for name, weight in weights.items() if weight is not None}, tmp_path / WEIGHTS)
    model = tiny_model("llama")
    with pytest.raises(JForceError, match=message):
        GatedAdapter.load(model, tmp_path)
    assert GatedAdapter.of(model) is None


def test_a_folder_beside_the_adapter_names_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    adapted("llama")[1].save(tmp_path / "one")
    with pytest.raises(ArtefactError, match=r"holds no adapter; seen: no adapter_config.json.*name '.*one'"):
        GatedAdapter.load(tiny_model("llama"), tmp_path)
    with pytest.raises(ArtefactError, match="holds no adapter; seen: no such folder"):
        GatedAdapter.load(tiny_model("llama"), "no/adapter")
    monkeypatch.setenv("HOME", str(tmp_path))
    GatedAdapter.load(tiny_model("llama"), "~/one")


def test_a_model_folder_with_damaged_generation_settings_is_refused(tmp_path: Path) -> None:
    save_tiny(tmp_path)
    (tmp_path / "generation_config.json").write_text("{")
    with pytest.raises(JForceError, match="generation_config"):
        load(ModelConfig(str(tmp_path), device="cpu"))


@pytest.mark.parametrize("wrong", [{"device": "meta"}, {"adapter": ""}])
def test_what_holds_nothing_is_refused(tmp_path: Path, wrong: dict[str, str]) -> None:
    save_tiny(tmp_path)
    with pytest.raises(ModelError):
        load(ModelConfig(str(tmp_path), **{"device": "cpu", **wrong}))


def test_settings_as_a_dict_are_settings_and_anything_else_is_refused() -> None:
    ids = torch.tensor([prompt()])
    out = generate(shared_model("llama"), ids, decode={"decoder": "window", "block_size": 4}, max_new_tokens=8)
    assert out[0, 11:].tolist() == reference("llama")[:8]
    with pytest.raises(ConfigError, match=r"decode\.blocksize"):
        generate(shared_model("llama"), ids, decode={"blocksize": 4}, max_new_tokens=8)
    with pytest.raises(ConfigError, match="a DecodeConfig"):
        generate(shared_model("llama"), ids, decode="window", max_new_tokens=8)  # type: ignore[arg-type]  # wrong
    assert DecodeConfig().decoder == "window"
