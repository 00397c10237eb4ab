"""What a recipe will cost: by formula from a config alone, and measured on a little of the real work."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from transformers import AutoConfig
from typer.testing import CliRunner

from jacobi_forcing.cli.app import app
from jacobi_forcing.cli.plan import duration, size
from jacobi_forcing.errors import ConfigError
from jacobi_forcing.recipe import load_recipe, run_recipe
from jacobi_forcing.recipe.planning import Hardware, estimate_recipe
from jacobi_forcing.recipe.planning.arithmetic import training_memory
from jacobi_forcing.recipe.planning.estimate import break_even
from jacobi_forcing.recipe.planning.peak import Peak, folder_bytes
from jacobi_forcing.recipe.planning.shape import shape_of
from result_schemas import assert_valid
from test_recipe import EVALUATION, RECIPE
from tiny_folder import save_prompts, save_tiny
from tiny_models import tiny_model

SEVEN_B: dict[str, Any] = {
    "vocab_size": 152064,
    "hidden_size": 3584,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "intermediate_size": 18944,
    "tie_word_embeddings": False,
}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("plan")
    save_tiny(folder / "model")
    save_prompts(folder / "prompts.jsonl", 12)
    recipe = {**RECIPE, "evaluation": {**EVALUATION, "task": "none"}}
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    # A config alone: what a laptop has of a model that would not fit in it.
    AutoConfig.for_model("qwen2", **SEVEN_B).save_pretrained(folder / "seven")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        yield folder


@pytest.fixture(autouse=True)
def _there(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(place)


def of_7b(*overrides: str, measure: bool = False) -> dict[str, Any]:
    paths = ["model.name=seven", "model.dtype=bfloat16", "prompts.source=prompts.jsonl", *overrides]
    return estimate_recipe(load_recipe("qwen2.5-coder-7b", paths), measure=measure)


def stage(found: dict[str, Any], name: str) -> dict[str, Any]:
    (one,) = (stage for stage in found["stages"] if stage["stage"] == name)
    return dict(one)


@pytest.mark.parametrize("override", ["rounds.0.states=on_policy", "collect.needed_only=true"])
def test_a_recipe_that_collects_less_is_measured_as_it_will_run(override: str) -> None:
    found = estimate_recipe(load_recipe("recipe.yaml", [override]), measure=True)
    assert stage(found, "collect-1")["seconds"] > 0
    assert stage(found, "train-1")["seconds"] > 0


def test_responses_alone_are_foreseen_to_take_less_than_their_states() -> None:
    stored, bare = (stage(of_7b(*more), "collect-1") for more in ((), ("rounds.0.states=on_policy",)))
    assert bare["seconds"] < stored["seconds"]
    assert bare["disk_bytes"] < stored["disk_bytes"]


# By formula --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("arch", ["llama", "gpt2", "gpt_neox", "gemma3"])
def test_a_config_tells_how_many_weights_there_are(arch: str, tmp_path: Path) -> None:
    model = tiny_model(arch)
    model.save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    recipe = load_recipe("recipe.yaml", [f"model.name={tmp_path}"])
    shape = shape_of(recipe.model)
    assert shape.parameters == sum(p.numel() for p in model.parameters())
    assert shape.layers == 2 and shape.vocab == 61
    assert shape.adapter(3, None) == sum(3 * (width + height) for _, width, height in shape.linear)


def test_a_model_of_seven_billion_is_estimated_from_its_config_alone() -> None:
    found = of_7b()
    assert_valid(found, "plan")
    names = ["evaluate-base", "collect-1", "train-1", "collect-2", "train-2", "evaluate-2"]
    assert [one["stage"] for one in found["stages"]] == names
    train, billion = stage(found, "train-1"), 7.6156e9
    # 16 bytes a weight, and autocast's copies; the recipe's own comment says 112 GB for the former.
    assert 16 * billion < train["memory_bytes"] < 25 * billion
    # 6 N D operations, a third more with checkpointing, and attention; N without the input's embedding.
    expected = 8 * (billion - 152064 * 3584) * 4 * 2048 / 300e12
    assert expected < float(train["detail"].split()[-3]) < 1.15 * expected
    # Twenty checkpoints of 12 bytes a weight are written meanwhile.
    assert train["seconds"] > 10_000 * expected + 20 * 12 * billion / 500e6
    assert stage(found, "collect-1")["detail"].startswith("12 responses"), "the file has fewer than the limit"
    assert train["disk_bytes"] == pytest.approx(2 * billion, rel=1e-3)
    assert train["disk_peak_bytes"] == pytest.approx((2 + 3 * 12) * billion, rel=1e-3)
    assert found["total"]["device_hours"] == pytest.approx(
        sum(one["device_hours"] for one in found["stages"]), rel=1e-3
    )


def test_an_adapter_of_pefts_needs_a_small_part_of_that() -> None:
    whole = stage(of_7b(), "train-1")["memory_bytes"]
    lora = stage(of_7b("peft.method=lora", "rounds.0.learning_rate=1e-4"), "train-1")
    four = stage(of_7b("peft.method=lora", "model.quantization=4bit"), "train-1")
    assert lora["memory_bytes"] < whole / 4
    assert lora["memory_bytes"] - four["memory_bytes"] > 9e9


def test_checkpointing_and_muon_and_shorter_rows_show_in_the_parts() -> None:
    recipe = load_recipe("qwen2.5-coder-7b", ["model.name=seven"])
    shape = shape_of(recipe.model)

    def parts(*overrides: str) -> dict[str, float]:
        changed = load_recipe("qwen2.5-coder-7b", ["model.name=seven", *overrides])
        return training_memory(changed, changed.rounds[0], shape)

    plain = parts()
    assert parts("rounds.0.gradient_checkpointing=false")["activations"] > 8 * plain["activations"]
    assert parts("rounds.0.optimizer=muon")["optimizer"] < plain["optimizer"]
    assert parts("rounds.0.max_length=1024")["mask"] == plain["mask"] / 4


def test_states_made_while_training_move_time_from_collecting_to_training() -> None:
    stored, made = of_7b(), of_7b("rounds.0.states=on_policy")
    assert stage(made, "collect-1")["seconds"] < stage(stored, "collect-1")["seconds"]
    assert stage(made, "train-1")["seconds"] > stage(stored, "train-1")["seconds"]
    assert stage(made, "collect-2") == stage(stored, "collect-2")


def test_a_faster_machine_takes_less_time() -> None:
    recipe = load_recipe("qwen2.5-coder-7b", ["model.name=seven", "prompts.source=prompts.jsonl"])
    slow, fast = (
        estimate_recipe(recipe, measure=False, hardware=hardware)["total"]["seconds"]
        for hardware in (Hardware(100, 1000), Hardware(400, 4000))
    )
    assert fast < slow / 2


def test_prompts_that_nobody_counted_are_asked_for() -> None:
    with pytest.raises(ConfigError, match=r"not known without reading them; set prompts\.limit"):
        of_7b("prompts.source=some/dataset", "prompts.limit=null")


# The break-even ----------------------------------------------------------------------------------------------------


def test_the_break_even_is_the_time_of_training_over_what_a_token_saves() -> None:
    found = estimate_recipe(load_recipe("recipe.yaml"), measure=False, hardware=Hardware(1, 1), speedup=2.0)
    even = found["break_even"]
    cost = sum(one["seconds"] for one in found["stages"] if not one["stage"].startswith("evaluate"))
    assert even["training_seconds"] == pytest.approx(cost, abs=0.1)
    expected = even["training_seconds"] / (even["ar_seconds_per_token"] * 0.5)
    assert even["tokens"] == pytest.approx(expected, rel=1e-2)
    assert f"1/{2.0:.2f}" in even["formula"]


def test_training_that_brings_no_speed_never_pays() -> None:
    found = estimate_recipe(load_recipe("recipe.yaml"), measure=False, tpf=1.0)
    assert found["break_even"]["tokens"] is None
    for changes in ({"tpf": 0.0}, {"speedup": float("nan")}, {"budget": -1.0}):
        with pytest.raises(ConfigError, match="out of range"):
            estimate_recipe(load_recipe("recipe.yaml"), measure=False, **changes)  # type: ignore[arg-type]  # by name


# Measured ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes", [[], ["peft.method=lora", "peft.rank=2", "peft.merge=false", "rounds.0.states=on_policy"]]
)
def test_a_micro_run_foresees_what_the_run_leaves_on_disk(place: Path, tmp_path: Path, changes: list[str]) -> None:
    recipe = load_recipe("recipe.yaml", ["collect.batch_size=8", *changes], tmp_path / "run")
    found = estimate_recipe(recipe)
    assert_valid(found, "plan")
    assert found["measured"] and found["device"] == "cpu" and found["assumptions"] == []
    assert not (tmp_path / "run").exists()
    report = run_recipe(recipe)
    for number in (1, 2):
        model = folder_bytes(tmp_path / f"run/round-{number}/model")
        assert stage(found, f"train-{number}")["disk_bytes"] == pytest.approx(model, rel=0.05)
        trajectories = folder_bytes(tmp_path / f"run/round-{number}/trajectories")
        # A shard of one response each is mostly its frame; the order of magnitude is what can be told from a few.
        assert trajectories / 10 < stage(found, f"collect-{number}")["disk_bytes"] < trajectories * 2
        assert report["stages"][f"collect-{number}"]["trajectories"] == int(
            stage(found, f"collect-{number}")["detail"].split()[0]
        )
    for one in found["stages"]:
        assert 0 < one["seconds"] < 60 and 1e8 < one["memory_bytes"] < 1e10


def test_long_responses_are_cut_short_and_the_rest_is_extrapolated() -> None:
    recipe = load_recipe("recipe.yaml", ["collect.max_new_tokens=64", "rounds.0.max_length=160", "evaluation=null"])
    found = estimate_recipe(recipe, budget=1e-3)
    assert any(
        "measured up to 8 tokens; unfinished ones are taken to reach 64" in text for text in found["assumptions"]
    )
    assert [one["stage"] for one in found["stages"]] == ["collect-1", "train-1", "collect-2", "train-2"]
    assert float(stage(found, "collect-1")["detail"].split("×")[1].split()[0]) > 32
    assert found["break_even"]["ar_seconds_per_token"] > 0


def test_the_peak_is_that_of_the_block() -> None:
    with Peak("cpu") as small:
        pass
    with Peak("cpu") as large:
        held = bytearray(200_000_000)
        held[::4096] = b"x" * len(held[::4096])
    del held
    assert large.bytes - small.bytes > 1.5e8


def test_the_command_line_shows_a_table_and_one_json_object() -> None:
    result = CliRunner().invoke(app, ["plan", "recipe.yaml", "--no-measure", "--tpf", "2"], catch_exceptions=False)
    assert result.exit_code == 0 and "GPU-hours" in result.stdout and "Pays after" in result.stdout
    result = CliRunner().invoke(app, ["plan", "recipe.yaml", "--no-measure", "--json"], catch_exceptions=False)
    assert_valid(json.loads(result.stdout.splitlines()[-1]), "plan")
    assert (duration(59), duration(7300), duration(3 * 86400)) == ("59 s", "2.0 h", "3.0 d")
    assert (size(999), size(1.5e9)) == ("999 B", "1.5 GB")


def test_break_even_takes_the_cost_of_a_forward_into_account() -> None:
    from jacobi_forcing.recipe.planning.costs import Costs, MeasureCost

    costs = Costs((), (), MeasureCost(0, 0, 0, 0, 0.01, 1.5), "cpu", ())
    rows = [{"stage": "train-1", "seconds": 100.0}, {"stage": "evaluate-1", "seconds": 999.0}]
    found = break_even(rows, costs, 3.0, None)
    assert (found["speedup"], found["tokens"]) == (2.0, 20_000)
    assert break_even(rows, costs, 1.5, None)["tokens"] is None
