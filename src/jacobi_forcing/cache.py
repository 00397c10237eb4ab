"""KV slots: rows of unequal length, accepted slots kept by a gather, the rest rolled back.

Layout, for R rows::

    slot            0 1 2 3 4 5 | 6 7 8 9
    row 0 (length 6) a b c d e f | p p p p      committed slots hold the token of position = slot index
    row 1 (length 4) a b c d . . | p p p p      '.' is dead space, 'p' is pending: written by the last sweep

Every layer keeps its full history, those with a sliding window included: the window is applied by the attention mask,
so that rolling back never needs a token that was already evicted.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from jacobi_forcing.errors import CacheError


class KVCache:
    """Keys and values of R rows, with a committed part and a pending part.

    Attributes:
        library: The transformers cache that a model's `forward` fills.
        lengths: Committed tokens of each row.
        width: Columns of the committed part, the longest row's length; pending slots start here.
    """

    def __init__(self, rows: int = 1) -> None:
        self.library = DynamicCache()
        self.lengths = [0] * rows
        self.width = 0

    @property
    def rows(self) -> int:
        """Number of rows."""
        return len(self.lengths)

    @property
    def pending(self) -> int:
        """Slots that were written and neither committed nor forgotten."""
        return int(self.library.get_seq_length()) - self.width

    def forget(self) -> None:
        """Roll back every pending slot."""
        self._crop(self.width)

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
        lengths = [length + len(row) for length, row in zip(self.lengths, kept, strict=True)]
        in_place = all(
            length == self.width and list(row) == list(range(len(row)))
            for length, row in zip(self.lengths, kept, strict=True)
        )
        if in_place:
            # Each row keeps a prefix of what stands right behind it: cutting the tail off is enough.
            self._crop(max(lengths))
        else:
            self._gather(kept, lengths)
        self.lengths, self.width = lengths, max(lengths)

    def select_rows(self, rows: Sequence[int]) -> None:
        """Keep only these rows, in this order; pending slots must have been committed or forgotten."""
        if self.pending:
            raise CacheError("Rows cannot leave while slots are pending", remedy="commit or forget first")
        self.library.batch_select_indices(torch.tensor(list(rows), device=self._device))
        self.lengths = [self.lengths[row] for row in rows]
        self.width = max(self.lengths, default=0)
        self._crop(self.width)

    def content(self, row: int = 0) -> list[tuple[Tensor, Tensor]]:
        """Committed (keys, values) of one row for each layer, each [heads, length, head_dim]."""
        length = self.lengths[row]
        return [(layer.keys[row, :, :length], layer.values[row, :, :length]) for layer in self._layers]

    def lowest(self, shape: Sequence[int]) -> Tensor:
        """A tensor of the lowest value there is, in the dtype and on the device of the keys."""
        keys = self._layers[0].keys
        return keys.new_full(shape, torch.finfo(keys.dtype).min)

    @property
    def _layers(self) -> list[Any]:
        # The library's annotations allow for layers without keys and values; none of ours is.
        return self.library.layers

    @property
    def _device(self) -> torch.device:
        return self._layers[0].keys.device

    def _crop(self, columns: int) -> None:
        surplus = int(self.library.get_seq_length()) - columns
        if surplus > 0:
            self.library.crop(-surplus)

    def _gather(self, kept: Sequence[Sequence[int]], lengths: list[int]) -> None:
        columns = max(lengths)
        index = torch.zeros(self.rows, columns, dtype=torch.long)
        for row, (slots, old) in enumerate(zip(kept, self.lengths, strict=True)):
            index[row, :old] = torch.arange(old)
            index[row, old : old + len(slots)] = self.width + torch.tensor(list(slots), dtype=torch.long)
        index = index.to(self._device)[:, None, :, None]
        for layer in self._layers:
            layer.keys = _take(layer.keys, index)
            layer.values = _take(layer.values, index)


def _take(states: Tensor, index: Tensor) -> Tensor:
    """Gather slots: states [R, heads, slots, dim], index [R, 1, columns, 1]."""
    return states.gather(2, index.expand(-1, states.shape[1], -1, states.shape[3]))
