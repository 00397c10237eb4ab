from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from transformers import TrainerControl, TrainerState

from jacobi_forcing.config import (
    CollectConfig,
    DecodeConfig,
    EvaluationConfig,
    ModelConfig,
    PromptsConfig,
    RecipeConfig,
    RoundConfig,
)
from jacobi_forcing.errors import CollapseError
from jacobi_forcing.recipe import run_recipe
from jacobi_forcing.recipe.collapse import FiniteLosses, verdict
from tiny_folder import save_prompts, save_tiny

WARMING = {"warmup_ratio": 0.9, "lr_scheduler": "linear"}  # the rate of step 1 is 0


def recipe(folder: Path, **changes: Any) -> RecipeConfig:
    save_tiny(folder / "model")
    save_prompts(folder / "prompts.jsonl", 8)
    prompts = PromptsConfig(str(folder / "prompts.jsonl"), field="question", limit=4)
    settings = RoundConfig(4, window_size=2, max_length=160, batch_size=2, **{"steps": 8, **changes})
    held_out = dataclasses.replace(prompts, offset=4)
    return RecipeConfig(
        model=ModelConfig(str(folder / "model"), device="cpu"),
        prompts=prompts,
        rounds=(settings,),
        collect=CollectConfig(max_new_tokens=24, batch_size=4, shard_size=4),
        evaluation=EvaluationConfig(
            held_out,
            decode=(DecodeConfig(block_size=4),),
            max_new_tokens=24,
            probe_steps=1,
            speed_prompts=1,
            base=False,
        ),
        output=str(folder / "run"),
    )


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_an_absurd_learning_rate_halts_and_leaves_the_last_good_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(CollapseError, match=r"collapsed at step \d+: .*kept in .*good") as caught:
        run_recipe(recipe(tmp_path, learning_rate=30.0, steps=40, **WARMING))
    assert "lower learning_rate" in str(caught.value)
    place = tmp_path / "run" / "round-1"
    probes = lines(place / "probe.jsonl")
    assert "halted" in probes[-1] and not any("halted" in line for line in probes[:-1])
    assert [line["step"] for line in probes] == list(range(len(probes)))
    good = json.loads((place / "checkpoints" / "good" / "trainer_state.json").read_text())["global_step"]
    assert good == probes[-2]["step"] >= 1
    weights = load_file(place / "checkpoints" / "good" / "model.safetensors")
    assert all(torch.isfinite(value).all() for value in weights.values())
    assert not (place / "model").exists()
    steps = [int(path.name.removeprefix("checkpoint-")) for path in (place / "checkpoints").glob("checkpoint-*")]
    assert max(steps) <= good


def test_an_ordinary_run_is_not_halted_and_probes_training_prompts_too(tmp_path: Path) -> None:
    run_recipe(recipe(tmp_path, learning_rate=1e-4, steps=10, report_to="tensorboard"))
    place = tmp_path / "run" / "round-1"
    for line in lines(place / "probe.jsonl"):
        assert line["training"]["answers"] == 4 and line["training"]["tokens_per_forward"] >= 1
    assert not (place / "checkpoints").exists()
    events = EventAccumulator(str(place / "tensorboard")).Reload()
    tags = set(events.Tags()["scalars"])
    logged = {"loss", "consistency_loss", "ar_loss", "noise_ratio", "grad_norm", "trained_share", "tokens_per_second"}
    assert not {f"train/{name}" for name in logged} - tags
    (entry,) = [entry for entry in lines(place / "log.jsonl") if "loss" in entry]
    assert 0 < entry["trained_share"] <= 1 and entry["tokens_per_second"] > 0


@pytest.mark.parametrize("name", ["loss", "ar_loss", "grad_norm"])
def test_a_loss_that_is_no_number_halts_at_once(name: str) -> None:
    with pytest.raises(CollapseError, match=f"{name} is nan at step 7"):
        FiniteLosses().on_log(None, TrainerState(global_step=7), TrainerControl(), logs={name: math.nan})
    FiniteLosses().on_log(None, TrainerState(global_step=7), TrainerControl(), logs={name: 1.0, "epoch": 2.0})


def test_the_verdict_weighs_loops_against_the_start_and_the_loss_against_a_guess() -> None:
    assert verdict(0.5, 0.0, 0.1, 100, 0.5) is not None
    assert verdict(0.5, 0.1, 0.1, 100, 0.5) is None
    assert verdict(0.0, 0.0, math.log(100) + 0.01, 100, 0.5) is not None
    assert verdict(0.0, 0.0, math.log(100) - 0.01, 100, 0.5) is None
    assert verdict(1.0, 0.0, 99.0, 100, None) is None


@pytest.mark.parametrize("mode", ["full", "adapter"])
def test_weights_that_are_no_numbers_are_never_saved_as_a_result(mode: str, tmp_path: Path) -> None:
    # Fewer steps than there are between two lines of the log.
    chosen = recipe(tmp_path, learning_rate=1e30, steps=6)
    if mode == "adapter":
        settings = RoundConfig(4, max_length=160, batch_size=2, steps=6, learning_rate=1e30)
        chosen = dataclasses.replace(chosen, mode="adapter", rounds=(settings,))
    with pytest.raises(CollapseError, match=r"has collapsed: .*lower learning_rate"):
        run_recipe(dataclasses.replace(chosen, evaluation=None))
    assert not (tmp_path / "run" / "round-1" / "model").exists()
    assert "NaN" not in (tmp_path / "run" / "round-1" / "log.jsonl").read_text()
