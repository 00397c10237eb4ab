"""Texts for a gated adapter, and the lines that are drawn in them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from jacobi_forcing.adapter import GatedAdapter
from jacobi_forcing.errors import ConfigError, DataError
from jacobi_forcing.training.adapter_config import AdapterConfig
from jacobi_forcing.training.adapter_rows import LineRows, Response
from jacobi_forcing.training.adapter_trainer import AdapterTrainer
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
