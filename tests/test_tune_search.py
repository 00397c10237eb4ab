"""The parts of a search that ask no model: halving, surfaces, the journal."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Sequence
from pathlib import Path

import pytest

from jacobi_forcing.bench.halving import FINALISTS, Rung, plan, search
from jacobi_forcing.bench.journal import Journal, rate
from jacobi_forcing.bench.surface import fit_surface
from jacobi_forcing.errors import ArtefactError
from result_schemas import assert_valid

HEAD = {"settings": [{"decoder": "ar", "block_size": 16}], "batch_size": 1, "max_new_tokens": 8, "prompts": [0, 1]}
CALL = {"tokens": 8, "forwards": 4, "seconds": 2.0, "of": 1, "near_ties": 0, "faults": 0}


# Halving ----------------------------------------------------------------------------------------------------------


class Scripted:
    """Settings of known speed, a clock with noise, and a count of the runs."""

    def __init__(self, speeds: Sequence[float], noise: float, seed: int, broken: Sequence[int] = ()) -> None:
        self.speeds, self.noise, self.broken = speeds, noise, broken
        self._random = random.Random(seed)
        self.seen: dict[tuple[int, int, int], float] = {}

    def measure(self, settings: Sequence[int], batches: int, repeats: int) -> None:
        for place in itertools.product(settings, range(batches), range(repeats)):
            if place not in self.seen:
                self.seen[place] = self.speeds[place[0]] * self._random.uniform(1 - self.noise, 1 + self.noise)

    def score(self, setting: int, batches: int, repeats: int) -> float | None:
        if setting in self.broken:
            return None
        found = [self.seen[setting, batch, repeat] for batch in range(batches) for repeat in range(repeats)]
        return sum(found) / len(found)


def test_the_plan_halves_settings_and_doubles_batches() -> None:
    assert plan(32, 16, 3) == [Rung(2, 1, 16), Rung(4, 1, 8), Rung(8, 1, 4), Rung(16, 3, 1)]
    assert plan(3, 5, 2) == [Rung(5, 2, 1)]
    assert plan(1, 1, 1) == [Rung(1, 1, 1)]
    for settings, batches in itertools.product((5, 17, 61), (1, 2, 3, 16)):
        rungs = plan(settings, batches, 3)
        assert [rung.batches for rung in rungs] == sorted(rung.batches for rung in rungs)
        assert rungs[-1].batches == batches
        assert all(FINALISTS <= after.keep <= before.keep for before, after in itertools.pairwise(rungs[:-1]))


@pytest.mark.parametrize("seed", range(5))
def test_halving_picks_the_best_in_far_fewer_runs(seed: int) -> None:
    speeds = [100 - 2.5 * abs(17 - setting) for setting in range(32)]
    clock = Scripted(speeds, 0.03, seed)
    steps = search(range(32), plan(32, 16, 3), clock.measure, clock.score)
    assert abs(steps[-1].left[0] - 17) <= 1
    assert speeds[steps[-1].left[0]] >= 0.97 * max(speeds)
    assert len(clock.seen) < 0.4 * 32 * 16 * 3


def test_without_noise_the_best_is_found_and_every_step_is_told() -> None:
    speeds = [1.0, 5.0, 2.0, 9.0, 3.0, 4.0, 8.0, 7.0, 6.0]
    clock = Scripted(speeds, 0.0, 0)
    steps = search(range(9), plan(9, 4, 1), clock.measure, clock.score)
    assert steps[0].left == [3, 6, 7, 8, 1]
    assert steps[-1].left == [3, 6, 7, 8]
    assert steps[-1].measured == steps[-2].left


def test_settings_close_to_the_leader_are_not_dropped() -> None:
    clock = Scripted([100.0] * 10 + [50.0] * 10, 0.0, 0)
    first, *_ = search(range(20), [Rung(1, 1, 4), Rung(2, 1, 1)], clock.measure, clock.score)
    assert sorted(first.left) == list(range(10))


def test_a_setting_that_is_wrong_is_dropped_at_once_however_fast() -> None:
    clock = Scripted([1.0, 2.0, 3.0, 99.0, 4.0], 0.0, 0, broken=[3])
    steps = search(range(5), [Rung(1, 1, 4), Rung(2, 1, 1)], clock.measure, clock.score)
    assert steps[-1].left[0] == 4
    assert all(3 not in step.left for step in steps)
    none = Scripted([1.0, 2.0], 0.0, 0, broken=[0, 1])
    assert search(range(2), plan(2, 1, 1), none.measure, none.score)[-1].left == []


# Surface ----------------------------------------------------------------------------------------------------------


def test_the_surface_recovers_a_known_optimum() -> None:
    def height(size: int, lines: int) -> float:
        x = {8: 3, 16: 4, 32: 5, 64: 6, 128: 7}[size]
        return 500 - 20 * (x - 5.4) ** 2 - 3 * (lines - 2.5) ** 2 + 1.5 * (x - 5.4) * (lines - 2.5)

    points = [(size, lines, height(size, lines)) for size in (8, 16, 32, 64, 128) for lines in (0, 1, 2, 4, 8)]
    surface = fit_surface(points)
    assert surface is not None
    assert surface.fit == pytest.approx(1.0)
    assert all(surface.at(size, lines) == pytest.approx(rate) for size, lines, rate in points)
    size, lines, top = surface.optimum
    assert size == pytest.approx(2**5.4, rel=0.02)
    assert lines == pytest.approx(2.5, abs=0.05)
    assert top == pytest.approx(500, rel=1e-3)


def test_the_optimum_stays_within_what_was_measured() -> None:
    rising = [(size, lines, size + lines) for size in (8, 16, 32) for lines in (0, 2, 4)]
    surface = fit_surface(rising)
    assert surface is not None
    assert surface.optimum[:2] == (32.0, 4.0)


def test_an_axis_with_few_values_has_no_curvature() -> None:
    line = fit_surface([(8, 0, 10.0), (16, 0, 12.0), (32, 0, 12.0)])
    assert line is not None and line.terms == [(0, 0), (1, 0), (2, 0)]
    assert line.optimum[1] == 0
    flat = fit_surface([(8, 2, 10.0)])
    assert flat is not None and flat.optimum == pytest.approx((8, 2, 10))
    corners = [(8, 0, 1.0), (8, 4, 2.0), (16, 0, 3.0), (16, 4, 4.0)]
    four = fit_surface(corners)
    assert four is not None and len(four.terms) == 4
    assert fit_surface(corners[:3]) is None
    assert fit_surface([]) is None


# Journal ----------------------------------------------------------------------------------------------------------


def test_a_journal_goes_on_where_a_kill_left_it(tmp_path: Path) -> None:
    path = tmp_path / "calls.jsonl"
    journal = Journal(path, HEAD)
    journal.add("short", (0, 1, 2), {**CALL, "ids": [[1, 2]]})
    journal.add("full", (3, 0, 0), CALL)
    for line in path.read_text().splitlines():
        assert_valid(json.loads(line))
    whole = path.read_text()
    path.write_text(whole + '{"schema": "jforce.tune-call/1", "sea')
    again = Journal(path, HEAD)
    assert again.of("short").keys() == {(0, 1, 2)} and again.of("full").keys() == {(3, 0, 0)}
    assert again.of("short")[0, 1, 2]["ids"] == [[1, 2]]
    assert path.read_text() == whole


def test_a_journal_of_another_search_or_a_damaged_one_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "calls.jsonl"
    Journal(path, HEAD)
    with pytest.raises(ArtefactError, match=r"another search; seen: other max_new_tokens; .*--fresh"):
        Journal(path, {**HEAD, "max_new_tokens": 9})
    path.write_text(path.read_text() + "oops\n")
    with pytest.raises(ArtefactError, match="is damaged"):
        Journal(path, HEAD)


def test_a_rate_is_all_tokens_over_the_sum_of_median_seconds() -> None:
    calls = {
        (1, batch, repeat): {"tokens": 10 * (batch + 1), "seconds": seconds}
        for (batch, repeat), seconds in {(0, 0): 1.0, (0, 1): 100.0, (0, 2): 2.0, (1, 0): 3.0}.items()
    }
    assert rate(calls, 1, itertools.product(range(2), range(3))) == pytest.approx((10 + 20) / (2 + 3))
    assert rate(calls, 1, [(0, 0)]) == pytest.approx(10.0)
    assert rate(calls, 2, [(0, 0)]) is None
