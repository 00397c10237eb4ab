"""Recipes trained at the same time, in processes of their own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from jacobi_forcing.cli.together import Call, train_together
from jacobi_forcing.errors import JForceError
from tiny_folder import save_prompts, save_tiny


@pytest.fixture
def calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Call]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("torch.get_num_threads", lambda: 2)
    save_tiny(tmp_path / "model")
    save_prompts(tmp_path / "prompts.jsonl", 6)
    common: dict[str, Any] = {
        "model": {"name": "model", "device": "cpu"},
        "prompts": {"source": "prompts.jsonl", "field": "question", "limit": 4},
        "collect": {"max_new_tokens": 8},
        "evaluation": {"prompts": {"offset": 4}, "max_new_tokens": 6},
    }
    one_round = {"block_size": 4, "steps": 1, "max_length": 96}
    full = {**common, "rounds": [{**one_round, "window_size": 2}], "output": "full"}
    adapter = {**common, "mode": "adapter", "adapter": {"rank": 2}, "rounds": [one_round], "output": "adapter"}
    for name, recipe in (("full", full), ("adapter", adapter)):
        (tmp_path / f"{name}.yaml").write_text(yaml.safe_dump(recipe), encoding="utf-8")
    return {name: Call(f"{name}.yaml", ["seed=3"], None) for name in ("full", "adapter")}


def test_both_are_trained_and_neither_is_measured(
    calls: dict[str, Call], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train_together(calls, fresh=False)
    assert (tmp_path / "full/model/model.safetensors").is_file()
    assert (tmp_path / "adapter/model/adapter_model.safetensors").is_file()
    for name in calls:
        assert sorted(path.stem for path in (tmp_path / name / "stages").iterdir()) == ["collect-1", "train-1"]
        assert "seed: 3" in (tmp_path / name / "recipe.yaml").read_text()
    told = capsys.readouterr().err
    assert "full: ✓ train-1" in told and "adapter: ✓ train-1" in told
    assert not train_together(calls, fresh=False), "there is nothing left to train"


def test_an_error_of_one_ends_both_and_is_told(calls: dict[str, Call]) -> None:
    broken = {**calls, "full": Call("full.yaml", ["prompts.source=missing.jsonl"], None)}
    with pytest.raises(JForceError, match=r"full: .*missing\.jsonl"):
        train_together(broken, fresh=False)


@pytest.mark.parametrize("why", ["one thread", "probes"])
def test_one_after_another_where_that_is_better(
    why: str, calls: dict[str, Call], monkeypatch: pytest.MonkeyPatch
) -> None:
    if why == "one thread":
        monkeypatch.setattr("torch.get_num_threads", lambda: 1)
    else:
        calls = {name: call._replace(overrides=["evaluation.probe_steps=1"]) for name, call in calls.items()}
    assert not train_together(calls, fresh=False)


def test_a_process_that_is_killed_is_an_error_too(
    calls: dict[str, Call], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("jacobi_forcing.cli.together._CHILD", "import os, signal; os.kill(os.getpid(), signal.SIGKILL)")
    with pytest.raises(JForceError, match=r"was killed by signal 9.*it goes on"):
        train_together(calls, fresh=True)
