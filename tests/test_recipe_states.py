from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from jacobi_forcing.cli import main
from jacobi_forcing.config import RecipeConfig
from jacobi_forcing.errors import ConfigError
from jacobi_forcing.recipe import run_recipe
from jacobi_forcing.recipe.settings import check_mode
from jacobi_forcing.recipe.stages import plan
from jacobi_forcing.trajectories.store import TrajectoryReader
from tiny_folder import save_prompts, save_tiny

pytest.importorskip("pyarrow")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("place")
    save_tiny(folder / "model")
    save_prompts(folder / "prompts.jsonl", 12)
    return folder


def recipe(place: Path, output: str, *, collect: dict[str, Any] | None = None, **changes: Any) -> RecipeConfig:
    settings = {"block_size": 4, "window_size": 2, "steps": 2, "learning_rate": 1e-3, "max_length": 96, **changes}
    return RecipeConfig.from_dict(
        {
            "model": {"name": str(place / "model"), "device": "cpu"},
            "prompts": {"source": str(place / "prompts.jsonl"), "field": "question", "limit": 4},
            "collect": {"max_new_tokens": 12, "batch_size": 4, "shard_size": 4, **(collect or {})},
            "rounds": [settings],
            "output": str(place / output),
        }
    )


def test_a_round_with_states_on_policy_collects_responses_alone_and_trains(place: Path) -> None:
    report = run_recipe(recipe(place, "on-policy", states="on_policy", steps=10, collect={"draft_init": "vocabulary"}))
    reader = TrajectoryReader(place / "on-policy" / "round-1" / "trajectories")
    assert not reader.has_states
    assert report["stages"]["collect-1"]["sweeps"] == 0
    last = report["stages"]["train-1"]["last_log"]
    assert last["block_sweeps"] > 0


def test_a_round_with_needed_only_trains_to_the_same_weights_as_with_all_states(place: Path) -> None:
    weights = []
    for name, needed in (("whole", False), ("needed", True)):
        report = run_recipe(recipe(place, name, collect={"needed_only": needed}))
        assert (report["stages"]["collect-1"]["spared"] > 0) == needed
        weights.append((place / name / "model" / "model.safetensors").read_bytes())
    assert weights[0] == weights[1]


def test_the_schedule_is_an_input_of_collecting_where_it_decides_what_is_kept(place: Path) -> None:
    def key(**changes: Any) -> str:
        return plan(recipe(place, "none", **changes))[0].key

    assert key() == key(window_size=4)
    needed = {"needed_only": True}
    assert key(collect=needed) != key(collect=needed, window_size=4)
    assert key(collect=needed, states="on_policy") == key(collect=needed, states="on_policy", window_size=4)
    assert key() != key(states="on_policy")


def test_states_of_full_training_mean_nothing_to_an_adapter(place: Path) -> None:
    made = recipe(place, "none", states="on_policy", window_size=16)
    with pytest.raises(ConfigError, match=r"rounds\[0\]\.states"):
        check_mode("adapter", made.rounds, made.adapter)


def test_the_verbs_collect_without_states_and_train_on_policy(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    collected, model = str(place / "responses"), str(place / "model")
    prompts = ("-p", str(place / "prompts.jsonl"), "--field", "question", "--limit", "3")
    assert (
        main(["collect", "-m", model, *prompts, "-n", "4", "--max-new-tokens", "8", "--no-states", "-o", collected])
        == 0
    )
    common = ["train", "-m", model, "-t", collected, "--steps", "10", "-w", "2", "--max-length", "96"]
    assert main([*common, "-o", str(place / "stored")]) == 2
    assert "without the states of their blocks" in capsys.readouterr().err
    assert main([*common, "--states", "on_policy", "-o", str(place / "trained"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["last_log"]["block_sweeps"] > 0


def test_the_verb_collects_what_a_schedule_needs(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output, model = place / "needed-by-verb", str(place / "model")
    prompts = ("-p", str(place / "prompts.jsonl"), "--field", "question", "--limit", "3")
    schedule = ("--needed-only", "-w", "2", "--schedule", "reverse")
    whole = ["collect", "-m", model, *prompts, "-n", "4", "--max-new-tokens", "8", "-o", str(output), "--json"]
    assert main([*whole, *schedule]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["spared"] > 0
    needed = TrajectoryReader(output).needed_only
    assert needed is not None
    assert (needed["schedule"], needed["window_size"]) == ("reverse", 2)
