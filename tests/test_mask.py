from __future__ import annotations

import pytest
import torch

from jacobi_forcing.backbone import Backbone
from jacobi_forcing.errors import ConfigError
from jacobi_forcing.mask import KINDS, visible
from jacobi_forcing.packing import PackedRows
from jacobi_forcing.tags import PADDING, Kind, Tags, layout
from reference_losses import random_trajectory
from tiny_models import shared_model

NOISE_CONDITIONED = """
    1 . . . . . . . . .
    1 1 . . . . . . . .
    1 1 1 . . . . . . .
    1 1 1 1 . . . . . .
    1 1 . . 1 . . . . .
    1 1 . . 1 1 . . . .
    1 1 1 1 . . 1 . . .
    1 1 1 1 . . 1 1 . .
    1 1 . . 1 1 . . 1 .
    1 1 . . 1 1 . . 1 1
"""
CLEAN_CONTEXT = """
    1 . . . . . . . . .
    1 1 . . . . . . . .
    1 1 1 . . . . . . .
    1 1 1 1 . . . . . .
    1 1 . . 1 . . . . .
    1 1 . . 1 1 . . . .
    1 1 . . 1 1 1 . . .
    1 1 . . 1 1 1 1 . .
    1 1 . . 1 1 . . 1 .
    1 1 . . 1 1 . . 1 1
"""
# Three blocks of one token in windows of two: P k0 c0 k1 c1 | k2 c2
WINDOWS = """
    1 . . . . . .
    1 1 . . . . .
    1 . 1 . . . .
    1 1 . 1 . . .
    1 . 1 . 1 . .
    1 . 1 . 1 1 .
    1 . 1 . 1 . 1
"""
# The same, the other way about
INTRA_WINDOW_CLEAN = """
    1 . . . . . .
    1 1 . . . . .
    1 . 1 . . . .
    1 . 1 1 . . .
    1 . 1 . 1 . .
    1 1 . 1 . 1 .
    1 . 1 . 1 . 1
"""
# Two samples and two padding tokens: P k0a k0b c0a c0b k1a c1a | P P k0a c0a | - -
TWO_SAMPLES = """
    1 . . . . . . . . . . . .
    1 1 . . . . . . . . . . .
    1 1 1 . . . . . . . . . .
    1 . . 1 . . . . . . . . .
    1 . . 1 1 . . . . . . . .
    1 1 1 . . 1 . . . . . . .
    1 . . 1 1 . 1 . . . . . .
    . . . . . . . 1 . . . . .
    . . . . . . . 1 1 . . . .
    . . . . . . . 1 1 1 . . .
    . . . . . . . 1 1 . 1 . .
    . . . . . . . . . . . 1 1
    . . . . . . . . . . . 1 1
"""


def literal(drawing: str) -> torch.Tensor:
    return torch.tensor([[cell == "1" for cell in line.split()] for line in drawing.strip().splitlines()])


@pytest.mark.parametrize(
    ("mask", "drawing"), [("noise_conditioned", NOISE_CONDITIONED), ("clean_context", CLEAN_CONTEXT)]
)
def test_mask_equals_the_drawing(mask, drawing):
    tags = Tags.of(layout(2, 4, 2, True)[0])
    assert tags.position.tolist() == [0, 1, 2, 3, 2, 3, 4, 5, 4, 5]
    assert torch.equal(visible(tags, tags, mask), literal(drawing))


@pytest.mark.parametrize(
    ("mask", "drawing"), [("noise_conditioned_window", WINDOWS), ("intra_window_clean", INTRA_WINDOW_CLEAN)]
)
def test_windowed_mask_equals_the_drawing(mask, drawing):
    tags = Tags.of(layout(1, 3, 1, True)[0])
    tags = tags._replace(window=torch.where(tags.block >= 0, tags.block // 2, -1))
    assert torch.equal(visible(tags, tags, mask), literal(drawing))


def test_samples_of_a_row_and_padding_do_not_see_each_other():
    first, second = layout(1, 3, 2, True)[0], layout(2, 1, 2, True)[0].clone()
    second[0] = 1
    tags = Tags.of(torch.cat([first, second, torch.tensor(PADDING)[:, None].repeat(1, 2)], dim=-1))
    assert torch.equal(visible(tags, tags, "noise_conditioned"), literal(TWO_SAMPLES))


def test_mask_of_several_rows_and_of_some_queries_is_made_of_the_same_values():
    tags = Tags.of(torch.stack([layout(2, 4, 2, True)[0], layout(4, 3, 2, False)[0]]))
    whole = visible(tags, tags, "clean_context")
    assert whole.shape == (2, 10, 10)
    assert torch.equal(whole[1], visible(Tags(*(c[1] for c in tags)), Tags(*(c[1] for c in tags)), "clean_context"))
    some = Tags(*(column[:, 3:5] for column in tags))
    assert torch.equal(visible(some, tags, "clean_context"), whole[:, 3:5])


@pytest.mark.parametrize("mask", KINDS)
def test_every_token_sees_itself_so_that_no_softmax_is_empty(mask):
    tags = Tags.of(torch.cat([layout(3, 7, 3, True)[0], torch.tensor(PADDING)[:, None]], dim=-1))
    assert visible(tags, tags, mask).diagonal().all()


def test_unknown_mask_is_refused_with_the_known_ones():
    tags = Tags.of(layout(1, 1, 1, True)[0])
    with pytest.raises(
        ConfigError, match=r"'causal'.*noise_conditioned, noise_conditioned_window, intra_window_clean, clean"
    ):
        visible(tags, tags, "causal")


def logits(arch: str, ids: torch.Tensor, tags: Tags, mask: str) -> torch.Tensor:
    backbone = Backbone(shared_model(arch))
    additive = backbone.attention_mask(visible(tags, tags, mask), tags.position, tags.position)
    with torch.no_grad():
        return backbone.logits(backbone.hidden(ids, tags.position, additive))[0]


@pytest.mark.parametrize("mask", KINDS)
@pytest.mark.parametrize("arch", ["llama", "gpt2", "gemma3"])
def test_clean_logits_do_not_change_by_a_bit_with_a_noisy_block_or_another_sample(arch, mask):
    trajectories = [random_trajectory(sample, 5, 11, 4) for sample in (1, 2)]
    row = PackedRows(trajectories, max_length=60, window_size=4)[0]
    ids, tags = row["input_ids"][None], Tags.of(row["tags"][None])
    before = logits(arch, ids, tags, mask)
    first = tags.sample[0] == 0
    clean, noisy = first & (tags.kind[0] == Kind.CLEAN), first & (tags.kind[0] == Kind.NOISY)

    one_block = ids.clone()
    one_block[0, noisy & (tags.block[0] == 1)] = 7
    after = logits(arch, one_block, tags, mask)
    assert torch.equal(before[clean], after[clean])
    assert not torch.equal(before[noisy], after[noisy])

    other_sample = ids.clone()
    other_sample[0, ~first] = 7
    after = logits(arch, other_sample, tags, mask)
    assert torch.equal(before[first], after[first])
    assert not torch.equal(before[~first], after[~first])


def test_noisy_logits_do_not_change_with_clean_blocks_under_the_noise_conditioned_mask():
    row = PackedRows([random_trajectory(1, 5, 11, 4)], max_length=60, window_size=4)[0]
    ids, tags = row["input_ids"][None], Tags.of(row["tags"][None])
    noisy, changed = tags.kind[0] == Kind.NOISY, ids.clone()
    changed[0, tags.kind[0] == Kind.CLEAN] = 7
    for mask, same in (("noise_conditioned", True), ("clean_context", False)):
        before, after = logits("llama", ids, tags, mask), logits("llama", changed, tags, mask)
        assert torch.equal(before[noisy], after[noisy]) == same
