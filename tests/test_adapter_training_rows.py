"""Texts for a gated adapter, and the lines that are drawn in them."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from jacobi_forcing.adapter import GatedAdapter
from jacobi_forcing.errors import ConfigError, DataError
from jacobi_forcing.training.adapter_config import AdapterConfig
from jacobi_forcing.training.adapter_lines import CleanPass
from jacobi_forcing.training.adapter_rows import LineCollator, LineRows, Response
from jacobi_forcing.training.adapter_trainer import AdapterTrainer
from jacobi_forcing.trajectories.trajectory import Trajectory
from tiny_models import tiny_model

EOS = 60


def test_what_is_drawn_depends_on_seed_epoch_and_text_alone() -> None:
    responses = [Response([1, 2, 3], list(range(20)), True)] * 2
    shared = {"block_size": 4, "lines": 8, "max_sweeps": 3, "max_length": 64}
    rows = LineRows(responses, **shared, seed=3)
    first = rows[0]
    again = LineRows(responses[:1], **shared, seed=3)[0]
    assert all(torch.equal(first[name], again[name]) for name in first)
    rows.set_epoch(1)
    later = rows[0]
    for other in (later, rows[1], LineRows(responses, **shared, seed=4)[0]):
        assert not torch.equal(other["fill"], first["fill"])
    # Every stretch of the response has its line, every age its share; guesses are tokens of the prompt.
    starts = first["starts"].sort().values
    assert starts[0] >= 2
    assert starts[-1] <= 21
    assert set((starts[1:] - starts[:-1]).tolist()) <= {2, 3}
    assert first["sweeps"].tolist() == [3, 3, 2, 2, 1, 1, 0, 0]
    assert set(first["fill"].flatten().tolist()) == {1, 2, 3}


def trajectory() -> Trajectory:
    """A prompt of 3 tokens and a response of 4, 4 and 2; all tokens of wrong guesses are 30 and more."""
    states = [
        [[10, 31, 32, 33], [10, 11, 34, 35], [10, 11, 12, 13]],
        [[14, 41, 42, 43], [14, 15, 16, 17]],
        [[18, 51], [18, EOS]],
    ]
    return Trajectory(0, [1, 2, 3], [*range(10, 19), EOS], True, 4, states)


def test_stored_states_are_lines_behind_the_token_before_their_block() -> None:
    rows = LineRows([trajectory()], block_size=4, lines=6, max_sweeps=3, max_length=64, stored=True)
    seen = set()
    for epoch in range(8):
        rows.set_epoch(epoch)
        item = rows[0]
        assert item["fill"].shape == (6, 1, 4)
        assert item["sweeps"].tolist() == [0] * 6
        assert item["starts"].tolist() == [2, 2, 6, 6, 10, 10]
        seen |= {
            (start, *line[0][1 : 4 if start < 10 else 3])
            for start, line in zip(item["starts"].tolist(), item["fill"].tolist(), strict=True)
        }
    # Slot 0 is the text's own; the last state of a block, which is right, is not among them.
    assert seen == {(2, 10, 31, 32), (2, 10, 11, 34), (6, 14, 41, 42), (10, 18, 51)}
    cut = LineRows([trajectory()], block_size=4, lines=2, max_sweeps=3, max_length=8, stored=True)[0]
    assert (cut["starts"].tolist(), int(cut["last"])) == ([2, 6], 7)


def test_stored_states_are_what_a_step_learns_from(tmp_path: Path) -> None:
    config = AdapterConfig(
        output_dir=str(tmp_path), use_cpu=True, rank=2, block_size=4, lines_per_response=6, states="stored"
    )
    trainer = AdapterTrainer(tiny_model("llama"), config, [trajectory()])
    item = trainer.train_dataset[0]
    swept = []
    lines = CleanPass.lines
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CleanPass, "lines", lambda *args: swept.append(args[2]) or lines(*args))
        trainer.losses(LineCollator()([item])).total.backward()
    (state,) = swept
    assert torch.equal(state.start[0], item["starts"])
    assert torch.equal(state.ids[0, :, 1:], item["fill"][:, 0, 1:])
    assert state.ids[0, :, 0].tolist() == [3, 3, 13, 13, 17, 17]
    assert any(weight.grad.abs().max() > 0 for weight in trainer.adapter.parameters())


def test_trajectories_without_states_or_of_other_blocks_are_refused() -> None:
    shared = {"lines": 2, "max_sweeps": 0, "max_length": 64, "stored": True}
    with pytest.raises(DataError, match=r"no states to train on.*block_size 4.*blocks of 8"):
        LineRows([trajectory()], block_size=8, **shared)
    alone = dataclasses.replace(trajectory(), states=[block[-1:] for block in trajectory().states])
    for response in (alone, Response([1, 2], [3, 4], True)):
        with pytest.raises(DataError, match="no states to train on"):
            LineRows([response], block_size=4, **shared)


def test_a_text_that_is_cut_has_no_end() -> None:
    shared = {"block_size": 4, "lines": 2, "max_sweeps": 1}
    text = Response([1, 2, 3], [4, 5, 6, EOS], True)
    assert int(LineRows([text], **shared, max_length=7)[0]["taught"]) == 5
    cut = LineRows([text], **shared, max_length=6)[0]
    assert (cut["input_ids"].tolist(), int(cut["last"]), int(cut["taught"])) == ([1, 2, 3, 4, 5, 6], 5, 5)
    with pytest.raises(DataError, match="nothing to learn from"):
        LineRows([text], **shared, max_length=3)
    with pytest.raises(DataError, match="nothing to train on"):
        LineRows([text], **shared, max_length=3, misfits="skip")


def test_what_does_not_fit_is_refused(tmp_path: Path) -> None:
    def settings(**changes: Any) -> AdapterConfig:
        return AdapterConfig(output_dir=str(tmp_path), use_cpu=True, **changes)

    responses = [Response([1, 2], [3, EOS], True)]
    with pytest.raises(DataError, match="token id that the model has not; seen: 60"):
        AdapterTrainer(tiny_model("llama", vocab_size=50), settings(), responses)
    model = tiny_model("llama")
    GatedAdapter.attach(model, rank=3)
    with pytest.raises(ConfigError, match=r"another rank.*seen: 3; expected: 5"):
        AdapterTrainer(model, settings(rank=5), responses)
    for name, value in (("block_size", 1), ("states", "some"), ("gradient_checkpointing", True)):
        with pytest.raises(ConfigError, match=name):
            settings(**{name: value})
