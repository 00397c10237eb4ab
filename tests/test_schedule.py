from __future__ import annotations

import itertools

import pytest

from jacobi_forcing.errors import ConfigError
from jacobi_forcing.schedule import draw_phase, nearest_state, noise_ratios, progressive, targets


def test_progressive_targets_are_those_of_equation_7():
    assert [progressive(block, 4) for block in range(9)] == [0, 0.25, 0.5, 0.75, 0, 0.25, 0.5, 0.75, 0]


def test_phase_shifts_the_cycle():
    assert [progressive(block, 4, phase=3) for block in range(5)] == [0.75, 0, 0.25, 0.5, 0.75]


def test_window_of_one_block_has_no_noise():
    assert [progressive(block, 1) for block in range(3)] == [0, 0, 0]


def test_noise_ratio_counts_from_the_first_mismatch():
    states = [[5, 9, 7, 8], [5, 6, 9, 8], [5, 6, 7, 8]]
    assert noise_ratios(states) == [0.75, 0.5, 0]


@pytest.mark.parametrize(("target", "state"), [(0.0, 3), (0.2, 2), (0.45, 1), (0.75, 0), (0.99, 0)])
def test_state_with_the_nearest_ratio_is_taken(target, state):
    assert nearest_state([0.75, 0.5, 0.25, 0.0], target) == state


@pytest.mark.parametrize(
    ("ratios", "target", "state"), [([0.75, 0.5, 0.0], 0.625, 0), ([0.4, 0.2, 0.0], 0.3, 0), ([0.8, 0.4], 0.6, 0)]
)
def test_of_two_equally_near_states_the_noisier_is_taken(ratios, target, state):
    assert nearest_state(ratios, target) == state


def test_of_two_equally_noisy_states_the_earlier_is_taken():
    assert nearest_state([0.75, 0.5, 0.5, 0.5, 0.0], 0.5) == 1


def test_one_state_is_all_there_is_to_take():
    assert nearest_state([0.0], 0.9375) == 0


def test_random_phase_depends_on_seed_epoch_and_sample_alone():
    # Typed in, so that a change of Python or machine that would break a resumed run is seen.
    assert [draw_phase(0, epoch, sample, 16) for epoch in (0, 1) for sample in (0, 1, 2)] == [9, 1, 12, 9, 7, 14]
    assert draw_phase(0, 1, 2, 16) == draw_phase(0, 1, 2, 16)


def test_random_phases_cover_the_whole_cycle():
    assert {draw_phase(3, 0, sample, 8) for sample in range(200)} == set(range(8))


def test_reverse_runs_the_cycle_backwards():
    assert targets("reverse", 9, 4) == [0.75, 0.5, 0.25, 0, 0.75, 0.5, 0.25, 0, 0.75]
    assert targets("reverse", 3, 4, phase=2) == [0.25, 0, 0.75]
    assert targets("progressive", 5, 4) == [0, 0.25, 0.5, 0.75, 0]


def test_random_draws_every_ratio_of_a_cycle_alike_and_from_the_seed_alone():
    drawn = targets("random", 4000, 4, seed="a")
    assert drawn == targets("random", 4000, 4, seed="a") != targets("random", 4000, 4, seed="b")
    shares = {ratio: drawn.count(ratio) / 4000 for ratio in (0, 0.25, 0.5, 0.75)}
    assert sum(shares.values()) == 1
    assert all(abs(share - 0.25) < 0.03 for share in shares.values())
    # Blocks next to one another have nothing to do with each other.
    assert len(set(itertools.pairwise(drawn))) == 16


def test_ratios_are_stretched_between_their_ends():
    assert targets("progressive", 4, 4, t_min=0.5, t_max=1.0) == [0.5, 0.625, 0.75, 0.875]
    assert targets("reverse", 2, 2, t_min=0.2, t_max=0.2) == [0.2, 0.2]


@pytest.mark.parametrize(("t_min", "t_max"), [(0.6, 0.5), (-0.1, 1.0), (0.0, 1.1)])
def test_ends_that_are_no_shares_are_refused(t_min, t_max):
    with pytest.raises(ConfigError, match="0 <= t_min <= t_max <= 1"):
        targets("progressive", 4, 4, t_min=t_min, t_max=t_max)


def test_unknown_schedule_is_refused_with_the_known_ones():
    with pytest.raises(ConfigError, match=r"'linear'.*progressive, random, reverse"):
        targets("linear", 4, 4)
