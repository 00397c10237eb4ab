"""Candidates out of the n-gram pool: verified beside the draft in one forward, never changing the text."""

from __future__ import annotations

import pytest
import torch

from decoding import ours, prompt, reference, told_row
from jacobi_forcing import DecodeConfig
from jacobi_forcing.backbone import Backbone
from jacobi_forcing.decode.engine import make_row, run, sweeps
from jacobi_forcing.decode.rows import Row
from jacobi_forcing.errors import ConfigError
from test_decode_cache import check
from tiny_models import ARCHITECTURES, shared_model

each_architecture = pytest.mark.parametrize("arch", ARCHITECTURES)
recyclers = pytest.mark.parametrize("decoder", ["recycle", "multiblock"])


def knowing_row(arch: str, config: DecodeConfig, length: int = 11, budget: int = 40) -> Row:
    """A row whose drafts are always wrong and whose pool has the true text: only candidates are ever accepted."""
    text = reference(arch, length)
    row = told_row(prompt(length), text, config, budget, wrong=1.0)
    assert row.pool is not None
    row.pool.add([prompt(length)[-1], *text])
    return row


@each_architecture
@recyclers
def test_a_candidate_that_wins_keeps_its_own_slots_in_the_cache(arch: str, decoder: str) -> None:
    config = DecodeConfig(decoder=decoder, block_size=8, candidates=4)
    row = knowing_row(arch, config)
    for rows, cache in sweeps(Backbone(shared_model(arch)), [row]):
        check(shared_model(arch), rows, cache)
    assert row.generated == reference(arch)
    assert sum(won for line, won in row.stats.lines_won.items() if line) >= 3
    assert row.stats.forwards < 20


@each_architecture
def test_candidates_of_unequal_rows_do_not_mix(arch: str) -> None:
    config = DecodeConfig(decoder="recycle", block_size=6, candidates=3)
    lengths = (3, 40, 7, 11)
    rows = [knowing_row(arch, config, length, budget=20 + length % 5) for length in lengths]
    for seats, cache in sweeps(Backbone(shared_model(arch)), rows):
        check(shared_model(arch), seats, cache)
    for row, length in zip(rows, lengths, strict=True):
        assert row.generated == reference(arch, length)[: 20 + length % 5]
        assert set(row.stats.lines_won) > {0}


@each_architecture
@recyclers
@pytest.mark.parametrize("block_size", [1, 2, 4, 16])
def test_extra_lines_change_no_token(arch: str, decoder: str, block_size: int) -> None:
    for candidates in (0, 1, 4, 8):
        for ngrams in (True, False):
            settings = {"decoder": decoder, "block_size": block_size, "candidates": candidates, "prompt_ngrams": ngrams}
            assert ours(shared_model(arch), prompt(), 40, **settings) == reference(arch)


@each_architecture
def test_more_candidates_take_no_more_forwards(arch: str) -> None:
    """Over several prompts that repeat themselves, as real ones do."""
    forwards = {}
    for candidates in (0, 1, 8):
        config = DecodeConfig(decoder="recycle", block_size=8, candidates=candidates)
        ids = [prompt(6, seed) * 3 for seed in range(8)]
        rows = [make_row(Backbone(shared_model(arch)), row, config, [], 40) for row in ids]
        run(Backbone(shared_model(arch)), rows)
        forwards[candidates] = sum(row.stats.forwards for row in rows)
    assert forwards[8] <= forwards[1] <= forwards[0]


def test_all_lines_go_through_one_forward() -> None:
    shapes = []
    model = shared_model("llama")

    def seen(module: torch.nn.Module, args: tuple[object, ...], kwargs: dict[str, torch.Tensor]) -> None:
        shapes.append(tuple(kwargs["input_ids"].shape))

    row = knowing_row("llama", DecodeConfig(decoder="recycle", block_size=8, candidates=4))
    handle = model.register_forward_pre_hook(seen, with_kwargs=True)
    try:
        run(Backbone(model), [row])
    finally:
        handle.remove()
    assert len(shapes) == row.stats.forwards
    assert [shape for shape in shapes if shape[0] != 1] == []
    assert [slots for _, slots in shapes] == [sweep.slots for sweep in row.stats.sweeps]


def test_a_draft_that_was_rejected_comes_back_from_the_pool() -> None:
    config = DecodeConfig(decoder="recycle", block_size=4, candidates=2, prompt_ngrams=False)
    row = make_row(Backbone(shared_model("llama")), [1, 2, 3], config, [], 40)
    # The prefill says 20, then nothing of the draft is right: 31 32 33 is what was predicted on it.
    row.absorb([20, 31, 32, 33, 34])
    assert row.candidates == []
    # 30 it was, not 31; then the text reaches 31 after all, one place later.
    row.absorb([30, 41, 42, 43])
    row.absorb([31, 51, 52, 53])
    assert [32, 33, 34] in row.candidates


def test_the_prompts_runs_are_offered_only_when_asked_for() -> None:
    for asked in (True, False):
        config = DecodeConfig(decoder="recycle", block_size=4, candidates=2, prompt_ngrams=asked)
        row = make_row(Backbone(shared_model("llama")), [5, 6, 7, 8, 9], config, [], 40)
        row.absorb([6, 11, 12, 13, 14])
        assert ([7, 8, 9] in row.candidates) is asked


def test_a_candidate_that_goes_on_where_the_draft_ends_takes_its_place() -> None:
    config = DecodeConfig(decoder="multiblock", block_size=4, num_blocks=1, candidates=2)
    row = make_row(Backbone(shared_model("llama")), [5, 6, 7, 8, 9, 5], config, [], 40)
    row.absorb([6, 7, 8, 11, 12])
    assert row.guesses[:2] == [7, 8]
    lines = [line.ids for line in row.propose()]
    assert len({tuple(line) for line in lines}) == len(lines)
    assert not any(a != b and a == b[: len(a)] for a in lines for b in lines)


@recyclers
def test_no_line_proposes_more_than_the_budget_can_use(decoder: str) -> None:
    row = knowing_row("llama", DecodeConfig(decoder=decoder, block_size=16, candidates=4), budget=10)
    while not row.finished:
        room = 10 - row.known - 1
        assert all(len(guesses) <= max(room, 0) for guesses in (row.guesses, *row.candidates))
        truth = reference("llama")
        told = []
        for line in row.propose():
            first = max(line.start - 11 + 1, 0)
            told += truth[first : first + len(line.ids) - (10 if line.start == 0 else 0)]
        row.absorb(told)
    assert row.generated == reference("llama")[:10]


@pytest.mark.parametrize(
    ("setting", "value", "named"), [("candidates", -1, "at least 0"), ("block_size", 0, "at least 1")]
)
def test_a_setting_out_of_range_is_refused_with_the_range(setting: str, value: int, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        DecodeConfig(decoder="recycle", **{setting: value})
