from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from jacobi_forcing import DecodeConfig, generate
from jacobi_forcing.errors import ArtefactError, ConfigError
from jacobi_forcing.recipe import Reporter, load_recipe, run_recipe
from jacobi_forcing.trajectories.store import TrajectoryReader
from result_schemas import assert_valid
from tiny_folder import save_prompts, save_tiny
from tiny_recipe import EVALUATION, RECIPE, write


class Told(Reporter):
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.done: list[str] = []
        self.skipped: list[str] = []
        self.notes: list[str] = []

    def end(self, stage: str, summary: str) -> None:
        self.done.append(stage)

    def skip(self, stage: str, summary: str) -> None:
        self.skipped.append(stage)

    def note(self, text: str) -> None:
        self.notes.append(text)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A working folder with a model, prompts and two recipes, one of them run to its end."""
    folder = tmp_path_factory.mktemp("place")
    save_tiny(folder / "model")
    save_prompts(folder / "prompts.jsonl", 12)
    write(folder / "recipe.yaml", RECIPE)
    write(folder / "measured.yaml", {**RECIPE, "evaluation": EVALUATION, "output": "measured"})
    before = Path.cwd()
    os.chdir(folder)
    run_recipe(load_recipe("measured.yaml"))
    yield folder
    os.chdir(before)


def artefacts(output: Path) -> dict[str, bytes]:
    """What must not depend on how often a run was killed."""
    files = [output / "model" / "model.safetensors", *output.glob("round-*/model/model.safetensors")]
    files += output.glob("round-*/trajectories/*.parquet")
    return {path.relative_to(output).as_posix(): path.read_bytes() for path in sorted(files)}


# A whole run ------------------------------------------------------------------------------------------------------


def test_a_run_ends_with_a_model_that_plain_transformers_loads_and_decodes_as_ar_does(place: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(place / "measured" / "model")
    tokenizer = AutoTokenizer.from_pretrained(place / "measured" / "model")
    inputs = tokenizer("What is 3 + 1?", return_tensors="pt")
    inputs.pop("token_type_ids", None)
    expected = model.generate(**inputs, max_new_tokens=12, do_sample=False)
    for decoder in ("ar", "window"):
        assert torch.equal(generate(model, **inputs, decode=DecodeConfig(decoder=decoder), max_new_tokens=12), expected)


def test_a_trained_model_says_how_it_is_decoded(place: Path) -> None:
    for folder, block_size in (("round-1/model", 4), ("model", 8)):
        saved = GenerationConfig.from_pretrained(place / "measured" / folder).jacobi_forcing
        assert (saved["decoder"], saved["block_size"]) == ("window", block_size)
        assert (place / "measured" / folder / "custom_generate" / "generate.py").is_file()


def test_training_changed_the_model_in_both_rounds(place: Path) -> None:
    files = ["model/model.safetensors", *(f"measured/round-{r}/model/model.safetensors" for r in (1, 2))]
    assert len({(place / file).read_bytes() for file in files}) == 3
    final = place / "measured" / "model" / "model.safetensors"
    assert final.read_bytes() == (place / files[2]).read_bytes()


def test_each_round_collects_its_own_slice_with_its_own_block_size(place: Path) -> None:
    first, second = (TrajectoryReader(place / "measured" / f"round-{r}" / "trajectories") for r in (1, 2))
    assert (first.block_size, second.block_size) == (4, 8)
    assert [trajectory.sample for trajectory in first] == list(range(8))
    assert [trajectory.sample for trajectory in second] == [5, 6, 7]
    assert first.manifest["settings"]["model_fingerprint"] != second.manifest["settings"]["model_fingerprint"]


def test_the_report_sets_base_and_trained_side_by_side(place: Path) -> None:
    report = json.loads((place / "measured" / "report.json").read_text())
    assert_valid(report, "run")
    assert [entry["label"] for entry in report["models"]] == ["base", "round 2"]
    for entry in report["models"]:
        assert entry["quality"]["answers"] == 3
        assert [(d["decoder"], d["exact"], d["of"]) for d in entry["decoders"]] == [
            ("library", 2, 2),
            ("ar", 2, 2),
            ("window", 2, 2),
        ]
    assert report["provenance"]["seed"] == 0
    table = (place / "measured" / "table.md").read_text()
    assert table.count("| base |") == table.count("| round 2 |") == 3
    assert str(place) not in json.dumps(report) + table


def test_probes_are_kept_over_the_steps(place: Path) -> None:
    lines = [json.loads(line) for line in (place / "measured" / "round-1" / "probe.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [0, 4, 6]
    for line in lines:
        assert_valid(line, "probe")
        assert line["tokens_per_forward"] >= 1
        assert line["answers"] == 2
        assert line["solve_rate"] is not None


def test_losses_are_logged_and_checkpoints_are_gone(place: Path) -> None:
    first = place / "measured" / "round-1"
    entries = [json.loads(line) for line in (first / "log.jsonl").read_text().splitlines()]
    assert any("train_loss" in entry for entry in entries)
    for entry in entries:
        assert_valid(entry, "train-log")
    assert not (first / "checkpoints").exists()


def test_every_model_says_what_made_it(place: Path) -> None:
    record = json.loads((place / "measured" / "model" / "provenance.json").read_text())
    assert record["round"]["block_size"] == 8
    assert record["versions"]["torch"]


# Going on, and refusing to ----------------------------------------------------------------------------------------


def test_a_finished_run_is_not_run_again(place: Path) -> None:
    report = (place / "measured" / "report.json").read_bytes()
    told = Told()
    run_recipe(load_recipe("measured.yaml"), reporter=told)
    assert told.done == []
    assert told.skipped == ["evaluate-base", "collect-1", "train-1", "collect-2", "train-2", "evaluate-2"]
    assert (place / "measured" / "report.json").read_bytes() == report


@pytest.mark.parametrize(
    ("override", "stage", "named"),
    [
        ("rounds.0.learning_rate=0.5", "train-1", "round.learning_rate"),
        ("rounds.1.block_size=16", "collect-2", "block_size"),
        ("prompts.limit=7", "collect-1", "prompts.limit"),
        ("seed=3", "train-1", "seed"),
    ],
)
def test_other_settings_in_the_same_folder_are_refused_by_name(
    place: Path, override: str, stage: str, named: str
) -> None:
    before = artefacts(place / "measured")
    with pytest.raises(ArtefactError, match=f"stage '{stage}' of other settings: {named}") as caught:
        run_recipe(load_recipe("measured.yaml", [override]))
    assert "--redo" in str(caught.value) and "--fresh" in str(caught.value)
    assert artefacts(place / "measured") == before


def test_settings_that_change_no_result_are_no_other_settings(place: Path) -> None:
    told = Told()
    run_recipe(load_recipe("measured.yaml", ["rounds.0.save_steps=5", "collect.batch_size=3"]), reporter=told)
    assert told.done == []


def test_a_changed_evaluation_is_measured_anew_and_nothing_else(place: Path) -> None:
    told = Told()
    run_recipe(load_recipe("measured.yaml", ["evaluation.speed_prompts=1"]), reporter=told)
    assert told.done == ["evaluate-base", "evaluate-2"]


def test_redo_keeps_what_comes_before(place: Path, tmp_path: Path) -> None:
    settings = load_recipe("recipe.yaml", output=tmp_path / "run")
    run_recipe(settings)
    told, before = Told(), artefacts(tmp_path / "run")
    changed = load_recipe("recipe.yaml", ["rounds.1.steps=1"], tmp_path / "run")
    run_recipe(changed, redo="train-2", reporter=told)
    assert told.done == ["train-2"]
    after = artefacts(tmp_path / "run")
    assert {name for name in before if before[name] != after[name]} == {
        "model/model.safetensors",
        "round-2/model/model.safetensors",
    }
    with pytest.raises(ConfigError, match=r"no stage 'train-9'.*train-2"):
        run_recipe(changed, redo="train-9")


def test_a_stage_whose_files_are_gone_is_done_again(place: Path, tmp_path: Path) -> None:
    settings = load_recipe("recipe.yaml", output=tmp_path / "run")
    run_recipe(settings)
    before = artefacts(tmp_path / "run")
    (tmp_path / "run" / "round-2" / "model" / "config.json").unlink()
    told = Told()
    run_recipe(settings, reporter=told)
    assert told.done == ["train-2"]
    assert artefacts(tmp_path / "run") == before


def test_fresh_throws_away_the_run_and_nothing_else(place: Path, tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("mine")
    first = load_recipe("recipe.yaml", ["rounds.0.steps=1", "rounds.1.steps=1"], tmp_path)
    run_recipe(first)
    told = Told()
    run_recipe(
        load_recipe("recipe.yaml", ["rounds.0.steps=2", "rounds.1.steps=1"], tmp_path), fresh=True, reporter=told
    )
    assert told.done == ["collect-1", "train-1", "collect-2", "train-2"]
    assert (tmp_path / "thesis.txt").read_text() == "mine"


def test_a_folder_with_somebody_elses_model_is_refused(place: Path, tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    with pytest.raises(ArtefactError, match="not of a run; seen: model"):
        run_recipe(load_recipe("recipe.yaml", output=tmp_path))


def test_two_runs_in_one_folder_are_refused(place: Path, tmp_path: Path) -> None:
    class Second(Reporter):
        def begin(self, stage: str, title: str) -> None:
            run_recipe(load_recipe("recipe.yaml", output=tmp_path))

    with pytest.raises(ArtefactError, match="Another run is at work"):
        run_recipe(load_recipe("recipe.yaml", output=tmp_path), reporter=Second())


# Killed -----------------------------------------------------------------------------------------------------------


def killed_when(place: Path, output: Path, ready: Callable[[], bool]) -> None:
    """Start the recipe in a process of its own and kill it, without mercy, as soon as `ready`."""
    process = subprocess.Popen(command(output), cwd=place, env=environment(), stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 200
    try:
        while not ready():
            assert process.poll() is None, "it ended before it could be killed"
            assert time.monotonic() < deadline
            time.sleep(0.001)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert process.returncode == -signal.SIGKILL


def command(output: Path) -> list[str]:
    return [sys.executable, "-m", "jacobi_forcing", "run", "recipe.yaml", "--output", str(output)]


def environment() -> dict[str, str]:
    source = str(Path(__file__).resolve().parents[1] / "src")
    return {**os.environ, "PYTHONPATH": source, "OMP_NUM_THREADS": "1"}


@pytest.mark.timeout(600)  # four processes that each import torch, on a machine that may be busy
def test_killed_in_collecting_and_in_training_it_ends_with_the_same_bytes(place: Path, tmp_path: Path) -> None:
    undisturbed, killed = tmp_path / "undisturbed", tmp_path / "killed"
    run_recipe(load_recipe("recipe.yaml", output=undisturbed))
    first = killed / "round-1"
    killed_when(place, killed, lambda: any(first.glob("trajectories/shard-00001.parquet*")))
    assert not (first / "model").exists()
    # As early as the folder of the second checkpoint appears: it is half written then.
    killed_when(place, killed, lambda: (first / "checkpoints" / "checkpoint-4").exists())
    assert not (first / "model").exists()
    done = subprocess.run(command(killed), cwd=place, env=environment(), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "goes on at step" in done.stderr
    assert artefacts(killed) == artefacts(undisturbed)
    steps = [json.loads(line).get("step") for line in (first / "log.jsonl").read_text().splitlines()]
    assert steps == sorted(steps)
