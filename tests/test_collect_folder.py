from __future__ import annotations

import signal
import subprocess
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from collecting import PROMPTS, plain_response, run, shards, some_prompts
from jacobi_forcing.backbone import Backbone
from jacobi_forcing.errors import ArtefactError, ConfigError, DataError, ModelError
from jacobi_forcing.trajectories import collect as collect_module
from jacobi_forcing.trajectories import collector as collector_module
from jacobi_forcing.trajectories.prompts import Prompt
from jacobi_forcing.trajectories.store import TrajectoryReader, read_manifest
from tiny_models import VOCAB, shared_model

pytest.importorskip("pyarrow")


def test_the_report_and_the_progress_count_what_was_done(tmp_path: Path) -> None:
    model, calls = shared_model("llama"), []
    eos = [plain_response(model, PROMPTS[0].ids, 14)[5]]
    report = run(model, tmp_path, eos_ids=eos, on_progress=lambda *call: calls.append(call))
    stored = list(TrajectoryReader(tmp_path))
    assert report.responses == 5
    assert report.tokens == sum(len(t.response_ids) for t in stored)
    assert report.unfinished == sum(not t.finished for t in stored)
    assert report.blocks == sum(len(t.states) for t in stored)
    assert report.sweeps == sum(len(states) - 1 for t in stored for states in t.states)
    assert report.near_ties == report.dropped == report.resumed == 0
    assert min(report.fixed_point_seconds, report.trajectory_seconds, report.write_seconds) > 0
    assert set(report.to_dict()) >= {"responses", "tokens", "sweeps", "unfinished"}
    assert calls[-1] == ("trajectories", 5, 5)
    assert [c for c in calls if c[0] == "fixed points"][-1] == ("fixed points", 5, 5)


def test_collecting_again_does_nothing(tmp_path: Path) -> None:
    run(shared_model("llama"), tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    report = run(shared_model("llama"), tmp_path)
    assert (report.resumed, report.responses, report.forwards) == (5, 0, 0)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"seed": 9}, "seed"),
        ({"max_new_tokens": 13}, "max_new_tokens"),
        ({"block_size": 5}, "block_size"),
        ({"shard_size": 5}, "shard_size"),
        ({"eos_ids": [1]}, "eos_ids"),
        ({"draft_init": "vocabulary", "vocabulary": [1]}, "draft_init"),
        ({"prompts": some_prompts([7, 3, 40, 11, 5], seed=1)}, "prompts_sha256"),
        ({"prompts": PROMPTS[:4]}, "samples"),
        ({"model": "qwen2"}, "model_fingerprint"),
    ],
)
def test_a_folder_of_other_settings_is_refused(changes: dict[str, Any], named: str, tmp_path: Path) -> None:
    run(shared_model("llama"), tmp_path)
    before = shards(tmp_path)
    changes = dict(changes)
    model = shared_model(changes.pop("model", "llama"))
    with pytest.raises(ArtefactError, match=rf"another run: '{named}' differs"):
        run(model, tmp_path, changes.pop("prompts", PROMPTS), **changes)
    assert shards(tmp_path) == before


@pytest.mark.parametrize(
    ("prompts", "changes", "error"),
    [
        ([], {}, DataError),
        (PROMPTS[::-1], {}, DataError),
        ([Prompt(0, "", [])], {}, DataError),
        (PROMPTS, {"block_size": 0}, ConfigError),
    ],
)
def test_bad_input_is_refused_before_anything_is_written(
    prompts: list[Prompt], changes: dict[str, Any], error: type[Exception], tmp_path: Path
) -> None:
    with pytest.raises(error):
        run(shared_model("llama"), tmp_path / "x", prompts, **changes)
    assert not (tmp_path / "x").exists()


def other_response(monkeypatch: pytest.MonkeyPatch, rows: Sequence[int]) -> None:
    """Let the generation report another token than the model's at slot 1 of some samples, as a broken cache would."""
    real = collector_module.greedy_responses

    def responses(backbone: Backbone, prompts: list[list[int]], *rest: Any) -> list[list[int]]:
        found = real(backbone, prompts, *rest)
        for ids, response in zip(prompts, found, strict=True):
            if any(ids == PROMPTS[row].ids for row in rows):
                response[1] = (response[1] + 1) % VOCAB
        return found

    monkeypatch.setattr(collector_module, "greedy_responses", responses)


def test_a_response_that_the_sweep_does_not_confirm_is_dropped_and_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    other_response(monkeypatch, [1])
    report = run(shared_model("llama"), tmp_path)
    assert (report.dropped, report.responses) == (1, 4)
    assert [t.sample for t in TrajectoryReader(tmp_path)] == [0, 2, 3, 4]
    assert list(read_manifest(tmp_path)["shards"][0]["dropped"]) == ["1"]
    assert "Sample 1 is dropped" in caplog.text


def test_a_near_tie_is_kept_as_the_generation_had_it_and_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other_response(monkeypatch, [1])
    monkeypatch.setattr(collector_module, "NEAR_TIE", {torch.float32: 1e9})
    report = run(shared_model("llama"), tmp_path)
    assert (report.dropped, report.responses) == (0, 5)
    assert report.near_ties >= 1
    trajectory = list(TrajectoryReader(tmp_path))[1]
    assert trajectory.response_ids[1] != plain_response(shared_model("llama"), PROMPTS[1].ids, 2)[1]


def test_a_model_that_no_sweep_confirms_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other_response(monkeypatch, range(5))
    with pytest.raises(ModelError, match="other tokens in a sweep than in generation"):
        run(shared_model("llama"), tmp_path)
    assert shards(tmp_path) == {}


KILLED = """
    import os, signal, sys
    from pathlib import Path
    import torch
    torch.set_num_threads(1)
    sys.path.insert(0, sys.argv[1])
    import collecting
    from tiny_models import shared_model

    replaced, real = 0, os.replace
    def replace(*paths):
        global replaced
        replaced += 1
        if replaced == int(sys.argv[3]):
            os.kill(os.getpid(), signal.SIGKILL)
        real(*paths)
    os.replace = replace
    collecting.run(shared_model("llama"), Path(sys.argv[2]), shard_size=1)
"""


# Files are renamed in this order: manifest, shard 0, manifest, shard 1, manifest, shard 2, ...
@pytest.mark.parametrize("rename", [6, 7], ids=["before a shard is renamed", "before the manifest lists it"])
def test_a_killed_collection_goes_on_to_the_same_bytes(rename: int, tmp_path: Path) -> None:
    script = [
        sys.executable,
        "-c",
        textwrap.dedent(KILLED),
        str(Path(__file__).parent),
        str(tmp_path / "killed"),
        str(rename),
    ]
    source = str(Path(collect_module.__file__).parents[2])
    done = subprocess.run(script, capture_output=True, text=True, check=False, env={"PYTHONPATH": source, "PATH": ""})
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert "shard-00002.parquet" + (".tmp" if rename == 6 else "") in shards(tmp_path / "killed")
    assert len(read_manifest(tmp_path / "killed")["shards"]) == 2

    report = run(shared_model("llama"), tmp_path / "killed", shard_size=1)
    run(shared_model("llama"), tmp_path / "whole", shard_size=1)
    assert (report.resumed, report.responses) == (2, 3)
    assert shards(tmp_path / "killed") == shards(tmp_path / "whole")
    assert [t.sample for t in TrajectoryReader(tmp_path / "killed")] == [0, 1, 2, 3, 4]
