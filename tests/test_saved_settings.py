"""Settings that travel with a model: in its generation config, and as a folder that the library decodes with."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedModel, TextStreamer, dynamic_module_utils

import jacobi_forcing
from decoding import library, prompt, prompt_tensor
from jacobi_forcing import DecodeConfig, generate, save_custom_generate
from jacobi_forcing.config import ModelConfig
from jacobi_forcing.errors import ConfigError, ModelError
from jacobi_forcing.loading import load
from tiny_folder import byte_tokenizer, save_tiny
from tiny_models import tiny_model

SAVED = DecodeConfig(decoder="jacobi", block_size=3)
TRUST: dict[str, Any] = {"trust_remote_code": True}


def forwards(out: Any) -> list[int]:
    """How many tokens each forward added: it tells decoders and block sizes apart."""
    return list(out.stats.rows[0].accepted)


def counted(model: PreTrainedModel, decode: DecodeConfig | None, **options: Any) -> list[int]:
    options = {"max_new_tokens": 20, "do_sample": False, "return_dict_in_generate": True, **options}
    return forwards(generate(model, prompt_tensor(), decode=decode, **options))


# In a generation config -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [SAVED.to_dict(), SAVED, {"decoder": "jacobi", "block_size": 3}])
@pytest.mark.parametrize("direct", [True, False])
def test_settings_in_the_models_generation_config_are_used_where_none_are_passed(value: Any, direct: bool) -> None:
    model = tiny_model("llama")
    # Nothing is random about the fill; the two decoders draw differently many guesses, so their traces differ.
    expected, others = counted(model, SAVED), counted(model, DecodeConfig())
    model.generation_config.jacobi_forcing = value
    options: dict[str, Any] = {"max_new_tokens": 20, "return_dict_in_generate": True}
    way: dict[str, Any] = {} if direct else {"custom_generate": generate}
    out = generate(model, prompt_tensor(), **options) if direct else model.generate(prompt_tensor(), **way, **options)
    assert out.stats.rows[0].sweeps[0].slots == 11 + 3
    assert forwards(out) == expected
    assert counted(model, DecodeConfig()) == others
    config = GenerationConfig(jacobi_forcing={"block_size": 5}, max_new_tokens=20, return_dict_in_generate=True)
    assert generate(model, prompt_tensor(), generation_config=config).stats.rows[0].sweeps[0].slots == 11 + 5


@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"bock_size": 4}, r"Unknown key 'generation_config.jacobi_forcing.bock_size'.*did you mean 'block_size'"),
        ({"block_size": 0}, "In 'generation_config.jacobi_forcing': 'block_size' is too small"),
        ("window", "'generation_config.jacobi_forcing' is not a mapping"),
    ],
)
def test_wrong_settings_in_a_generation_config_are_named(value: Any, message: str, direct: bool) -> None:
    model = tiny_model("llama")
    model.generation_config.jacobi_forcing = value
    with pytest.raises(ConfigError, match=message):
        if direct:
            generate(model, prompt_tensor(), max_new_tokens=4)
        else:
            model.generate(prompt_tensor(), custom_generate=generate, max_new_tokens=4)


def test_the_librarys_own_generate_does_not_mind_them() -> None:
    model = tiny_model("llama")
    expected = library(model, prompt(), 12)
    model.generation_config.jacobi_forcing = SAVED.to_dict()
    assert library(model, prompt(), 12) == expected


# In a folder ------------------------------------------------------------------------------------------------------


@pytest.fixture
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The library copies a model's code into a cache of its own; here into one of the test's. And, where the package
    is used without being installed, the check of `requirements.txt` must find it nevertheless."""
    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr(sys, "path", [*sys.path])
    installed = metadata.version
    versions = {"jacobi-forcing": jacobi_forcing.__version__}
    monkeypatch.setattr(metadata, "version", lambda name: versions.get(name) or installed(name))
    yield
    for name in [name for name in sys.modules if name.startswith("transformers_modules")]:
        del sys.modules[name]


@pytest.fixture
def folder(tmp_path: Path, modules: None) -> Path:
    save_tiny(tmp_path / "tiny-model.v1")
    save_custom_generate(tmp_path / "tiny-model.v1", SAVED)
    return tmp_path / "tiny-model.v1"


@pytest.fixture
def model(folder: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(folder)


def test_a_folder_holds_what_is_pushed_with_a_model(folder: Path) -> None:
    assert sorted(path.name for path in (folder / "custom_generate").iterdir()) == ["generate.py", "requirements.txt"]
    assert (folder / "custom_generate" / "requirements.txt").read_text() == "jacobi-forcing>=0.1\n"
    settings = json.loads((folder / "generation_config.json").read_text())
    assert settings["jacobi_forcing"] == SAVED.to_dict()
    assert settings["eos_token_id"] == 1
    assert not [path for path in folder.rglob("*") if path.suffix == ".tmp"]


def test_saved_settings_survive_loading_and_saving_again(model: PreTrainedModel, tmp_path: Path) -> None:
    assert model.generation_config.jacobi_forcing == SAVED.to_dict()
    model.save_pretrained(tmp_path / "again")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "again")
    assert again.generation_config.jacobi_forcing == SAVED.to_dict()


def test_the_folder_is_a_way_to_decode_in_parallel(folder: Path, model: PreTrainedModel) -> None:
    inputs = {"input_ids": prompt_tensor(), "attention_mask": torch.ones(1, 11, dtype=torch.long)}
    expected = library(model, prompt(), 20)
    options: dict[str, Any] = {"custom_generate": str(folder), **TRUST, "max_new_tokens": 20}
    assert model.generate(**inputs, **options)[0, 11:].tolist() == expected
    assert model.generate(inputs["input_ids"], **options)[0, 11:].tolist() == expected
    out = model.generate(**inputs, **options, return_dict_in_generate=True)
    assert out.sequences[0, 11:].tolist() == expected
    assert forwards(out) == counted(model, SAVED)
    assert out.stats.rows[0].sweeps[0].slots == 11 + 3
    other = model.generate(**inputs, **options, decode=DecodeConfig(block_size=6), return_dict_in_generate=True)
    assert other.stats.rows[0].sweeps[0].slots == 11 + 6


class Pieces(TextStreamer):
    """Keeps what it would print."""

    def __init__(self, tokenizer: Any) -> None:
        super().__init__(tokenizer)
        self.text, self.ended = "", 0

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        self.text += text
        self.ended += stream_end


def test_the_folder_takes_streamers_and_stop_strings(folder: Path, model: PreTrainedModel) -> None:
    tokenizer = byte_tokenizer()
    ids = torch.tensor([tokenizer("What is 3?").input_ids])
    text = tokenizer.convert_ids_to_tokens(library(model, ids[0].tolist(), 30))
    stop = next(
        token for index, token in enumerate(text) if index > 4 and token.isascii() and token not in text[:index]
    )
    options: dict[str, Any] = {"stop_strings": [stop], "tokenizer": tokenizer, "max_new_tokens": 30}
    streamer = Pieces(tokenizer)
    out = model.generate(ids, custom_generate=str(folder), **TRUST, **options, streamer=streamer)
    assert out.tolist() == model.generate(ids, **options).tolist()
    assert out.shape[1] == 10 + text.index(stop) + 1
    assert (streamer.text, streamer.ended) == (tokenizer.decode(out[0]), 1)


def test_a_model_loaded_with_its_code_decodes_in_parallel_without_being_told(folder: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder, **TRUST)
    options: dict[str, Any] = {"max_new_tokens": 20, "return_dict_in_generate": True}
    expected = type(model).generate(model, prompt_tensor(), max_new_tokens=20).tolist()
    for out in (
        model.generate(prompt_tensor(), **options),
        model.generate(input_ids=prompt_tensor(), **options),
        generate(model, prompt_tensor(), **options),
        model.generate(prompt_tensor(), custom_generate=generate, **options),
        model.generate(prompt_tensor(), custom_generate=str(folder), **TRUST, **options),
    ):
        assert forwards(out) == counted(model, SAVED)
        assert out.sequences.tolist() == expected


def test_what_is_compared_with_the_library_is_compared_with_the_library(folder: Path) -> None:
    loaded = load(ModelConfig(str(folder), trust_remote_code=True, device="cpu"))
    out = loaded.model.generate(prompt_tensor(), max_new_tokens=8, return_dict_in_generate=True)
    assert not hasattr(out, "stats")


def test_plain_loading_and_generating_are_what_they_were(folder: Path, model: PreTrainedModel, tmp_path: Path) -> None:
    before = AutoModelForCausalLM.from_pretrained(save_tiny(tmp_path / "before"))
    assert library(model, prompt(), 20) == library(before, prompt(), 20)
    for key in ("eos_token_id", "pad_token_id", "use_cache"):
        assert getattr(model.generation_config, key) == getattr(before.generation_config, key)
    with pytest.raises(ValueError, match="trust_remote_code=True"):
        model.generate(prompt_tensor(), custom_generate=str(folder), trust_remote_code=False, max_new_tokens=4)


def test_saving_again_keeps_the_settings_unless_others_are_given(folder: Path) -> None:
    saved = folder / "generation_config.json"
    before = saved.read_bytes()
    save_custom_generate(folder)
    assert saved.read_bytes() == before
    save_custom_generate(folder, DecodeConfig(block_size=9))
    assert json.loads(saved.read_text())["jacobi_forcing"]["block_size"] == 9
    saved.write_text(json.dumps({"jacobi_forcing": {"block": 1}}))
    with pytest.raises(ConfigError, match=r"generation_config\.jacobi_forcing\.block"):
        save_custom_generate(folder)


def test_a_model_without_a_generation_config_gets_the_one_that_the_library_would_make_up(folder: Path) -> None:
    (folder / "generation_config.json").unlink()
    expected = AutoModelForCausalLM.from_pretrained(folder).generation_config
    save_custom_generate(folder)
    got = AutoModelForCausalLM.from_pretrained(folder).generation_config
    assert got.jacobi_forcing == DecodeConfig().to_dict()
    assert (got.eos_token_id, got.pad_token_id) == (expected.eos_token_id, expected.pad_token_id) == (1, 0)


def test_a_folder_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"holds no model.*no config.json"):
        save_custom_generate(tmp_path)
    assert not list(tmp_path.iterdir())


def test_where_the_package_is_missing_the_error_says_what_to_install(
    folder: Path, model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "jacobi_forcing", None)
    with pytest.raises(ImportError, match="pip install jacobi-forcing"):
        model.generate(prompt_tensor(), custom_generate=str(folder), **TRUST, max_new_tokens=4)
    monkeypatch.setattr(metadata, "version", lambda name: "0.0.9")
    with pytest.raises(ImportError, match=r"jacobi-forcing>=0.1 \(installed: 0.0.9\)"):
        model.generate(prompt_tensor(), custom_generate=str(folder), **TRUST, max_new_tokens=4)
