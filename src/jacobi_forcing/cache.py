"""KV slots: rows of unequal length, accepted slots moved behind their row, the rest rolled back.

Layout, for R rows::

    slot            0 1 2 3 4 5 | 6 7 8 9 | spare
    row 0 (length 6) a b c d e f | p p p p |        committed slots hold the token of position = slot index
    row 1 (length 4) a b c d . . | p p p p |        '.' is dead space, 'p' is pending: written by the last sweep

Slots live in buffers with spare room, written in place: a sweep copies its own keys and values and nothing else. Every
layer keeps its full history, those with a sliding window included: the window is applied by the attention mask, so
that rolling back never needs a token that was already evicted.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import Cache
from transformers.cache_utils import DynamicLayer

from jacobi_forcing.errors import CacheError

SPARE = 256
"""Least slots by which a buffer grows."""

RowContent = list[tuple[Tensor, Tensor]]
"""Keys and values of one row for each layer, each [heads, length, head_dim]."""


class SlotLayer(DynamicLayer):
    """Keys and values of one model layer in buffers [R, heads, capacity, head_dim], of which the first `used` count.

    Args:
        slots: The slots that the next forward writes, or None: right behind those in use. As a tensor they leave no
            trace in a compiled forward; the whole buffer is then what attention sees.
        tame: Keep what is written finite, whatever it was. A masked slot has no weight, but 0 times infinity is not 0:
            an adapter that overflows would reach the base's tokens.
    """

    def __init__(self, capacity: int = 0, slots: list[Tensor | None] | None = None, tame: bool = False) -> None:
        super().__init__()
        self.tame = tame
        self.capacity = capacity
        self.used = 0
        self._slots = slots if slots is not None else [None]

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Allocate the buffers, as the first keys and values tell their shapes."""
        self.device = key_states.device
        self.capacity = max(self.capacity, key_states.shape[2] + (SPARE if self._slots[0] is None else 0))
        self.keys, self.values = (_room(states, self.capacity) for states in (key_states, value_states))
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Write one forward's keys and values; returns all that its attention may be shown."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        assert self.keys is not None and self.values is not None
        if self.tame:
            key_states, value_states = _tamed(key_states), _tamed(value_states)
        slots = self._slots[0]
        if slots is not None:
            self.keys.index_copy_(2, slots, key_states)
            self.values.index_copy_(2, slots, value_states)
            return self.keys, self.values
        end = self.used + key_states.shape[2]
        if end > self.capacity:
            self._grow(end + max(SPARE, end // 2))
        self.keys[:, :, self.used : end] = key_states
        self.values[:, :, self.used : end] = value_states
        self.used = end
        return self.keys[:, :, :end], self.values[:, :, :end]

    def load(self, rows: Sequence[tuple[Tensor, Tensor]], width: int) -> None:
        """Take over keys and values [heads, length, head_dim] of each row; `width` slots are in use then."""
        for name, parts in zip(("keys", "values"), zip(*rows, strict=True), strict=True):
            heads, _, size = parts[0].shape
            states = parts[0].new_zeros(len(rows), heads, width + SPARE, size)
            for row, part in enumerate(parts):
                states[row, :, : part.shape[1]] = part
            setattr(self, name, states)
        self.device, self.capacity, self.used, self.is_initialized = rows[0][0].device, width + SPARE, width, True

    def get_seq_length(self) -> int:
        """Slots in use."""
        return self.used

    def move(self, source: Tensor, target: Tensor) -> None:
        """Copy slots within each row: indices [R, 1, k, 1]."""
        for states in (self.keys, self.values):
            assert states is not None
            shape = (-1, states.shape[1], -1, states.shape[3])
            states.scatter_(2, target.expand(shape), states.gather(2, source.expand(shape)))

    def take_rows(self, rows: Tensor) -> None:
        """Keep these rows, in this order."""
        assert self.keys is not None and self.values is not None
        self.keys, self.values = self.keys[rows], self.values[rows]

    def _grow(self, capacity: int) -> None:
        for name in ("keys", "values"):
            old = getattr(self, name)
            room = _room(old, capacity)
            room[:, :, : self.used] = old[:, :, : self.used]
            setattr(self, name, room)
        self.capacity = capacity


class KVCache:
    """Keys and values of R rows, with a committed part and a pending part.

    Args:
        rows: R.
        capacity: Slots of fixed buffers, all of which attention is shown whatever is in use, so that no shape changes
            from sweep to sweep; every forward must then be announced by `stage`. None: buffers grow.
        tame: See `SlotLayer`.

    Attributes:
        library: The transformers cache that a model's `forward` fills.
        lengths: Committed tokens of each row.
        width: Columns of the committed part, the longest row's length; pending slots start here.
        capacity: As given.
    """

    def __init__(self, rows: int = 1, capacity: int | None = None, tame: bool = False) -> None:
        self.capacity, self._tame = capacity, tame
        self._slots: list[Tensor | None] = [None]
        self._staged = 0
        # The library makes a layer as the model first writes to it.
        self.library = Cache(layer_class_to_replicate=self._new_layer)  # type: ignore[arg-type]  # any factory will do
        self.lengths = [0] * rows
        self.width = 0

    @classmethod
    def of_rows(cls, rows: Sequence[RowContent]) -> KVCache:
        """A cache whose rows have committed what `content` gave for others, copied."""
        cache = cls(len(rows))
        cache.lengths = [row[0][0].shape[1] for row in rows]
        cache.width = max(cache.lengths)
        for index in range(len(rows[0])):
            layer = cache._new_layer()
            layer.load([row[index] for row in rows], cache.width)
            cache.library.layers.append(layer)
        return cache

    @property
    def rows(self) -> int:
        """Number of rows."""
        return len(self.lengths)

    @property
    def pending(self) -> int:
        """Slots that were written and neither committed nor forgotten."""
        if self.capacity is not None:
            return self._staged
        return self._layers[0].used - self.width if self._layers else 0

    def columns(self, queries: int) -> int:
        """Keys that the attention of a forward over `queries` slots is shown."""
        return self.width + queries if self.capacity is None else self.capacity

    def stage(self, queries: int, device: torch.device | str) -> None:
        """Announce a forward over `queries` slots.

        Raises:
            CacheError: The fixed buffers have no room for them.
        """
        if self.capacity is None:
            return
        if self.width + queries > self.capacity:
            raise CacheError(
                "The KV cache is full", seen=self.width + queries, expected=f"at most {self.capacity} slots"
            )
        self._staged = queries
        self._slots[0] = torch.arange(self.width, self.width + queries, device=device)

    def forget(self) -> None:
        """Roll back every pending slot."""
        self._staged = 0
        for layer in self._layers:
            layer.used = self.width

    def commit(self, kept: Sequence[Sequence[int]]) -> None:
        """Keep some pending slots and forget the others.

        Args:
            kept: For each row, the indices of its pending slots to append, in token order. May be empty.

        Raises:
            CacheError: Another number of rows, or an index that is not pending.
        """
        pending = self.pending
        if len(kept) != self.rows or any(not 0 <= slot < pending for row in kept for slot in row):
            raise CacheError(
                "These slots cannot be committed", seen=kept, expected=f"{self.rows} rows of indices below {pending}"
            )
        in_place = all(
            not len(row) or (length == self.width and list(row) == list(range(len(row))))
            for length, row in zip(self.lengths, kept, strict=True)
        )
        if not in_place:
            self._move(kept)
        self.lengths = [length + len(row) for length, row in zip(self.lengths, kept, strict=True)]
        self.width = max(self.lengths)
        self.forget()

    def select_rows(self, rows: Sequence[int]) -> None:
        """Keep only these rows, in this order; pending slots must have been committed or forgotten."""
        if self.pending:
            raise CacheError("Rows cannot leave while slots are pending", remedy="commit or forget first")
        index = torch.tensor(list(rows), device=self._device)
        for layer in self._layers:
            layer.take_rows(index)
        self.lengths = [self.lengths[row] for row in rows]
        self.width = max(self.lengths, default=0)
        self.forget()

    def content(self, row: int = 0) -> RowContent:
        """Committed (keys, values) of one row for each layer, each [heads, length, head_dim]."""
        length = self.lengths[row]
        return [(layer.keys[row, :, :length], layer.values[row, :, :length]) for layer in self._layers]

    def _new_layer(self) -> SlotLayer:
        return SlotLayer(self.capacity or 0, self._slots, self._tame)

    @property
    def _layers(self) -> list[Any]:
        # The library's annotations allow for layers of other kinds; these are all `SlotLayer`.
        return self.library.layers

    @property
    def _device(self) -> torch.device:
        return self._layers[0].keys.device

    def _move(self, kept: Sequence[Sequence[int]]) -> None:
        """Bring the kept slots behind what their rows have committed; surplus slots are copied onto themselves."""
        count = max(len(row) for row in kept)
        target = [[length + step for step in range(count)] for length in self.lengths]
        source = [
            [self.width + slot for slot in row] + places[len(row) :] for row, places in zip(kept, target, strict=True)
        ]
        index = torch.tensor([source, target], device=self._device)[:, :, None, :, None]
        for layer in self._layers:
            layer.move(index[0], index[1])


def _tamed(states: Tensor) -> Tensor:
    """The same where it is finite and no larger than any model's keys and values are."""
    limit = min(1e12, torch.finfo(states.dtype).max / 4)
    return states.clamp(-limit, limit).nan_to_num_(nan=0.0)


def _room(states: Tensor, capacity: int) -> Tensor:
    """Zeros like `states` [R, heads, slots, dim], with other slots: what is masked must be finite all the same."""
    return states.new_zeros(states.shape[0], states.shape[1], capacity, states.shape[3])
