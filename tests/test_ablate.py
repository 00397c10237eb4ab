from __future__ import annotations

import copy
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from jacobi_forcing.ablate import GridConfig, load_grid, run_grid
from jacobi_forcing.ablate.table import figure, markdown
from jacobi_forcing.cli.app import main
from jacobi_forcing.errors import ArtefactError, ConfigError
from jacobi_forcing.recipe import Reporter
from jacobi_forcing.trajectories.store import TrajectoryReader
from result_schemas import assert_valid
from tiny_folder import save_prompts, save_tiny

SHIPPED = ("schedules", "masks", "rounds", "cllm", "states")
RECIPE: dict[str, Any] = {
    "model": {"name": "model", "device": "cpu"},
    "prompts": {"source": "prompts.jsonl", "field": "question", "limit": 6},
    "collect": {"max_new_tokens": 12, "batch_size": 3, "shard_size": 2},
    "rounds": [
        {"block_size": 4, "window_size": 2, "steps": 2, "learning_rate": 1e-3, "max_length": 96, "batch_size": 1},
        {"block_size": 8, "window_size": 2, "steps": 1, "learning_rate": 1e-3, "max_length": 96, "batch_size": 1},
    ],
    "evaluation": {
        "prompts": {"answer_field": "answer", "offset": 6, "limit": 3},
        "task": "gsm8k",
        "max_new_tokens": 8,
        "decode": [{"decoder": "window", "block_size": 4}],
    },
}
ONE = {"rounds": [{**RECIPE["rounds"][0], "block_size": 8}]}
GRID: dict[str, Any] = {
    "recipe": "recipe.yaml",
    "variants": {"plain": {}, "reverse": {"rounds.0.schedule": "reverse"}, "one-round": ONE},
    "seeds": [0, 3],
    "train_tokens": 300,
    "tpf_prompts": 2,
    "output": "grid",
}


class Told(Reporter):
    def __init__(self) -> None:
        self.done: list[str] = []

    def begin(self, stage: str, title: str) -> None:
        self.title = title

    def end(self, stage: str, summary: str) -> None:
        self.done.append(stage)


def write(path: Path, values: dict[str, Any]) -> Path:
    path.write_text(yaml.safe_dump(copy.deepcopy(values), sort_keys=False), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A working folder with a model, prompts, a recipe and a grid that has been run."""
    folder = tmp_path_factory.mktemp("place")
    save_tiny(folder / "model")
    save_prompts(folder / "prompts.jsonl", 12)
    write(folder / "recipe.yaml", RECIPE)
    write(folder / "grid.yaml", GRID)
    before = Path.cwd()
    os.chdir(folder)
    run_grid(*load_grid("grid.yaml"))
    yield folder
    os.chdir(before)


def report_of(place: Path, output: str = "grid") -> dict[str, Any]:
    return dict(json.loads((place / output / "ablation.json").read_text()))


def test_every_variant_is_run_with_every_seed_the_first_seed_first(place: Path) -> None:
    report = report_of(place)
    expected = [(name, seed) for seed in (0, 3) for name in GRID["variants"]]
    assert [(run["variant"], run["seed"]) for run in report["runs"]] == expected
    assert report["unfinished"] == 0
    assert_valid(report, "ablation")


def test_variants_take_the_same_training_tokens_and_say_how_many(place: Path) -> None:
    samples = list(TrajectoryReader(place / "grid/runs/plain/seed-0/round-1/trajectories"))
    mean = statistics.fmean(len(sample.prompt_ids) + 2 * len(sample.response_ids) for sample in samples)
    for run in report_of(place)["runs"]:
        # Each round ends with the step that comes nearest; a step is one row of one or two samples.
        assert abs(run["train_tokens"] - 300) <= 2 * mean
    two, one = (
        next(run for run in report_of(place)["runs"] if run["variant"] == name) for name in ("plain", "one-round")
    )
    log = [json.loads(line) for line in (place / "grid/runs/plain/seed-0/round-1/log.jsonl").read_text().splitlines()]
    assert two["steps"] == one["steps"] or abs(two["steps"] - one["steps"]) <= 1
    assert any("train_loss" in entry for entry in log)


def test_a_variant_changes_the_keys_it_names_and_no_other(place: Path) -> None:
    recipes = {
        name: yaml.safe_load((place / f"grid/runs/{name}/seed-0/recipe.yaml").read_text())
        for name in ("plain", "reverse")
    }
    assert recipes["reverse"]["rounds"][0].pop("schedule") == "reverse"
    assert recipes["plain"]["rounds"][0].pop("schedule") == "progressive"
    assert {**recipes["plain"], "output": None} == {**recipes["reverse"], "output": None}


def test_what_starts_from_the_base_model_is_collected_once(place: Path) -> None:
    first = [
        place / f"grid/runs/{name}/seed-{seed}/round-1/trajectories/manifest.json"
        for name, seed in (("plain", 0), ("reverse", 0), ("plain", 3))
    ]
    assert len({path.stat().st_ino for path in first}) == 1
    other = place / "grid/runs/one-round/seed-0/round-1/trajectories/manifest.json"
    assert json.loads(other.read_text())["settings"] and other.stat().st_ino != first[0].stat().st_ino
    assert len(list((place / "grid/collected").iterdir())) == 2
    runs = report_of(place)["runs"]
    # Whoever collected, each run's cost has it.
    assert all(run["collect_core_seconds"] > 0 for run in runs)


def test_the_table_has_mean_and_spread_over_seeds_and_the_base_model(place: Path) -> None:
    report = report_of(place)
    variant = report["variants"][1]
    values = [
        run["decoders"]["window n=4"]["tokens_per_forward"] for run in report["runs"] if run["variant"] == "reverse"
    ]
    told = variant["tokens_per_forward"]["window n=4"]
    assert told["values"] == values
    assert told["mean"] == pytest.approx(sum(values) / 2, abs=1e-4)
    assert told["sd"] == pytest.approx(abs(values[0] - values[1]) / 2**0.5, abs=1e-4)
    assert (variant["exact"], variant["of"]) == (4, 4)
    table = (place / "grid" / "table.md").read_text()
    assert [line.split(" | ")[0] for line in table.splitlines()[2:6]] == [
        "| base",
        "| plain",
        "| reverse",
        "| one-round",
    ]
    assert table == markdown(report)


def test_a_single_value_has_no_spread() -> None:
    assert figure([2.0]) == {"mean": 2.0, "sd": None, "low": 2.0, "high": 2.0, "values": [2.0]}
    assert figure([]) is None


def test_a_finished_grid_is_not_run_again(place: Path) -> None:
    before, told = (place / "grid" / "ablation.json").read_bytes(), Told()
    run_grid(*load_grid("grid.yaml"), reporter=told)
    assert told.done == []
    assert (place / "grid" / "ablation.json").read_bytes() == before


def test_other_settings_in_the_same_folder_are_refused(place: Path) -> None:
    with pytest.raises(ArtefactError, match="train_tokens"):
        run_grid(*load_grid("grid.yaml", ["train_tokens=600"]))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"variants": {"a": {"rounds.0.schedul": "random"}}}, "In the variant 'a'.*did you mean 'schedule'"),
        ({"variants": {"a": {"evaluation.task": "none"}}}, "replaces 'evaluation.task'.*measured alike"),
        ({"variants": {"../a": {}}}, "cannot name a folder"),
        ({"variants": {}}, "needs variants"),
        ({"core_seconds": 5}, "two budgets"),
        ({"variants": {"a": {"rounds.0.steps": None}}}, "ratio of the rounds' steps"),
        ({"recipe": "nowhere.yaml"}, "no recipe"),
        ({"base": {"evaluation": None}}, "has no evaluation"),
        ({"tokens": 5}, "Unknown key 'tokens'"),
    ],
)
def test_a_wrong_grid_is_refused_before_anything_runs(place: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_grid(write(place / "wrong.yaml", {**GRID, **changes}))


def test_the_shipped_grids_hold_together() -> None:
    for name in SHIPPED:
        grid, recipe = load_grid(name)
        made = grid.recipes(recipe, 1)
        kind = "core_seconds" if name == "states" else "train_tokens"
        budgets = {sum(getattr(settings, kind) for settings in one.rounds) for one in made.values()}
        assert len(grid.seeds) == 3 and budgets == {getattr(grid, kind)}
        assert len({str({**one.to_dict(), "output": None}) for one in made.values()}) == len(made)
    with pytest.raises(ConfigError, match=", ".join(sorted(SHIPPED))):
        load_grid("nothing")


@pytest.mark.timeout(300)  # two processes that each import torch
def test_killed_it_goes_on_and_ends_as_if_undisturbed(place: Path, tmp_path: Path) -> None:
    write(place / "killed.yaml", {**GRID, "variants": {name: GRID["variants"][name] for name in ("plain", "reverse")}})
    command = [
        sys.executable,
        "-m",
        "jacobi_forcing",
        "ablate",
        "killed.yaml",
        "--set",
        "seeds=[0]",
        "-o",
        str(tmp_path / "g"),
    ]
    source = str(Path(__file__).resolve().parents[1] / "src")
    environment = {**os.environ, "PYTHONPATH": source, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command, cwd=place, env=environment, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 200
    while not (tmp_path / "g/runs/reverse/seed-0/round-1/log.jsonl").exists():
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.001)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert report_of(tmp_path, "g")["unfinished"] == 1  # one run is in the table of the killed grid
    done = subprocess.run([*command, "--json"], cwd=place, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    undisturbed = {run["variant"]: run for run in report_of(place)["runs"] if run["seed"] == 0}
    for run in report["runs"]:
        for key in ("decoders", "quality", "steps", "train_tokens"):
            assert run[key] == undisturbed[run["variant"]][key]


def test_the_verb_prints_one_table(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ablate", "grid.yaml"]) == 0
    out = capsys.readouterr().out.splitlines()
    assert out[0].split()[0] == "variant" and [line.split()[0] for line in out[1:]] == [
        "base",
        "plain",
        "reverse",
        "one-round",
    ]
    assert main(["ablate", "nothing"]) == 2


def test_a_grid_keeps_its_settings_through_yaml(tmp_path: Path) -> None:
    grid = GridConfig.from_dict({"base": {}, **GRID})
    (tmp_path / "grid.yaml").write_text(grid.to_yaml())
    assert GridConfig.load_yaml(tmp_path / "grid.yaml") == grid


def test_a_further_seed_runs_what_is_missing_and_nothing_else(place: Path) -> None:
    write(place / "more.yaml", {**GRID, "variants": {"plain": {}}, "seeds": [0, 3, 4]})
    told = Told()
    report = run_grid(*load_grid("more.yaml"), reporter=told)
    assert [stage.split(": ")[1] for stage in told.done] == ["collect-1", "train-1", "collect-2", "train-2", "count"]
    assert all(stage.startswith("3 of 3, plain, seed 4") for stage in told.done)
    assert [len(variant["seeds"]) for variant in report["variants"]] == [3]
    # Round 1 was collected before; round 2 depends on the weights.
    assert len(list((place / "grid/collected").iterdir())) == 2
