from __future__ import annotations

import pytest
import torch
from torch.utils.data import DataLoader

from jacobi_forcing.errors import ConfigError, DataError
from jacobi_forcing.packing import PackedRows, first_fit
from jacobi_forcing.schedule import draw_phase
from jacobi_forcing.tags import Tags, layout
from jacobi_forcing.trajectories.store import Trajectory
from reference_losses import random_trajectory

# Prompt 10 11, response 20 21 22 | 23 24 EOS(9), block size 3; each block starts wrong and becomes right.
EXAMPLE = Trajectory(
    sample=4,
    prompt_ids=[10, 11],
    response_ids=[20, 21, 22, 23, 9],
    finished=True,
    block_size=3,
    states=[[[20, 1, 2], [20, 21, 3], [20, 21, 22]], [[23, 5], [23, 9]]],
)


def test_row_is_prompt_then_noisy_and_clean_of_each_block():
    row = PackedRows([EXAMPLE], max_length=12, window_size=2)[0]
    tags = Tags.of(row["tags"])
    #                                     prompt  k_0         c_0         k_1    c_1
    assert row["input_ids"].tolist() == [10, 11, 20, 21, 22, 20, 21, 22, 23, 5, 23, 9]
    assert tags.sample.tolist() == [0] * 12
    assert tags.kind.tolist() == [0, 0, 1, 1, 1, 2, 2, 2, 1, 1, 2, 2]
    assert tags.block.tolist() == [-1, -1, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1]
    assert tags.offset.tolist() == [-1, -1, 0, 1, 2, 0, 1, 2, 0, 1, 0, 1]
    assert tags.position.tolist() == [0, 1, 2, 3, 4, 2, 3, 4, 5, 6, 5, 6]
    assert tags.window.tolist() == [-1, -1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]
    assert tags.ends.tolist() == [0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0, 1]
    assert row["noise_ratios"].tolist() == [0.0, 0.5]


def test_positions_and_samples_start_anew_for_each_sample_of_a_row():
    row = PackedRows([EXAMPLE, EXAMPLE], max_length=24, window_size=2)[0]
    tags = Tags.of(row["tags"])
    assert tags.position.tolist() == [0, 1, 2, 3, 4, 2, 3, 4, 5, 6, 5, 6] * 2
    assert tags.sample.tolist() == [0] * 12 + [1] * 12


def test_unfinished_response_ends_nowhere():
    assert not Tags.of(layout(2, 5, 3, False)[0]).ends.any()


def test_noisy_state_follows_the_schedule_block_by_block():
    rows = PackedRows([random_trajectory(0, 3, 40, 4)], max_length=100, window_size=4)
    assert rows[0]["noise_ratios"].tolist() == [0, 0.25, 0.5, 0.75, 0, 0.25, 0.5, 0.75, 0, 0.25]


def test_window_column_counts_cycles():
    tags = Tags.of(PackedRows([random_trajectory(0, 3, 12, 2)], max_length=40, window_size=4)[0]["tags"])
    assert [int(tags.window[tags.block == block].unique()) for block in range(6)] == [0, 0, 0, 0, 1, 1]


def test_random_phase_changes_states_between_epochs_and_nothing_else():
    trajectories = [random_trajectory(sample, 3, 16, 4) for sample in range(6)]
    rows = PackedRows(trajectories, max_length=80, window_size=4, schedule_phase="random", seed=5)
    epochs = []
    for epoch in (0, 1, 0):
        rows.set_epoch(epoch)
        epochs.append([rows[index] for index in range(len(rows))])
    for one, other, again in zip(*epochs, strict=True):
        assert torch.equal(one["input_ids"], again["input_ids"])
        assert torch.equal(one["tags"], again["tags"])
        assert one["input_ids"].shape == other["input_ids"].shape
    assert any(not torch.equal(one["input_ids"], other["input_ids"]) for one, other, _ in zip(*epochs, strict=True))


def test_random_phase_of_a_sample_starts_the_cycle_there():
    rows = PackedRows([random_trajectory(7, 3, 16, 4)], max_length=80, window_size=4, schedule_phase="random", seed=5)
    rows.set_epoch(2)
    phase = draw_phase(5, 2, 7, 4)
    assert rows[0]["noise_ratios"].tolist() == [((block + phase) % 4) / 4 for block in range(4)]
    tags = Tags.of(rows[0]["tags"])
    assert [int(tags.window[tags.block == block][0]) for block in range(4)] == [(b + phase) // 4 for b in range(4)]


def test_workers_that_outlive_an_epoch_see_the_next_one():
    rows = PackedRows([random_trajectory(7, 3, 16, 4)], max_length=80, window_size=4, schedule_phase="random", seed=5)
    loader = DataLoader(rows, batch_size=None, num_workers=1, persistent_workers=True)
    for epoch in range(3):
        rows.set_epoch(epoch)
        (from_worker,) = loader
        assert torch.equal(from_worker["input_ids"], rows[0]["input_ids"])


def test_items_go_into_the_first_row_with_room():
    assert first_fit([5, 6, 3, 4, 2, 1], 10) == [[0, 2, 4], [1, 3], [5]]
    assert first_fit([], 10) == []


def test_rows_are_the_same_each_time_and_hold_every_sample_once():
    trajectories = [random_trajectory(sample, 2 + sample % 5, 3 + sample % 11, 4) for sample in range(50)]
    rows = PackedRows(trajectories, max_length=64, window_size=4)
    assert rows.lengths == PackedRows(trajectories, max_length=64, window_size=4).lengths
    assert rows.lengths == [len(rows[index]["input_ids"]) for index in range(len(rows))]
    assert max(rows.lengths) <= 64
    counts = rows.counts
    assert (counts.samples, counts.rows, counts.cut, counts.skipped) == (50, len(rows), 0, 0)
    assert counts.tokens == sum(rows.lengths) == sum(len(t.prompt_ids) + 2 * len(t.response_ids) for t in trajectories)


def test_sample_longer_than_a_row_is_cut_at_a_block_boundary_and_counted():
    rows = PackedRows([random_trajectory(0, 3, 11, 4)], max_length=3 + 2 * 9, window_size=2)
    tags = Tags.of(rows[0]["tags"])
    assert rows.counts.cut == 1
    assert len(rows[0]["input_ids"]) == 3 + 2 * 8
    assert tags.block.max() == 1
    # The text goes on behind the cut, so its last slot still has something to predict.
    assert not tags.ends.any()


def test_sample_whose_prompt_and_first_block_do_not_fit_is_an_error_that_says_why():
    with pytest.raises(DataError, match=r"Sample 0 .*nothing could be learnt.*20 tokens \(prompt 12.*max_length = 19"):
        PackedRows([random_trajectory(0, 12, 11, 4)], max_length=19, window_size=2)


def test_sample_that_does_not_fit_is_skipped_and_counted_if_asked():
    trajectories = [random_trajectory(0, 12, 11, 4), random_trajectory(1, 3, 5, 4)]
    rows = PackedRows(trajectories, max_length=19, window_size=2, misfits="skip")
    assert (rows.counts.samples, rows.counts.skipped) == (1, 1)


def test_sample_without_a_response_is_an_error_that_says_why():
    empty = random_trajectory(3, 5, 4, 4)
    object.__setattr__(empty, "response_ids", [])
    with pytest.raises(DataError, match="Sample 3 has nothing to learn from"):
        PackedRows([empty], max_length=64, window_size=2)


def test_nothing_to_train_on_is_an_error_that_says_why():
    with pytest.raises(DataError, match="nothing to train on"):
        PackedRows([], max_length=64, window_size=2)
    with pytest.raises(DataError, match=r"0 usable trajectories, 1 skipped"):
        PackedRows([random_trajectory(0, 12, 11, 4)], max_length=19, window_size=2, misfits="skip")


def test_block_sizes_do_not_mix():
    with pytest.raises(DataError, match=r"Sample 1 has another block size.*seen: 3; expected: 4"):
        PackedRows([random_trajectory(0, 3, 8, 4), random_trajectory(1, 3, 8, 3)], max_length=64, window_size=2)


@pytest.mark.parametrize(
    "wrong",
    [
        {"window_size": 0},
        {"max_length": 0},
        {"schedule": "linear"},
        {"t_min": 0.9, "t_max": 0.1},
        {"schedule_phase": "late"},
        {"misfits": "drop"},
    ],
)
def test_settings_out_of_range_are_refused(wrong):
    with pytest.raises(ConfigError):
        PackedRows([random_trajectory(0, 3, 8, 4)], **{"max_length": 64, "window_size": 2, **wrong})


def test_each_schedule_takes_the_states_it_asks_for():
    trajectory = random_trajectory(3, 2, 16, 4)

    def ratios(**options):
        rows = PackedRows([trajectory], max_length=64, window_size=4, **options)
        return rows[0]["noise_ratios"].tolist()

    assert ratios() == [0, 0.25, 0.5, 0.75]
    assert ratios(schedule="reverse") == [0.75, 0.5, 0.25, 0]
    assert ratios(t_min=0.75, t_max=0.75) == [0.75] * 4
    rows = PackedRows([trajectory], max_length=64, window_size=4, schedule="random", seed=1)
    drawn = []
    for epoch in range(6):
        rows.set_epoch(epoch)
        drawn.append(tuple(rows[0]["noise_ratios"].tolist()))
        assert drawn[-1] == tuple(rows[0]["noise_ratios"].tolist())
    assert len(set(drawn)) > 3
