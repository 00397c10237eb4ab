from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from cli_tools import last_json
from jacobi_forcing.cli import main

pytestmark = pytest.mark.usefixtures("wide")


def test_collect_train_and_bench_hand_on_to_each_other(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prompts = ["--prompts", "prompts.jsonl", "--field", "question"]
    collect = ["collect", "-m", "model", *prompts, "-o", "trajectories", "-n", "4", "--max-new-tokens", "12", "--json"]
    assert main(collect) == 0
    assert last_json(capsys.readouterr().out)["trajectories"] == 6
    train = ["train", "-m", "model", "-t", "trajectories", "-o", "trained", "--steps", "2", "--lr", "1e-3", "-w", "2"]
    assert main([*train, "--max-length", "96", "--json"]) == 0
    (line,) = capsys.readouterr().out.splitlines()  # the library's trainer keeps silent
    trained = json.loads(line)
    assert trained["model"] == "trained/model"
    assert main([*train, "--max-length", "96"]) == 0
    captured = capsys.readouterr()
    assert captured.out == "trained/model\n"
    assert "done before" in captured.err
    assert main([*train, "--max-length", "100"]) == 2
    refusal = capsys.readouterr().err
    assert "round.max_length" in refusal and "--redo" not in refusal
    # A model that lies where the trained one would go is never written over.
    before = (place / "model" / "model.safetensors").read_bytes()
    assert main(["train", "-m", "model", "-t", "trajectories", "-o", ".", "--steps", "1", "--max-length", "96"]) == 2
    assert "not of a run; seen: model" in capsys.readouterr().err
    assert (place / "model" / "model.safetensors").read_bytes() == before

    bench = [
        "bench",
        "-m",
        "model",
        "--compare",
        "trained/model",
        *prompts,
        "--task",
        "gsm8k",
        "--answer-field",
        "answer",
    ]
    assert main([*bench, "-l", "2", "-n", "4", "-n", "8", "--max-new-tokens", "8", "-o", "bench.json"]) == 0
    captured = capsys.readouterr()
    report = last_json(captured.out)
    assert report == json.loads((place / "bench.json").read_text())
    assert [entry["label"] for entry in report["models"]] == ["model", "trained/model"]
    for entry in report["models"]:
        assert [(d["decoder"], d["block_size"]) for d in entry["decoders"]] == [
            ("library", None),
            ("ar", None),
            ("window", 4),
            ("window", 8),
        ]
        assert all(d["exact"] == d["of"] == 2 for d in entry["decoders"])
    assert "speed-up" in captured.out and "exact" in captured.out and "repeats" in captured.out
    assert "to be expected" in captured.err


def test_bench_looks_at_an_adapter_before_it_measures_the_base(
    place: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("jacobi_forcing.loading.load", lambda settings: pytest.fail(f"{settings.name} was loaded"))
    prompts = ["--prompts", "prompts.jsonl", "--field", "question"]
    assert main(["bench", "-m", "model", *prompts, "--adapter", "nothing/here"]) == 2
    assert "'nothing/here' holds no adapter; seen: no such folder" in " ".join(capsys.readouterr().err.split())


def write_recipe(place: Path, output: str, prompts: str = "prompts.jsonl") -> None:
    recipe = {
        "model": {"name": "model", "device": "cpu"},
        "prompts": {"source": prompts, "field": "question", "limit": 4},
        "collect": {"max_new_tokens": 8},
        "rounds": [{"block_size": 4, "window_size": 2, "steps": 1, "max_length": 96}],
        "evaluation": {"prompts": {"offset": 4}, "max_new_tokens": 6, "decode": [{"block_size": 4}]},
        "output": output,
    }
    (place / "recipe.yaml").write_text(yaml.safe_dump(recipe))


def test_run_prints_the_table_and_the_report(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_recipe(place, "run")
    assert main(["run", "recipe.yaml"]) == 0
    captured = capsys.readouterr()
    assert captured.out.count("round 1") == 3  # the library, ar and window
    assert "collect-1" in captured.err and "train-1" in captured.err
    assert main(["run", "recipe.yaml", "--json"]) == 0
    captured = capsys.readouterr()
    (line,) = captured.out.splitlines()
    assert json.loads(line) == {**json.loads((place / "run" / "report.json").read_text()), "output": "run"}
    assert "done before" in captured.err


def test_quickstart_ends_with_a_sample_and_the_next_commands(
    place: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    write_recipe(place, "quick")
    monkeypatch.setattr("jacobi_forcing.recipe.settings.SHIPPED", (place,))
    (place / "recipe.yaml").rename(place / "quickstart.yaml")
    recipe = yaml.safe_load((place / "quickstart.yaml").read_text())
    recipe |= {"mode": "adapter", "adapter": {"rank": 2, "lines_per_response": 2}, "output": "quick-adapter"}
    recipe["rounds"] = [{"block_size": 4, "steps": 1, "learning_rate": 1e-3, "max_length": 96}]
    (place / "quickstart-adapter.yaml").write_text(yaml.safe_dump(recipe))
    monkeypatch.setattr("jacobi_forcing.cli.quickstart.train_together", lambda *_, **__: False)
    assert main(["quickstart", "--mode", "both"]) == 0
    captured = capsys.readouterr()
    assert captured.out.count("adapter, round 1") == 3
    assert captured.out.count("base ") == 3
    assert "--compare quick/model --adapter quick-adapter/model" in captured.err
    said = " ".join(captured.err.split())
    assert "Which to choose: full: new weights" in said and "adapter: the base and a drafting adapter" in said
    assert main(["quickstart"]) == 0  # both by default, and at once
    captured = capsys.readouterr()
    assert captured.out.count("adapter, round 1") == 3
    assert captured.err.count("done before") == 7
    assert main(["quickstart", "--mode", "adapter"]) == 0
    assert "--model builtin:word-problems --adapter quick-adapter/model" in capsys.readouterr().err
    assert main(["quickstart", "--mode", "half"]) == 2
    assert main(["quickstart", "--mode", "full"]) == 0
    captured = capsys.readouterr()
    assert "What is 4 + 8?" in captured.out  # the first held-out prompt
    assert "sweep 1: +" in captured.err
    assert "jforce generate --model quick/model --show-sweeps 'What is 4 + 8?'" in captured.err
    assert "jforce bench" in captured.err
