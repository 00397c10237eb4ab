"""The pool of rejection recycling: bounded, quick whatever its history, and only what helps is offered."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence

import pytest

from jacobi_forcing.decode.ngrams import CONTEXT, NgramPool


def slow_look_up(runs: Sequence[Sequence[int]], text: Sequence[int], count: int, length: int) -> list[list[int]]:
    """The obvious way: walk through everything that was ever added."""
    places = []
    for run in runs:
        for at in range(len(run)):
            if run[at] == text[-1] and at + 1 < len(run):
                back = 0
                while back < min(CONTEXT, at, len(text) - 1) and run[at - back - 1] == text[-2 - back]:
                    back += 1
                places.append((back, len(places), list(run[at + 1 : at + 1 + length])))
    found: list[list[int]] = []
    for _, _, continuation in sorted(places, key=lambda place: (-place[0], -place[1])):
        longer = [place for place, other in enumerate(found) if continuation[: len(other)] == other]
        if any(other[: len(continuation)] == continuation for other in found):
            continue
        if longer:
            found[longer[0]] = continuation
        elif len(found) < count:
            found.append(continuation)
        else:
            break
    return found


def test_a_run_is_found_by_any_of_its_tokens() -> None:
    pool = NgramPool()
    pool.add([1, 2, 3, 4])
    assert pool.look_up([9, 1], 4, 8) == [[2, 3, 4]]
    assert pool.look_up([9, 3], 4, 8) == [[4]]
    assert pool.look_up([9, 3], 0, 8) == []
    assert pool.look_up([9, 2], 4, 1) == [[3]]


def test_the_last_token_of_a_run_has_nothing_to_offer() -> None:
    pool = NgramPool()
    pool.add([1, 2])
    assert pool.look_up([2], 4, 8) == []
    assert pool.look_up([7], 4, 8) == []


def test_a_run_whose_context_agrees_comes_first_and_of_equals_the_newest() -> None:
    pool = NgramPool()
    pool.add([5, 1, 10])
    pool.add([6, 1, 20])
    pool.add([7, 1, 30])
    assert pool.look_up([5, 1], 3, 4) == [[10], [30], [20]]
    assert pool.look_up([8, 1], 2, 4) == [[30], [20]]


def test_nothing_is_offered_twice_nor_what_is_known() -> None:
    pool = NgramPool()
    pool.add([1, 2, 3])
    pool.add([1, 2, 3])
    pool.add([1, 2])
    assert pool.look_up([1], 4, 8) == [[2, 3]]
    assert pool.look_up([1], 4, 8, known=[[2, 9]]) == [[2, 3]]
    assert pool.look_up([1], 4, 8, known=[[2, 3, 4]]) == []


def test_a_run_that_grows_offers_what_it_has_grown_by() -> None:
    pool, text = NgramPool(), [1, 2]
    pool.add(text)
    text += [3, 4]
    pool.add(text, 2)
    assert pool.look_up([1], 1, 8) == [[2, 3, 4]]
    assert pool.look_up([3], 1, 8) == [[4]]


@pytest.mark.parametrize("seed", range(20))
def test_it_finds_what_a_walk_through_the_history_finds(seed: int) -> None:
    rng = random.Random(seed)
    runs = [[rng.randrange(6) for _ in range(rng.randrange(1, 9))] for _ in range(12)]
    pool = NgramPool(per_token=10_000)
    for run in runs:
        pool.add(run)
    for _ in range(20):
        text = [rng.randrange(6) for _ in range(rng.randrange(1, 8))]
        assert pool.look_up(text, 3, 4) == slow_look_up(runs, text, 3, 4)


def test_it_is_bounded_over_all_and_per_token_and_the_oldest_go_first() -> None:
    pool = NgramPool(capacity=50, per_token=4)
    for step in range(1000):
        pool.add([step % 20, 100 + step])
        assert len(pool) <= 50
    assert pool.look_up([999 % 20], 9, 2)[0] == [1099]
    assert len(pool.look_up([999 % 20], 9, 2)) <= 4
    # What was pushed out leaves nothing behind.
    assert sum(len(places) for places in pool._places.values()) == len(pool)
    assert all(pool._places.values())
    assert len(pool._order) <= 50


def test_a_look_up_does_not_grow_with_the_history() -> None:
    def seconds(history: int) -> float:
        pool, rng = NgramPool(capacity=10**9), random.Random(0)
        for _ in range(history):
            pool.add([rng.randrange(4) for _ in range(16)])
        best = float("inf")
        for _ in range(20):
            started = time.perf_counter()
            pool.look_up([1, 2, 3, 0], 4, 15)
            best = min(best, time.perf_counter() - started)
        return best

    # Two hundred times the history; a walk through it would take two hundred times as long.
    assert seconds(4000) < 10 * seconds(20)
