"""KV slots of a made-up model: each key tells which row and slot it came from, so that every move can be checked."""

from __future__ import annotations

import pytest
import torch

from jacobi_forcing.cache import KVCache
from jacobi_forcing.errors import CacheError

LAYERS, HEADS, DIM = 2, 3, 4


def write(cache: KVCache, slots: list[list[int]]) -> None:
    """What a forward does: append one slot per column; its keys hold the given number, its values the negative."""
    for layer in range(LAYERS):
        states = torch.tensor(slots, dtype=torch.float32)[:, None, :, None].expand(-1, HEADS, -1, DIM) + layer / 10
        cache.library.update(states, -states, layer)


def held(cache: KVCache) -> list[list[int]]:
    """The committed numbers of each row, after checking that all layers, keys and values agree on them."""
    rows = []
    for row in range(cache.rows):
        content = cache.content(row)
        numbers = [round(number) for number in content[0][0][0, :, 0].tolist()]
        for layer, (keys, values) in enumerate(content):
            expected = torch.tensor(numbers).view(1, -1, 1).expand(HEADS, -1, DIM) + layer / 10
            torch.testing.assert_close(keys, expected)
            torch.testing.assert_close(values, -expected)
        rows.append(numbers)
    return rows


def filled(*rows: list[int]) -> KVCache:
    """A cache whose rows have committed these numbers."""
    cache = KVCache(len(rows))
    width = max(map(len, rows))
    write(cache, [row + [-9] * (width - len(row)) for row in rows])
    cache.commit([range(len(row)) for row in rows])
    return cache


def test_a_new_cache_is_empty() -> None:
    cache = KVCache(3)
    assert (cache.rows, cache.width, cache.pending, cache.lengths) == (3, 0, 0, [0, 0, 0])


def test_what_a_forward_writes_is_pending() -> None:
    cache = filled([1, 2, 3])
    write(cache, [[4, 5]])
    assert (cache.width, cache.pending, cache.lengths) == (3, 2, [3])
    assert held(cache) == [[1, 2, 3]]


def test_forgetting_rolls_back_to_what_was_committed() -> None:
    cache = filled([1, 2, 3])
    for _ in range(3):
        write(cache, [[4, 5]])
        cache.forget()
        assert (cache.pending, held(cache)) == (0, [[1, 2, 3]])
    cache.forget()
    assert held(cache) == [[1, 2, 3]]


@pytest.mark.parametrize("kept", [[], [0], [0, 1], [0, 1, 2]])
def test_a_prefix_of_what_is_pending_is_kept(kept: list[int]) -> None:
    cache = filled([1, 2])
    write(cache, [[3, 4, 5]])
    cache.commit([kept])
    assert held(cache) == [[1, 2, 3, 4, 5][: 2 + len(kept)]]
    assert (cache.pending, cache.lengths, cache.width) == (0, [2 + len(kept)], 2 + len(kept))


def test_any_slots_may_be_kept_in_any_order() -> None:
    cache = filled([1, 2])
    write(cache, [[3, 4, 5, 6]])
    cache.commit([[3, 0, 2]])
    assert held(cache) == [[1, 2, 6, 3, 5]]


def test_rows_grow_on_their_own() -> None:
    cache = filled([1, 2, 3, 4], [11, 12])
    assert (cache.lengths, cache.width) == ([4, 2], 4)
    write(cache, [[5, 6, 7], [13, 14, 15]])
    cache.commit([[0], [0, 1, 2]])
    assert held(cache) == [[1, 2, 3, 4, 5], [11, 12, 13, 14, 15]]
    write(cache, [[6, 7], [16, 17]])
    cache.commit([[], [0, 1]])
    assert held(cache) == [[1, 2, 3, 4, 5], [11, 12, 13, 14, 15, 16, 17]]
    write(cache, [[6, 7], [18, 19]])
    cache.commit([[1], []])
    assert held(cache) == [[1, 2, 3, 4, 5, 7], [11, 12, 13, 14, 15, 16, 17]]


def test_equal_rows_that_keep_unequal_prefixes_do_not_mix() -> None:
    cache = filled([1, 2], [11, 12])
    write(cache, [[3, 4, 5], [13, 14, 15]])
    cache.commit([[0], [0, 1]])
    assert held(cache) == [[1, 2, 3], [11, 12, 13, 14]]
    write(cache, [[4, 5], [15, 16]])
    cache.commit([[0], [0]])
    assert held(cache) == [[1, 2, 3, 4], [11, 12, 13, 14, 15]]


def test_ranges_serve_as_slots() -> None:
    cache = filled([1], [11, 12])
    write(cache, [[2, 3], [13, 14]])
    cache.commit([range(2), range(1)])
    assert held(cache) == [[1, 2, 3], [11, 12, 13]]


@pytest.mark.parametrize("kept", [[[2], [0]], [[-1], [0]], [[0]], [[0], [0], [0]]])
def test_slots_that_are_not_pending_are_refused(kept: list[list[int]]) -> None:
    cache = filled([1], [11])
    write(cache, [[2, 3], [12, 13]])
    with pytest.raises(CacheError, match="2 rows of indices below 2"):
        cache.commit(kept)
    cache.commit([[0], [0]])
    assert held(cache) == [[1, 2], [11, 12]]


def test_rows_leave_and_the_dead_space_with_them() -> None:
    cache = filled([1, 2, 3, 4, 5], [11, 12], [21, 22, 23])
    cache.select_rows([2, 1])
    assert held(cache) == [[21, 22, 23], [11, 12]]
    assert (cache.lengths, cache.width, cache.pending) == ([3, 2], 3, 0)
    write(cache, [[24], [13]])
    cache.commit([[0], [0]])
    assert held(cache) == [[21, 22, 23, 24], [11, 12, 13]]


def test_rows_do_not_leave_while_slots_are_pending() -> None:
    cache = filled([1], [11])
    write(cache, [[2], [12]])
    with pytest.raises(CacheError, match="pending"):
        cache.select_rows([0])
