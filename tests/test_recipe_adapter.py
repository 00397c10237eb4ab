"""A recipe with `mode: adapter`: the base stays as it is, and what is made is an adapter that drafts for it."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from typer.testing import CliRunner

from jacobi_forcing import DecodeConfig, generate
from jacobi_forcing.adapter import GatedAdapter
from jacobi_forcing.cli.app import app
from jacobi_forcing.config import ModelConfig
from jacobi_forcing.errors import ArtefactError, ConfigError, DataError
from jacobi_forcing.loading import load
from jacobi_forcing.recipe import load_recipe, run_recipe
from jacobi_forcing.recipe.adapter_training import train_adapter
from jacobi_forcing.recipe.training import train_model
from jacobi_forcing.trajectories.store import TrajectoryReader
from test_recipe import EVALUATION, RECIPE, Told
from tiny_folder import save_prompts, save_tiny

ROUNDS: list[dict[str, Any]] = [
    {"block_size": 4, "steps": 4, "learning_rate": 1e-2, "batch_size": 2, "save_steps": 2},
    {"block_size": 8, "steps": 2, "learning_rate": 1e-2, "batch_size": 2, "prompts_offset": 5},
]
ADAPTER: dict[str, Any] = {
    **copy.deepcopy(RECIPE),
    "mode": "adapter",
    "adapter": {"rank": 2, "lines_per_response": 3, "max_sweeps": 2},
    "rounds": ROUNDS,
    "evaluation": {**EVALUATION, "task": "none", "probe_steps": 2},
}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("adapter")
    save_tiny(folder / "model")
    save_prompts(folder / "prompts.jsonl", 12)
    (folder / "recipe.yaml").write_text(yaml.safe_dump(ADAPTER))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        run_recipe(load_recipe("recipe.yaml"))
        yield folder


@pytest.fixture(autouse=True)
def _there(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(place)


def test_what_is_made_is_a_plain_adapter_of_the_base(place: Path) -> None:
    names = {path.name for path in (place / "run/model").iterdir()}
    assert names == {"adapter_config.json", "adapter_model.safetensors", "provenance.json", "custom_generate"}
    decode = json.loads((place / "run/model/custom_generate/decode.json").read_text())
    assert (decode["decoder"], decode["block_size"]) == ("window", 8)
    settings = json.loads((place / "run/model/adapter_config.json").read_text())
    assert (settings["r"], settings["base_model_name_or_path"]) == (2, "model")
    first, last = (place / f"run/round-{number}/model/adapter_model.safetensors" for number in (1, 2))
    assert first.read_bytes() != last.read_bytes()
    assert last.samefile(place / "run/model/adapter_model.safetensors")


def test_only_responses_are_collected_and_from_the_base(place: Path) -> None:
    for number, size in ((1, 4), (2, 8)):
        reader = TrajectoryReader(place / f"run/round-{number}/trajectories")
        assert reader.manifest["settings"]["states"] is False
        for trajectory in reader:
            assert trajectory.block_size == size
            assert all(len(states) == 1 for states in trajectory.states)
    one, two = (
        {t.sample: t.response_ids for t in TrajectoryReader(place / f"run/round-{n}/trajectories")} for n in (1, 2)
    )
    assert all(one[sample] == response for sample, response in two.items())


def test_the_text_of_base_and_adapter_is_the_bases(place: Path) -> None:
    base, adapted = (load(ModelConfig("model", device="cpu", adapter=path)) for path in (None, "run/model"))
    ids = torch.tensor([[5, 6, 7, 8]])
    expected = base.model.generate(ids, do_sample=False, max_new_tokens=20)  # type: ignore[operator]  # a mixin's
    found = generate(adapted.model, ids, decode=DecodeConfig("window", 4), do_sample=False, max_new_tokens=20)
    assert torch.equal(expected, found)
    assert GatedAdapter.of(adapted.model) is not None


def test_the_report_shows_exact_text_and_probes_were_taken(place: Path) -> None:
    report = json.loads((place / "run/report.json").read_text())
    assert [model["label"] for model in report["models"]] == ["base", "adapter, round 2"]
    for model in report["models"]:
        assert all(decoder["exact"] == decoder["of"] for decoder in model["decoders"])
    assert report["models"][0]["quality"] == report["models"][1]["quality"]
    assert report["stages"]["train-1"]["summary"].startswith("4 steps")
    steps = [json.loads(line)["step"] for line in (place / "run/round-1/probe.jsonl").read_text().splitlines()]
    assert steps == [0, 2, 4]


def test_a_second_run_finds_everything_done(place: Path) -> None:
    told = Told()
    run_recipe(load_recipe("recipe.yaml"), reporter=told)
    assert told.done == []
    assert told.skipped == ["evaluate-base", "collect-1", "train-1", "collect-2", "train-2", "evaluate-2"]


def test_training_anew_gives_the_same_bytes(place: Path, tmp_path: Path) -> None:
    recipe = load_recipe("recipe.yaml", ["evaluation=null"], tmp_path / "again")
    run_recipe(recipe)
    for number in (1, 2):
        name = f"round-{number}/model/adapter_model.safetensors"
        assert (tmp_path / "again" / name).read_bytes() == (place / "run" / name).read_bytes()


def test_other_adapter_settings_are_not_mixed_in(place: Path) -> None:
    with pytest.raises(ArtefactError, match=r"adapter\.rank: 2"):
        run_recipe(load_recipe("recipe.yaml", ["adapter.rank=4"]))


@pytest.mark.parametrize(
    ("override", "named"),
    [
        ("rounds.0.ar_weight=3", r"rounds\[0\]\.ar_weight.*no meaning"),
        ("rounds.1.mask=clean_context", r"rounds\[1\]\.mask.*no meaning"),
        ("mode=full", "'adapter' is set and 'mode' is full"),
        ("mode=half", "one of full, adapter"),
        ("adapter.rank=0", "at least 1"),
        ("adapter.rnak=4", "did you mean 'rank'"),
    ],
)
def test_settings_that_nothing_would_read_are_refused(override: str, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        load_recipe("recipe.yaml", [override])


def test_stored_states_are_collected_and_trained_on(place: Path, tmp_path: Path) -> None:
    overrides = ["evaluation=null", "adapter.states=stored", "adapter.max_sweeps=4"]
    report = run_recipe(load_recipe("recipe.yaml", overrides, tmp_path / "stored"))
    for number in (1, 2):
        assert TrajectoryReader(tmp_path / f"stored/round-{number}/trajectories").has_states
    assert report["stages"]["train-2"]["summary"]
    with pytest.raises(DataError, match="no states to train on"):
        recipe = load_recipe("recipe.yaml", overrides)
        train_adapter(
            ModelConfig("model", device="cpu"),
            place / "run/round-1/trajectories",
            recipe.rounds[0],
            recipe.adapter,
            tmp_path / "alone",
            seed=0,
            reporter=Told(),
        )


def test_the_weights_are_not_trained_on_responses_alone(place: Path, tmp_path: Path) -> None:
    settings = load_recipe("recipe.yaml").rounds[0]
    with pytest.raises(ArtefactError, match="without the states"):
        train_model(
            ModelConfig("model", device="cpu"),
            place / "run/round-1/trajectories",
            settings,
            tmp_path,
            seed=0,
            reporter=Told(),
        )


def test_the_command_line_trains_and_uses_an_adapter(place: Path, tmp_path: Path) -> None:
    def jforce(*arguments: str) -> dict[str, Any]:
        result = CliRunner().invoke(app, [*arguments, "--json"], catch_exceptions=False)
        assert result.exit_code == 0, result.output
        answer: dict[str, Any] = json.loads(result.stdout.splitlines()[-1])
        return answer

    out = str(tmp_path / "out")
    adapter = ("--rank", "2", "--lines-per-response", "3", "--max-sweeps", "1")
    trained = jforce(
        *("train", "-t", "run/round-1/trajectories", "-m", "model", "--mode", "adapter", *adapter),
        *("--steps", "2", "--batch-size", "2", "-o", out, "--device", "cpu"),
    )
    assert (tmp_path / "out/model/adapter_model.safetensors").is_file()
    assert json.loads((tmp_path / "out/log.jsonl").read_text().splitlines()[-1])["step"] == 2
    answers = [
        jforce("generate", "hello", "-m", "model", "--max-new-tokens", "12", "-n", "4", "--device", "cpu", *more)
        for more in ((), ("--adapter", trained["model"]))
    ]
    assert answers[0]["text"] == answers[1]["text"]
    bench = jforce(
        *("bench", "-m", "model", "--adapter", trained["model"], "--prompts", "prompts.jsonl", "--field", "question"),
        *("--limit", "2", "--max-new-tokens", "8", "-n", "4", "--device", "cpu"),
    )
    assert [model["label"] for model in bench["models"]] == ["model", "model + model"]  # no path of this machine
    assert all(decoder["exact"] == decoder["of"] == 2 for model in bench["models"] for decoder in model["decoders"])
