"""LoRA and DoRA of peft's in mode full: the losses are the base's, what is saved loads, a killed run goes on."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from peft import PeftModel
from transformers import AutoModelForCausalLM, TrainerCallback
from typer.testing import CliRunner

from jacobi_forcing import DecodeConfig, generate
from jacobi_forcing.backbone import Backbone
from jacobi_forcing.cli.app import app
from jacobi_forcing.config import ModelConfig, PeftSettings
from jacobi_forcing.errors import ArtefactError, ConfigError, ModelError
from jacobi_forcing.loading import load
from jacobi_forcing.peft_models import attach, load_onto, merged, plain, save
from jacobi_forcing.recipe import load_recipe, run_recipe, training
from jacobi_forcing.recipe.peft_training import begin
from jacobi_forcing.recipe.stages import plan
from jacobi_forcing.recipe.training import train_model
from test_losses import assert_same_gradients, batch, gradients, packed
from test_recipe import EVALUATION, RECIPE, Told
from tiny_folder import save_prompts, save_tiny
from tiny_models import ARCHITECTURES, tiny_model

PEFT: dict[str, Any] = {"method": "lora", "rank": 2}


def recipe_with(**peft: Any) -> dict[str, Any]:
    values = {**copy.deepcopy(RECIPE), "peft": {**PEFT, **peft}}
    for settings in values["rounds"]:
        settings["learning_rate"] = 1e-2
    return values


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with a model and two recipes that were run: one merges its adapters, one leaves peft folders."""
    folder = tmp_path_factory.mktemp("peft")
    save_tiny(folder / "model")
    save_prompts(folder / "prompts.jsonl", 12)
    measured = {**EVALUATION, "task": "none", "probe_steps": 4}
    recipes = {
        "merged": {**recipe_with(), "output": "merged"},
        "beside": {**recipe_with(merge=False, method="dora"), "output": "beside", "evaluation": measured},
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        for name, values in recipes.items():
            (folder / f"{name}.yaml").write_text(yaml.safe_dump(values))
            run_recipe(load_recipe(f"{name}.yaml"))
        yield folder


@pytest.fixture
def there(place: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(place)
    return place


# Losses ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["lora", "dora"])
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_a_fresh_adapter_leaves_the_packed_losses_as_they_are(arch: str, method: str) -> None:
    model = tiny_model(arch)
    expected = packed(model, batch())
    adapted = attach(model, PeftSettings.from_dict({**PEFT, "method": method}))
    losses = packed(adapted, batch())
    torch.testing.assert_close(losses, expected, rtol=1e-5, atol=1e-5)
    found = gradients(adapted, losses.total)
    assert found and all("lora" in name for name in found)
    assert not any(p.requires_grad for n, p in adapted.named_parameters() if "lora" not in n)


def test_losses_and_gradients_of_a_trained_adapter_are_those_of_the_merged_weights() -> None:
    model = tiny_model("llama")
    adapted = attach(model, PeftSettings.from_dict(PEFT))
    parts = {n: p for n, p in adapted.named_parameters() if p.requires_grad}
    torch.manual_seed(1)
    for name, part in parts.items():
        if "lora_B" in name:
            torch.nn.init.normal_(part, std=0.1)
    losses = packed(adapted, batch())
    ours = gradients(adapted, losses.total)
    factors = {name: part.detach().clone() for name, part in parts.items()}
    whole = merged(adapted)
    whole.requires_grad_(True)
    merged_losses = packed(whole, batch())
    torch.testing.assert_close(losses, merged_losses, rtol=1e-4, atol=1e-4)
    full = gradients(whole, merged_losses.total)
    # The chain rule: W = W0 + s B A, s = alpha / r = 2.
    expected = {}
    for name in ours:
        layer, kind = name.removeprefix("base_model.model.").rsplit(".lora_", 1)
        other = factors[name.replace("lora_A", "lora_C").replace("lora_B", "lora_A").replace("lora_C", "lora_B")]
        weight = full[f"{layer}.weight"]
        expected[name] = 2.0 * (other.t() @ weight if kind.startswith("A") else weight @ other.t())
    assert_same_gradients(ours, expected, 1e-4)


def test_names_of_layers_choose_where_the_adapter_goes() -> None:
    adapted = attach(tiny_model("llama"), PeftSettings.from_dict({**PEFT, "targets": ["q_proj"]}))
    assert {n.split(".")[-4] for n, p in adapted.named_parameters() if p.requires_grad} == {"q_proj"}
    with pytest.raises(ConfigError, match=r"no layer to put an adapter on; seen: nowhere"):
        attach(tiny_model("llama"), PeftSettings.from_dict({**PEFT, "targets": ["nowhere"]}))


# Folders -----------------------------------------------------------------------------------------------------------


def test_a_merged_adapter_is_a_plain_model_that_says_what_made_it(there: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(there / "merged/model")
    base = AutoModelForCausalLM.from_pretrained(there / "model")
    ids = torch.arange(9)[None] + 5
    assert not torch.allclose(model(ids).logits, base(ids).logits, atol=1e-3)
    assert not any("lora" in name for name, _ in model.named_parameters())
    record = json.loads((there / "merged/model/provenance.json").read_text())
    assert record["peft"] == PeftSettings.from_dict(PEFT).to_dict()


def test_an_adapter_beside_its_base_is_a_plain_peft_folder_that_peft_loads(there: Path) -> None:
    names = {path.name for path in (there / "beside/model").iterdir()}
    assert {"adapter_config.json", "adapter_model.safetensors", "provenance.json", "tokenizer.json"} <= names
    assert "model.safetensors" not in names and "README.md" not in names
    settings = json.loads((there / "beside/model/adapter_config.json").read_text())
    assert (settings["base_model_name_or_path"], settings["r"], settings["use_dora"]) == ("model", 2, True)
    base = AutoModelForCausalLM.from_pretrained(there / "model")
    theirs = PeftModel.from_pretrained(base, str(there / "beside/model"))
    ours = load(ModelConfig("beside/model", device="cpu")).model
    ids = torch.arange(9)[None] + 5
    with torch.no_grad():
        torch.testing.assert_close(ours(ids).logits, theirs(ids).logits, rtol=1e-4, atol=1e-4)


def test_the_second_round_goes_on_with_the_adapter_of_the_first(there: Path) -> None:
    first, second = (load(ModelConfig(f"beside/round-{n}/model", device="cpu")).model for n in (1, 2))
    assert any(not torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))
    for number in (1, 2):
        settings = json.loads((there / f"beside/round-{number}/model/adapter_config.json").read_text())
        assert settings["base_model_name_or_path"] == "model"
    with pytest.raises(ConfigError, match=r"of another kind.*dora of rank 2"):
        begin(ModelConfig("beside/model", device="cpu"), PeftSettings("lora", rank=4, merge=False), 0)


def test_what_was_trained_is_measured_and_probed_and_decodes_exactly(there: Path) -> None:
    report = json.loads((there / "beside/report.json").read_text())
    assert [entry["label"] for entry in report["models"]] == ["base", "round 2"]
    assert all(d["exact"] == d["of"] == 2 for entry in report["models"] for d in entry["decoders"])
    steps = [json.loads(line)["step"] for line in (there / "beside/round-1/probe.jsonl").read_text().splitlines()]
    assert steps == [0, 4, 6]
    loaded = load(ModelConfig("beside/model", device="cpu"))
    ids = torch.arange(8)[None] + 40
    expected = loaded.model.generate(ids, do_sample=False, max_new_tokens=12)  # type: ignore[operator]  # a mixin's
    assert torch.equal(generate(loaded.model, ids, decode=DecodeConfig("window", 4), max_new_tokens=12), expected)


def test_the_base_is_part_of_what_identifies_an_adapter(there: Path) -> None:
    one = plan(load_recipe("merged.yaml", ["model.name=beside/model"]))[0].inputs["model"]
    assert one["base"]["content"] == plan(load_recipe("merged.yaml"))[0].inputs["model"]["content"]
    assert one["content"] != one["base"]["content"]


def test_a_gated_adapter_and_one_without_a_base_are_no_models(tmp_path: Path) -> None:
    folder = tmp_path / "gated"
    folder.mkdir()
    save(attach(tiny_model("llama"), PeftSettings.from_dict(PEFT)), folder, "nowhere/at/all")
    with pytest.raises(ModelError, match="is the base that"):
        load(ModelConfig(str(folder), device="cpu"))
    (folder / "provenance.json").write_text(json.dumps({"adapter": {"rank": 2}}))
    with pytest.raises(ArtefactError, match=r"is gated.*name the base as the model"):
        load(ModelConfig(str(folder), device="cpu"))
    (folder / "provenance.json").unlink()
    (folder / "adapter_config.json").write_text("{}")
    with pytest.raises(ArtefactError, match="does not name its base"):
        load(ModelConfig(str(folder), device="cpu"))


def test_an_adapter_of_another_model_or_a_damaged_one_is_refused(there: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="made for another model"):
        load_onto(tiny_model("llama", hidden_size=64, vocab_size=258), there / "beside/model")
    for path in (there / "beside/model").iterdir():
        if path.is_file():
            (tmp_path / path.name).write_bytes(path.read_bytes())
    weights = tmp_path / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:100])
    with pytest.raises(ArtefactError, match="cannot be read"):
        load(ModelConfig(str(tmp_path), device="cpu"))


# Going on ----------------------------------------------------------------------------------------------------------


class KilledError(Exception):
    """Stands for the end of a process."""


class KillAt(TrainerCallback):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.step:
            raise KilledError


@pytest.mark.parametrize(("peft", "optimizer"), [({}, "muon"), ({"merge": False, "method": "dora"}, "adamw")])
def test_a_killed_round_ends_with_the_same_bytes(
    there: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, peft: dict[str, Any], optimizer: str
) -> None:
    recipe = load_recipe("merged.yaml", [f"rounds.0.optimizer={optimizer}"])
    few = PeftSettings.from_dict({**PEFT, **peft})

    def train(folder: Path) -> bytes:
        train_model(
            *(recipe.model, there / "merged/round-1/trajectories", recipe.rounds[0], folder),
            **{"seed": 3, "reporter": Told(), "peft": few},
        )
        name = "model.safetensors" if few.merge else "adapter_model.safetensors"
        return (folder / "model" / name).read_bytes()

    expected = train(tmp_path / "whole")

    class Dying(training.JacobiForcingTrainer):
        def __init__(self, *args: Any, callbacks: Any, **kwargs: Any) -> None:
            super().__init__(*args, callbacks=[*callbacks, KillAt(5)], **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(training, "JacobiForcingTrainer", Dying)
        with pytest.raises(KilledError):
            train(tmp_path / "killed")
    assert (tmp_path / "killed/checkpoints/checkpoint-4").is_dir()
    assert train(tmp_path / "killed") == expected


# Settings and the command line -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        (["peft.method=none"], "'peft' is set and 'peft.method' is none"),
        (["mode=adapter"], "'peft' belongs to mode: full"),
        (["peft.method=ia3"], "one of none, lora, dora"),
        (["peft=null", "model.quantization=4bit"], "Quantised weights cannot be trained"),
        (["model.quantization=8bit"], "one of none, 4bit"),
    ],
)
def test_settings_that_nothing_would_read_are_refused(there: Path, overrides: list[str], named: str) -> None:
    values = yaml.safe_load((there / "merged.yaml").read_text())
    if "peft=null" in overrides:
        del values["peft"]
        overrides = overrides[1:]
    for settings in values["rounds"] if "mode=adapter" in overrides else []:
        del settings["window_size"]
    (there / "changed.yaml").write_text(yaml.safe_dump(values))
    with pytest.raises(ConfigError, match=named):
        load_recipe("changed.yaml", overrides)


def test_other_adapter_settings_are_not_mixed_in(there: Path) -> None:
    with pytest.raises(ArtefactError, match=r"peft\.rank: 2"):
        run_recipe(load_recipe("merged.yaml", ["peft.rank=4"]))


def test_weights_in_four_bits_are_refused_where_there_is_no_cuda_device(there: Path) -> None:
    with pytest.raises(ConfigError, match=r"need a CUDA device.*seen: cpu"):
        load(ModelConfig("model", device="cpu", quantization="4bit"))


@pytest.mark.gpu
def test_weights_in_four_bits_are_trained_and_merged_on_a_gpu(there: Path, tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes")
    save_tiny(tmp_path / "model")
    recipe = load_recipe("merged.yaml", ["model.device=cuda", "model.quantization=4bit"], tmp_path / "run")
    run_recipe(recipe)
    assert plain(load(ModelConfig(str(tmp_path / "run/model"), device="cpu")).model).dtype == torch.float32


def test_the_command_line_trains_and_uses_an_adapter_without_a_gate(there: Path, tmp_path: Path) -> None:
    def jforce(*arguments: str) -> dict[str, Any]:
        result = CliRunner().invoke(app, [*arguments, "--json"], catch_exceptions=False)
        assert result.exit_code == 0, result.output
        answer: dict[str, Any] = json.loads(result.stdout.splitlines()[-1])
        return answer

    texts = []
    for name, more in (("one", ()), ("two", ("--no-peft-merge",))):
        trained = jforce(
            *("train", "-t", "merged/round-1/trajectories", "-m", "model", "--peft", "lora", "--peft-rank", "2"),
            *("--steps", "2", "--lr", "0.05", "--max-length", "96", "-o", str(tmp_path / name), "--device", "cpu"),
            *more,
        )
        asked = ("hello", "-m", trained["model"], "--max-new-tokens", "12", "-n", "4", "--device", "cpu")
        texts.append(jforce("generate", *asked)["text"])
    assert (tmp_path / "two/model/adapter_model.safetensors").is_file()
    assert texts[0] == texts[1]


def test_a_wrapped_model_is_looked_through() -> None:
    model = tiny_model("llama")
    adapted = attach(model, PeftSettings.from_dict(PEFT))
    assert Backbone(adapted).model is model and plain(model) is model
