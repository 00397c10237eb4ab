from __future__ import annotations

import itertools
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch

from collecting import N, run, shards, some_prompts
from jacobi_forcing.errors import ArtefactError, ConfigError
from jacobi_forcing.packing import PackedRows
from jacobi_forcing.schedule import NoiseSchedule, is_settled, nearest_state
from jacobi_forcing.trajectories.report import CollectReport
from jacobi_forcing.trajectories.store import TrajectoryReader, read_manifest
from tiny_models import shared_model

pytest.importorskip("pyarrow")

LONG = some_prompts([5, 9, 3, 17])


def rows_of(folder: Path, noise: NoiseSchedule) -> PackedRows:
    options: dict[str, Any] = {"schedule_phase": noise.schedule_phase, "t_min": noise.t_min, "t_max": noise.t_max}
    source = TrajectoryReader(folder)
    return PackedRows(
        source, max_length=99, window_size=noise.window_size, schedule=noise.schedule, seed=2, misfits="skip", **options
    )


def both_ways(folder: Path, noise: NoiseSchedule, block_size: int = N) -> tuple[CollectReport, CollectReport]:
    """Collect every state, and what is needed alone; the reports."""
    model, options = shared_model("llama"), {"max_new_tokens": 30, "block_size": block_size}
    whole = run(model, folder / "whole", LONG, **options)
    return whole, run(model, folder / "needed", LONG, needed_only=True, needed=noise, **options)


@pytest.mark.parametrize(
    "noise",
    [
        NoiseSchedule("progressive", 4),
        NoiseSchedule("progressive", 3),
        NoiseSchedule("reverse", 16),
        NoiseSchedule("progressive", 5, 0.3, 0.8),
        NoiseSchedule("progressive", 4, 0.5, 1.0, "random"),
        NoiseSchedule("random", 3),
    ],
    ids=str,
)
@pytest.mark.parametrize("block_size", [4, 7])
def test_packed_rows_are_the_same_to_the_bit_as_with_all_states(
    noise: NoiseSchedule, block_size: int, tmp_path: Path
) -> None:
    whole, needed = both_ways(tmp_path, noise, block_size)
    assert 0 < needed.sweeps < whole.sweeps
    assert needed.sweeps + needed.spared >= whole.sweeps > needed.sweeps
    one, other = rows_of(tmp_path / "whole", noise), rows_of(tmp_path / "needed", noise)
    for epoch in range(4):
        one.set_epoch(epoch)
        other.set_epoch(epoch)
        for index in range(len(one)):
            for name, value in one[index].items():
                assert torch.equal(value, other[index][name]), name


def test_states_that_are_kept_are_the_first_of_the_trajectory_and_its_fixed_point(tmp_path: Path) -> None:
    both_ways(tmp_path, NoiseSchedule("progressive", 4))
    shorter = 0
    for whole, needed in zip(*(TrajectoryReader(tmp_path / name) for name in ("whole", "needed")), strict=True):
        for of_whole, of_needed in zip(whole.states, needed.states, strict=True):
            assert of_needed[:-1] == of_whole[: len(of_needed) - 1]
            assert of_needed[-1] == of_whole[-1]
            shorter += len(of_needed) < len(of_whole)
    assert shorter > 5


@pytest.mark.parametrize("size", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("target", [0.0, 0.0625, 0.1, 0.125, 0.25, 0.3, 0.5, 0.6, 0.75, 0.9375, 1.0])
def test_a_settled_block_needs_no_later_state_and_an_unsettled_one_may(size: int, target: float) -> None:
    # Every way in which the right prefix may grow, sweep by sweep, from 1 to the whole block.
    for count in range(size):
        for inner in itertools.combinations(range(1, size), count):
            rights = [*inner, size]
            ratios = [(size - right) / size for right in rights]
            best = nearest_state(ratios, target)
            for seen, right in enumerate(rights):
                if is_settled(right, size, target):
                    # The fixed point is always at hand.
                    assert best <= seen or ratios[best] == 0
                    break
    # It stops as early as it can: where it goes on, there is a trajectory whose next state is the nearest.
    for right in range(1, size):
        if not is_settled(right, size, target):
            later = [(size - r) / size for r in range(right, size + 1)]
            assert nearest_state(later, target) > 0


def test_ratios_that_may_be_asked_for_are_those_that_are(tmp_path: Path) -> None:
    for noise in (
        NoiseSchedule("progressive", 4, 0.2, 0.9),
        NoiseSchedule("reverse", 3),
        NoiseSchedule("random", 3),
        NoiseSchedule("progressive", 3, schedule_phase="random"),
    ):
        for block in range(5):
            asked = {noise.targets(5, 0, epoch, sample)[block] for epoch in range(12) for sample in range(12)}
            assert asked == set(noise.possible(block)), noise


def test_the_manifest_says_so_and_another_schedule_is_refused(tmp_path: Path) -> None:
    noise = NoiseSchedule("progressive", 4)
    both_ways(tmp_path, noise)
    assert read_manifest(tmp_path / "needed")["settings"]["needed_only"]["window_size"] == 4
    assert read_manifest(tmp_path / "whole")["settings"]["needed_only"] is None
    for change, named in (
        ({"window_size": 5}, "window_size 4; expected: window_size 5"),
        ({"schedule": "reverse"}, "schedule progressive; expected: schedule reverse"),
        ({"t_max": 0.5}, r"t_max 1\.0; expected: t_max 0\.5"),
        ({"schedule_phase": "random"}, "schedule_phase fixed; expected: schedule_phase random"),
    ):
        options = {"max_length": 99, "window_size": 4, **change}
        with pytest.raises(ArtefactError, match=rf"another schedule asks for.*seen: {named}.*collect again"):
            PackedRows(TrajectoryReader(tmp_path / "needed"), **options)
        PackedRows(TrajectoryReader(tmp_path / "whole"), **options)
        PackedRows(TrajectoryReader(tmp_path / "needed"), states="on_policy", **options)


def test_a_folder_of_all_states_is_not_gone_on_with_by_needed_only(tmp_path: Path) -> None:
    model = shared_model("llama")
    run(model, tmp_path, LONG)
    with pytest.raises(ArtefactError, match="'needed_only' differs"):
        run(model, tmp_path, LONG, needed_only=True, needed=NoiseSchedule())
    with pytest.raises(ConfigError, match="'needed_only' needs the schedule"):
        run(model, tmp_path / "none", LONG, needed_only=True)


def test_responses_without_states_are_refused_by_rows_of_stored_states(tmp_path: Path) -> None:
    run(shared_model("llama"), tmp_path, LONG, states=False)
    with pytest.raises(ArtefactError, match=r"without the states of their blocks.*on_policy"):
        PackedRows(TrajectoryReader(tmp_path), max_length=99, window_size=2)


KILLED = """
    import os, signal, sys
    from pathlib import Path
    sys.path.insert(0, sys.argv[1])
    import test_needed_only
    from jacobi_forcing.trajectories import collect

    real = collect.TrajectoryWriter.write_shard
    def write_shard(self, shard, *rest):
        if shard == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return real(self, shard, *rest)
    collect.TrajectoryWriter.write_shard = write_shard
    test_needed_only.needed_run(Path(sys.argv[2]))
"""


def needed_run(folder: Path) -> CollectReport:
    noise = NoiseSchedule("progressive", 4)
    return run(shared_model("llama"), folder, LONG, shard_size=1, needed_only=True, needed=noise)


def test_killed_in_the_middle_it_goes_on_to_the_same_bytes(tmp_path: Path) -> None:
    script = [sys.executable, "-c", textwrap.dedent(KILLED), str(Path(__file__).parent), str(tmp_path / "killed")]
    done = subprocess.run(script, capture_output=True, text=True, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert needed_run(tmp_path / "killed").resumed == 2
    needed_run(tmp_path / "whole")
    assert shards(tmp_path / "killed") == shards(tmp_path / "whole")
