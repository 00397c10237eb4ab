"""Several blocks in flight: spawned in time, promoted with their draft, verified again, no part of the text before."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch

from decoding import SCRIPT, ScriptedModel, ours, prompt, reference, told_row
from jacobi_forcing import DecodeConfig, generate
from jacobi_forcing.backbone import Backbone
from jacobi_forcing.decode.engine import make_row, sweeps
from jacobi_forcing.errors import ConfigError
from test_decode_cache import check
from tiny_models import ARCHITECTURES, shared_model

each_architecture = pytest.mark.parametrize("arch", ARCHITECTURES)


def scripted(**settings: object) -> tuple[list[list[int]], list[int]]:
    """The ids that each forward was given, and how many tokens were known before it."""
    model = ScriptedModel(SCRIPT, prompt_length=3)
    decode = DecodeConfig(decoder="multiblock", candidates=0, **settings)  # type: ignore[arg-type]  # of a test
    out = generate(model, torch.tensor([[1, 2, 3]]), decode=decode, max_new_tokens=30, return_dict_in_generate=True)
    accepted = out.stats.rows[0].accepted
    assert out.sequences[0, 3:].tolist() == SCRIPT[:30]
    return [fed[0] for fed in model.fed], [sum(accepted[:step]) for step in range(len(accepted))]


@each_architecture
@pytest.mark.parametrize("block_size", [1, 2, 4, 16, 64])
def test_any_number_of_blocks_gives_the_text_of_ar(arch: str, block_size: int) -> None:
    for num_blocks in (1, 2, 3):
        for spawn_ratio in (0.0, 0.5, 0.85, 1.0):
            settings = {"num_blocks": num_blocks, "spawn_ratio": spawn_ratio, "block_size": block_size}
            assert ours(shared_model(arch), prompt(), 40, decoder="multiblock", **settings) == reference(arch)


@each_architecture
@pytest.mark.parametrize("spawn_ratio", [0.0, 0.5])
def test_the_cache_holds_nothing_of_a_block_that_is_not_promoted(arch: str, spawn_ratio: float) -> None:
    config = DecodeConfig("multiblock", 4, num_blocks=3, spawn_ratio=spawn_ratio, candidates=2)
    lengths = (3, 40, 11)
    rows = [told_row(prompt(length), reference(arch, length), config, 24, wrong=0.3) for length in lengths]
    for seats, cache in sweeps(Backbone(shared_model(arch)), rows):
        check(shared_model(arch), seats, cache)
    assert [row.generated for row in rows] == [reference(arch, length)[:24] for length in lengths]


def test_a_promoted_draft_is_in_the_next_forward() -> None:
    """The model tells the truth at every slot, whatever it is fed: a draft that is kept is right, a fresh one not."""
    promotions = 0
    for settings in ({"spawn_ratio": 0.0}, {"spawn_ratio": 0.5}, {"spawn_ratio": 0.25, "num_blocks": 3}):
        fed, known = scripted(block_size=4, **settings)
        for (before, line), (after, following) in pairwise(zip(known, fed, strict=True)):
            if before // 4 == after // 4 or not before:
                continue
            # The forward before reached up to here; each of its slots has predicted the token behind it.
            reach = before - 1 + len(line) + 1
            if reach <= after:
                continue
            promotions += 1
            kept = following[1 : reach - after + 1]
            assert kept == SCRIPT[after:reach][: len(kept)]
            assert kept
    assert promotions >= 3


def test_a_single_block_draws_a_fresh_draft_instead() -> None:
    fed, known = scripted(block_size=4, num_blocks=1)
    fresh = [line[1:] for line, count in zip(fed, known, strict=True) if count % 4 == 1 and count > 4 and len(line) > 1]
    assert fresh
    assert all(set(draft) <= {1, 2, 3} for draft in fresh)


@pytest.mark.parametrize("spawn_ratio", [0.0, 0.25, 0.5, 0.75, 1.0])
def test_a_block_starts_when_the_one_before_has_accepted_its_share(spawn_ratio: float) -> None:
    n, threshold = 8, math.ceil(spawn_ratio * 8)
    config = DecodeConfig("multiblock", n, num_blocks=2, spawn_ratio=spawn_ratio, candidates=0)
    row = make_row(Backbone(shared_model("llama")), [1, 2, 3], config, [], 100)
    row.absorb([50] * (len(row.guesses) + 1))
    while row.known < 2 * n:
        in_flight = (row.known + len(row.guesses) - row.known // n * n) // n
        assert in_flight == (2 if row.known % n >= threshold else 1)
        # Nothing is right: each sweep adds one token, and each slot predicts what its draft does not have.
        row.absorb([51 + guess % 2 for guess in [*row.guesses, 0]])


def test_a_block_that_waits_is_accepted_only_when_the_text_reaches_it() -> None:
    config = DecodeConfig("multiblock", 4, num_blocks=2, spawn_ratio=0.0, candidates=0)
    row = make_row(Backbone(shared_model("llama")), [1, 2, 3], config, [], 100)
    row.absorb([10] + [20] * len(row.guesses))
    assert row.guesses == [20] * 7
    # The first guess is wrong, the block behind agrees with itself: pseudo-accepted, not output.
    row.absorb([11, 12, 13, 20, 20, 20, 20, 20])
    assert row.generated == [10, 11]
    assert row._pseudo == [4]
    assert row.guesses == [12, 13, 20, 20, 20, 20]
    # Now the real-active block is right, so the next one is verified in the same forward, and found wrong at once.
    row.absorb([12, 13, 14, 15, 16, 17, 18])
    assert row.generated == [10, 11, 12, 13, 14]
    assert row.guesses[:3] == [15, 16, 17]


@pytest.mark.parametrize(
    ("setting", "value", "named"),
    [("spawn_ratio", 1.5, "from 0 to 1"), ("spawn_ratio", -0.1, "from 0 to 1"), ("num_blocks", 0, "at least 1")],
)
def test_a_setting_out_of_range_is_refused_with_the_range(setting: str, value: float, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        DecodeConfig("multiblock", **{setting: value})  # type: ignore[arg-type]  # wrong on purpose
