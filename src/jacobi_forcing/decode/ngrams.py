"""The n-gram pool of rejection recycling (paper, section 3.4.6): rejected runs, found again by their first token."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

CONTEXT = 4
"""Tokens before a place that are compared with the text's last ones: places that agree longest are offered first."""


class _Place(NamedTuple):
    run: Sequence[int]
    at: int
    serial: int


class NgramPool:
    """A bounded store of token runs.

    Every place in a remembered run is an entry under the token that stands there; what follows in the run is the
    continuation that it offers. A look-up reads the entries of one token only, of which at most `per_token` are kept:
    its cost does not grow with the history. A run is kept by reference, so one that grows offers what it has grown by.

    Args:
        capacity: Most entries over all tokens; the oldest are dropped.
        per_token: Most entries under one token; the oldest are dropped.
    """

    def __init__(self, capacity: int = 4096, per_token: int = 32) -> None:
        self.capacity, self.per_token = capacity, per_token
        self._places: dict[int, deque[_Place]] = {}
        self._order: deque[tuple[int, int]] = deque()
        self._serial = 0

    def __len__(self) -> int:
        """Number of entries."""
        return sum(map(len, self._places.values()))

    def add(self, run: Sequence[int], start: int = 0) -> None:
        """Remember a run: each of its tokens from index `start` on becomes an entry."""
        for index in range(start, len(run)):
            token = run[index]
            self._serial += 1
            places = self._places.setdefault(token, deque(maxlen=self.per_token))
            places.append(_Place(run, index, self._serial))
            self._order.append((token, self._serial))
        while len(self._order) > self.capacity:
            self._drop(*self._order.popleft())

    def look_up(
        self, text: Sequence[int], count: int, length: int, known: Sequence[Sequence[int]] = ()
    ) -> list[list[int]]:
        """Continuations of a text.

        Args:
            text: What has been written; its last token is the key.
            count: Most continuations.
            length: Longest continuation, tokens.
            known: Continuations that are of no use any more, nor is any that one of them begins with.

        Returns:
            Up to `count` continuations that differ; first those whose context agrees longest with the text, of equals
            the newest.
        """
        found = [list(run[:length]) for run in known]
        places = self._places.get(text[-1], ()) if count > 0 and length > 0 else ()
        newest_first = sorted(reversed(places), key=lambda place: -_agreement(place, text))
        for run, at, _ in newest_first:
            continuation = list(run[at + 1 : at + 1 + length])
            if not continuation or any(_begins(other, continuation) for other in found):
                continue
            # Of two that begin alike the longer one serves for both.
            extended = (place for place in range(len(known), len(found)) if _begins(continuation, found[place]))
            place = next(extended, None)
            if place is not None:
                found[place] = continuation
            elif len(found) < len(known) + count:
                found.append(continuation)
            else:
                break
        return found[len(known) :]

    def _drop(self, token: int, serial: int) -> None:
        places = self._places[token]
        # The entry may be gone already, pushed out by newer ones of its token.
        if places and places[0].serial == serial:
            places.popleft()
            if not places:
                del self._places[token]


def _begins(run: Sequence[int], start: Sequence[int]) -> bool:
    return run[: len(start)] == start


def _agreement(place: _Place, text: Sequence[int]) -> int:
    """How many tokens before a place equal those before the text's last token, up to `CONTEXT`."""
    most = min(CONTEXT, place.at, len(text) - 1)
    for back in range(1, most + 1):
        if place.run[place.at - back] != text[-1 - back]:
            return back - 1
    return most
