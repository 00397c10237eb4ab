"""Token arithmetic, each function against literal answers or the obvious loop."""

from __future__ import annotations

import random

import pytest
import torch

from jacobi_forcing.blocks import accepted_prefix, common_prefix, first_eos, noise_ratio, split, truncate
from jacobi_forcing.errors import ConfigError


def test_split_leaves_a_shorter_last_block() -> None:
    assert split([1, 2, 3, 4, 5], 2) == [[1, 2], [3, 4], [5]]
    assert split([1, 2, 3, 4], 2) == [[1, 2], [3, 4]]
    assert split([1, 2], 16) == [[1, 2]]
    assert split([1, 2], 1) == [[1], [2]]
    assert split([], 4) == []


def test_split_copies() -> None:
    ids = [1, 2, 3]
    blocks = split(ids, 2)
    blocks[0][0] = 9
    assert ids == [1, 2, 3]


@pytest.mark.parametrize("block_size", [0, -3])
def test_split_refuses_blocks_of_nothing(block_size: int) -> None:
    with pytest.raises(ConfigError, match=f"seen: {block_size}; expected: at least 1"):
        split([1], block_size)


@pytest.mark.parametrize(
    ("draft", "predictions", "length"),
    [
        ([5], [7], 1),
        ([5, 6, 7], [6, 7, 8], 3),
        ([5, 6, 7], [6, 9, 8], 2),
        ([5, 6, 7], [9, 7, 8], 1),
        # Right behind a mistake does not count: it was predicted from a wrong prefix.
        ([5, 6, 7, 8], [9, 7, 8, 9], 1),
    ],
)
def test_the_accepted_prefix_ends_at_the_first_mistake(draft: list[int], predictions: list[int], length: int) -> None:
    found = accepted_prefix(torch.tensor(draft), torch.tensor(predictions))
    assert found.dtype == torch.long
    assert found.item() == length


def test_the_accepted_prefix_works_on_batches() -> None:
    draft, predictions = torch.randint(0, 2, (6, 5, 8)), torch.randint(0, 2, (6, 5, 8))
    found = accepted_prefix(draft, predictions)
    for row, told, length in zip(
        draft.view(-1, 8).tolist(), predictions.view(-1, 8).tolist(), found.flatten(), strict=True
    ):
        expected = 1
        while expected < 8 and row[expected] == told[expected - 1]:
            expected += 1
        assert length == expected


def test_common_prefix_stops_at_the_shorter_one() -> None:
    assert common_prefix([1, 2, 3], [1, 2, 4]) == 2
    assert common_prefix([1, 2], [1, 2, 3]) == 2
    assert common_prefix([2], [1]) == 0
    assert common_prefix([], [1]) == 0


def test_the_noise_ratio_counts_what_is_not_yet_the_prefix_of_the_fixed_point() -> None:
    fixed_point = [1, 2, 3, 4]
    assert noise_ratio(fixed_point, fixed_point) == 0.0
    assert noise_ratio([9, 9, 9, 9], fixed_point) == 1.0
    assert noise_ratio([1, 9, 3, 4], fixed_point) == 0.75
    assert noise_ratio([1, 2, 3, 9], fixed_point) == 0.25


@pytest.mark.parametrize("kind", [list, tuple, torch.tensor])
def test_the_first_of_several_ends_is_found(kind: type) -> None:
    assert first_eos(kind([5, 6, 7, 6]), [7, 6]) == 1
    assert first_eos(kind([5, 6]), [9]) is None
    assert first_eos(kind([5, 6]), []) is None


def test_truncate_keeps_the_end_token_and_the_budget() -> None:
    assert truncate([1, 2, 9, 3], [9], 10) == [1, 2, 9]
    assert truncate([1, 2, 9, 3], [9], 3) == [1, 2, 9]
    assert truncate([1, 2, 9, 3], [9], 2) == [1, 2]
    assert truncate([1, 2, 3], [], 2) == [1, 2]
    assert truncate([1, 2, 8, 9], [9, 8], 10) == [1, 2, 8]


def test_truncate_leaves_its_input_alone() -> None:
    ids = [random.randrange(5) for _ in range(20)]
    before = list(ids)
    truncate(ids, [0], 10)
    assert ids == before
