"""Whoever collects, the folder comes out the same, and no finished shard is collected again."""

from __future__ import annotations

import dataclasses
import os
import pickle
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

import several
from collecting import PROMPTS, run, shards
from jacobi_forcing.errors import ArtefactError, ConfigError, DataError
from jacobi_forcing.trajectories import collect as collect_module
from jacobi_forcing.trajectories.executors import ShardResult, TorchrunExecutor, each_once
from jacobi_forcing.trajectories.ray_executor import _Actor
from jacobi_forcing.trajectories.report import CollectReport
from jacobi_forcing.trajectories.store import TrajectoryReader, read_manifest
from several import Doomed, shared_backbone, torchrun
from tiny_models import shared_model


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What one process collects."""
    folder = tmp_path_factory.mktemp("alone")
    run(shared_model("llama"), folder, shard_size=1)
    return folder


@pytest.mark.timeout(300)
def test_two_processes_of_which_one_is_killed_and_started_anew_end_with_the_single_process_shards(
    alone: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "out"
    killed = torchrun(tmp_path, several.__file__, str(tmp_path), "killed")
    assert killed.returncode != 0
    assert (tmp_path / "died").exists()
    # What the other one had finished, and a part that the main process had not yet taken.
    before = len(read_manifest(folder)["shards"])
    done = torchrun(tmp_path, several.__file__, str(tmp_path), "whole")
    assert done.returncode == 0, done.stderr[-3000:]
    assert shards(folder) == shards(alone)
    assert before < len(PROMPTS)
    assert read_manifest(folder)["complete"]


def a_result(folder: Path, shard: int) -> ShardResult:
    trajectory = list(TrajectoryReader(folder))[shard]
    return ShardResult(shard, [trajectory], {9: "why"}, {8: "finished"}, CollectReport(responses=1, blocks=4))


def test_what_another_process_had_finished_is_taken_over_once(alone: Path, tmp_path: Path) -> None:
    ours, theirs = TorchrunExecutor(tmp_path, "ours"), TorchrunExecutor(tmp_path, "theirs")
    ours._leave(a_result(alone, 1))
    ours._leave(a_result(alone, 2))
    theirs._leave(a_result(alone, 3))
    (tmp_path / "part-00004.json").write_text("{", encoding="utf-8")
    found = list(ours.left_over([(1, [1]), (3, [3]), (4, [4])]))
    # Shard 2 is on disk already, 3 is another run's, 4 is half written.
    assert found == [a_result(alone, 1)]
    assert not list(tmp_path.iterdir())


def test_a_shard_that_comes_twice_or_never_is_an_error(alone: Path) -> None:
    one = a_result(alone, 1)
    assert list(each_once(iter([one]), [(1, [1])])) == [one]
    for results, message in (([one, one], "collected twice"), ([], "not been collected")):
        with pytest.raises(ArtefactError, match=message):
            list(each_once(iter(results), [(1, [1])]))


def test_ray_needs_a_way_to_make_the_model_anew(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="make_backbone"):
        run(shared_model("llama"), tmp_path, executor="ray")


@pytest.fixture
def ray_here(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Ray on this machine with two cores, quiet and without network; its actors see these tests."""
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    paths = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "src")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))
    ray = pytest.importorskip("ray", reason="the extra ray is not installed")
    options = {"include_dashboard": False, "object_store_memory": 80 * 2**20, "log_to_driver": False}
    ray.init(num_cpus=2, logging_level="error", **options)
    yield ray
    ray.shutdown()


@pytest.mark.timeout(300)
def test_two_actors_of_which_one_is_killed_end_with_the_single_process_shards(
    alone: Path, tmp_path: Path, ray_here: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def doomed(work: Any, config: Any, make_backbone: Any) -> Doomed:
        return Doomed(dataclasses.replace(work, make_backbone=make_backbone), tmp_path)

    monkeypatch.setattr(collect_module, "_portable", doomed)
    told: list[tuple[str, int, int]] = []
    changes = {"executor": "ray", "workers": 2, "shard_size": 1, "on_progress": lambda *news: told.append(news)}
    report = run(shared_model("llama"), tmp_path / "out", make_backbone=shared_backbone, **changes)
    assert shards(tmp_path / "out") == shards(alone)
    assert report.responses == len(PROMPTS)
    assert told[-1] == ("trajectories", len(PROMPTS), len(PROMPTS))
    begun = Counter(int(line) for line in (tmp_path / "begun").read_text().split())
    assert (tmp_path / "died").exists()
    assert begun[1] == 2
    assert all(begun[shard] == 1 for shard in range(len(PROMPTS)) if shard != 1)


class Refusing:
    def __call__(self, *_: Any) -> ShardResult:
        raise DataError("There is no such thing")


def test_an_error_in_an_actor_comes_back_as_what_it_is() -> None:
    ray = pytest.importorskip("ray", reason="the extra ray is not installed")
    batch = {"shard": [3], "samples": [[6, 7]]}
    (row,) = _Actor(ray.cloudpickle.dumps(Refusing()))(batch)["result"]
    error = pickle.loads(row).error()
    assert isinstance(error, DataError)
    assert str(error) == str(DataError("There is no such thing"))
