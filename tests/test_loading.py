from __future__ import annotations

from pathlib import Path

import pytest
import torch

from jacobi_forcing import GatedAdapter, loading
from jacobi_forcing.config import ModelConfig
from jacobi_forcing.embedded import BUILTIN
from jacobi_forcing.errors import ConfigError, ModelError
from jacobi_forcing.loading import load, load_tokenizer, locate, resolve_device
from tiny_folder import EOS, save_tiny


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("model"))


def test_a_folder_loads_ready_to_decode(folder: Path) -> None:
    loaded = load(ModelConfig(str(folder), dtype="bfloat16", device="cpu"))
    assert not loaded.model.training
    assert loaded.model.dtype == torch.bfloat16
    assert loaded.model.config._attn_implementation == "sdpa"
    assert loaded.tokenizer.padding_side == "left"
    assert loaded.vocabulary == list(range(258))
    assert loaded.model.generation_config.eos_token_id == EOS


def test_the_tokenizer_loads_alone(folder: Path) -> None:
    assert load_tokenizer(ModelConfig(str(folder))).decode([EOS]) == "<eos>"


@pytest.mark.parametrize("name", ["./nothing", "/nothing/here", "~/nothing-at-all", "a/b/c", ""])
def test_a_missing_folder_is_an_error_that_says_what_a_name_may_be(name: str) -> None:
    with pytest.raises(ModelError, match="There is no model") as caught:
        load(ModelConfig(name))
    assert BUILTIN in str(caught.value)


def test_a_hub_name_that_cannot_be_reached_is_an_error_of_one_line() -> None:
    with pytest.raises(ModelError, match="hub cannot be reached") as caught:
        load(ModelConfig("nobody/has-such-a-model"))
    assert "\n" not in str(caught.value)


def test_a_name_that_the_hub_does_not_allow_is_an_error() -> None:
    with pytest.raises(ModelError, match="neither a folder nor a hub name"):
        load(ModelConfig("two words"))


def test_a_folder_without_a_model_and_a_file_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="holds no model"):
        locate(str(tmp_path))
    (tmp_path / "file").write_text("x")
    with pytest.raises(ModelError, match="is a file"):
        locate(str(tmp_path / "file"))


def test_damaged_weights_are_an_error_of_one_line(folder: Path, tmp_path: Path) -> None:
    for path in folder.iterdir():
        content = path.read_bytes()
        (tmp_path / path.name).write_bytes(content[:1000] if path.suffix == ".safetensors" else content)
    with pytest.raises(ModelError, match="Cannot load the model") as caught:
        load(ModelConfig(str(tmp_path)))
    assert "\n" not in str(caught.value)


def test_an_unknown_embedded_model_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no embedded model 'builtin:poems'"):
        locate("builtin:poems")
    monkeypatch.setattr(loading, "base_folder", lambda: tmp_path)
    with pytest.raises(ModelError, match="not part of this installation"):
        locate(BUILTIN)


def test_devices_that_are_not_there_are_refused() -> None:
    assert resolve_device("cpu") == torch.device("cpu")
    assert resolve_device("auto").type in ("cpu", "cuda")
    for device in ("toaster", "cuda:99"):
        with pytest.raises(ModelError, match=f"'{device}' cannot be used"):
            resolve_device(device)


def test_settings_saved_with_an_adapter_are_checked_where_they_lie(folder: Path, tmp_path: Path) -> None:
    plain = load(ModelConfig(str(folder), device="cpu")).model
    GatedAdapter.attach(plain, rank=2).save(tmp_path, base="base")
    saved = tmp_path / "custom_generate" / "decode.json"
    for settings, message in (('{"foo": 1}', "Unknown key '.*decode.json: foo'"), ('{"block_size": 0}', "decode.json")):
        saved.write_text(settings)
        with pytest.raises(ConfigError, match=message):
            load(ModelConfig(str(folder), device="cpu", adapter=str(tmp_path)))
