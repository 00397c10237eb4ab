from __future__ import annotations

import pytest

from jacobi_forcing.errors import ConfigError
from jacobi_forcing.schedule import by_name, draw_phase, nearest_state, noise_ratios, progressive


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


def test_unknown_schedule_is_refused_with_the_known_ones():
    with pytest.raises(ConfigError, match=r"'linear'.*progressive"):
        by_name("linear")
