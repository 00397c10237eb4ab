"""Training in two processes ends with what one process ends with."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM

import several
from collecting import run
from jacobi_forcing.errors import ArtefactError, ConfigError
from jacobi_forcing.recipe import load_recipe, run_recipe
from jacobi_forcing.training import Collator, JacobiForcingConfig, JacobiForcingTrainer
from jacobi_forcing.training.sharing import EvenRows
from several import TRAJECTORIES, torchrun
from tiny_folder import save_prompts, save_tiny
from tiny_models import tiny_model


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What two processes ended with."""
    folder = tmp_path_factory.mktemp("several")
    done = torchrun(folder, several.__file__, str(folder))
    assert done.returncode == 0, done.stderr[-3000:]
    return torch.load(folder / "found.pt")


def assert_same(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    start = tiny_model("llama").state_dict()
    assert ours["weights"].keys() == theirs["weights"].keys()
    for name, value in theirs["weights"].items():
        moved = (value - start[name]).abs().max() if name in start else value.abs().max()
        assert moved > 0, name
        assert (ours["weights"][name] - value).abs().max() <= 1e-4 * moved + 1e-7, name
    assert len(ours["log"]) == len(theirs["log"]) == 5
    for one, other in zip(ours["log"], theirs["log"], strict=True):
        assert one.keys() == other.keys()
        for name in one.keys() & {
            "loss",
            "consistency_loss",
            "ar_loss",
            "noise_ratio",
            "trained_share",
            "grad_norm",
            "block_sweeps",
            "drifted_blocks",
        }:
            assert one[name] == pytest.approx(other[name], rel=1e-4), name
        assert one.get("tokens_per_forward") == other.get("tokens_per_forward")


@pytest.mark.parametrize("case", ["full", "accumulated", "on_policy", "adapter"])
def test_two_processes_train_as_one_with_twice_the_batch(case: str, found: dict[str, Any], tmp_path: Path) -> None:
    changes = {"states": "on_policy"} if case == "on_policy" else {}
    trainer = several.adapter(tmp_path, 4) if case == "adapter" else several.full(tmp_path, 4, **changes)
    # Odd: the last batch of an epoch is not full, and in mode full one process gets none of its rows.
    assert len(trainer.train_dataset) % 4 == (3 if case == "adapter" else 1)
    assert_same(found[case], several.outcome(trainer))


@pytest.mark.parametrize(("whole", "resumed"), [("full", "resumed"), ("adapter", "adapter resumed")])
def test_two_processes_resume_to_the_bit(whole: str, resumed: str, found: dict[str, Any]) -> None:
    for name, value in found[whole]["weights"].items():
        assert torch.equal(found[resumed]["weights"][name], value), name


def test_a_gated_adapter_is_trained_and_saved_by_two_processes(tmp_path: Path) -> None:
    save_tiny(tmp_path / "model")
    run(AutoModelForCausalLM.from_pretrained(tmp_path / "model"), tmp_path / "responses", states=False)
    command = ("train", "-t", "responses", "--model", "model", "--device", "cpu", "--mode", "adapter", "--rank", "2")
    more = ("--steps", "4", "--save-steps", "1", "--batch-size", "1", "-o", "out")
    done = torchrun(tmp_path, "-m", "jacobi_forcing", *command, *more)
    assert done.returncode == 0, done.stderr[-3000:]
    assert (tmp_path / "out/model/adapter_model.safetensors").is_file()
    assert not (tmp_path / "out/checkpoints").exists()


def test_weights_that_are_shared_out_get_the_same_gradients(found: dict[str, Any], tmp_path: Path) -> None:
    model = tiny_model("llama")
    args = JacobiForcingConfig(output_dir=str(tmp_path), **{**several.COMMON, "max_length": 40, "window_size": 4})
    trainer = JacobiForcingTrainer(model, args, TRAJECTORIES)
    rows = trainer.train_dataset
    trainer.losses(Collator()([rows[index] for index in range(len(rows))])).total.backward()
    gradients = {name: p.grad for name, p in model.named_parameters()}
    assert found["sharded"].keys() == gradients.keys()
    for name, gradient in gradients.items():
        assert (found["sharded"][name] - gradient).abs().max() <= 1e-5 * gradient.abs().max(), name


@pytest.mark.parametrize(("rows", "shuffle"), [(7, True), (8, False), (1, True)])
def test_rows_are_filled_up_to_even_shares_and_every_row_is_seen_once(rows: int, shuffle: bool) -> None:
    class Rows:
        epoch = -1

        def __len__(self) -> int:
            return rows

        def __getitem__(self, index: int) -> int:
            return index

        def set_epoch(self, epoch: int) -> None:
            self.epoch = epoch

        def empty_row(self) -> str:
            return "empty"

    even = EvenRows(Rows(), 4, shuffle=shuffle, seed=3)
    assert len(even) % 4 == 0
    orders = []
    for epoch in range(2):
        even.set_epoch(epoch)
        assert even.rows.epoch == epoch
        seen = [even[index] for index in even.sampler]
        assert sorted(seen[:rows]) == list(range(rows))
        assert seen[rows:] == ["empty"] * (len(even) - rows)
        orders.append(seen)
    assert (orders[0] != orders[1]) == (shuffle and rows > 1)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"fsdp": "full_shard"}, "needs GPUs"),
        ({"deepspeed": "missing.json"}, "cannot be read"),
        ({"deepspeed": {"zero_optimization": {"stage": 2}}}, "pip install deepspeed"),
        ({"fsdp": "full_shard", "deepspeed": {}}, "needs GPUs"),
        ({"fsdp_config": {"version": 2}}, "'fsdp' is not"),
    ],
)
def test_sharding_that_cannot_work_is_refused_with_a_remedy(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=message):
        JacobiForcingConfig(output_dir=str(tmp_path), use_cpu=True, **changes)


def test_two_processes_halt_together_when_one_sees_that_training_has_collapsed(tmp_path: Path) -> None:
    save_tiny(tmp_path / "model")
    save_prompts(tmp_path / "prompts.jsonl", 8)
    prompts = {"source": "prompts.jsonl", "field": "question", "limit": 4}
    training = {"block_size": 4, "window_size": 2, "max_length": 160, "batch_size": 1, "steps": 40}
    recipe = {
        "model": {"name": "model", "device": "cpu"},
        "prompts": prompts,
        "collect": {"max_new_tokens": 24, "shard_size": 4},
        "rounds": [{**training, "learning_rate": 30.0, "warmup_ratio": 0.9, "lr_scheduler": "linear"}],
        "evaluation": {"prompts": {**prompts, "offset": 4}, "max_new_tokens": 24, "probe_steps": 1, "base": False},
    }
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe), encoding="utf-8")
    done = torchrun(tmp_path, "-m", "jacobi_forcing", "run", "recipe.yaml", "--output", "out")
    assert done.returncode != 0
    assert "Training has collapsed at step" in done.stderr, done.stderr[-3000:]
    assert (tmp_path / "out/round-1/checkpoints/good").is_dir()
    assert not (tmp_path / "out/round-1/model").exists()


def test_a_recipe_run_by_two_processes_writes_once_and_knows_how_many_they_were(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_tiny(tmp_path / "model")
    save_prompts(tmp_path / "prompts.jsonl", 6)
    prompts = {"source": "prompts.jsonl", "field": "question"}
    recipe = {
        "model": {"name": "model", "device": "cpu"},
        "prompts": prompts,
        "collect": {"max_new_tokens": 10, "shard_size": 2},
        "rounds": [{"block_size": 4, "steps": 3, "batch_size": 1, "window_size": 2, "learning_rate": 1e-3}],
        "evaluation": {"prompts": {"limit": 2}, "max_new_tokens": 6, "probe_steps": 2, "probe_prompts": 2},
    }
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe), encoding="utf-8")
    command = ("-m", "jacobi_forcing", "run", "recipe.yaml", "--output", "out", "--json")
    done = torchrun(tmp_path, *command)
    assert done.returncode == 0, done.stderr[-3000:]
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("{")]
    assert json.loads(line)["models"]
    assert done.stderr.count("✓ train-1") == 1
    log = [json.loads(line) for line in (tmp_path / "out/round-1/log.jsonl").read_text().splitlines()]
    assert len({entry["step"] for entry in log}) == len(log) >= 1
    probes = [json.loads(line)["step"] for line in (tmp_path / "out/round-1/probe.jsonl").read_text().splitlines()]
    assert probes == [0, 2, 3]
    AutoModelForCausalLM.from_pretrained(tmp_path / "out/model")
    assert not (tmp_path / "out/round-1/checkpoints").exists()
    # Alone it would train on half as many rows a step.
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ArtefactError, match="processes"):
        run_recipe(load_recipe("recipe.yaml", [], Path("out")))
