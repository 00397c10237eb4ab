"""Rows of a data set -> one batch with its loss positions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from jacobi_forcing.config import LossPositions, LossReduction, States
from jacobi_forcing.flexmask import padded_length
from jacobi_forcing.losses import loss_items
from jacobi_forcing.tags import PADDING, Tags


class Collator:
    """Pads rows to the longest of the batch and finds the loss positions.

    A padding token is known by its tag, never by its id: its id is 0 and is nowhere read. So it does not matter which
    padding token a tokenizer has, or whether it is the end token, or whether there is any.

    Args:
        tokenizer: Saved with the model by the library's trainer; not used otherwise.
        positions: See `loss_items`.
        reduction: See `loss_items`.
        states: With "on_policy" the loss positions are left out, as they may depend on states that are not made yet;
            `with_items` adds them.
        buckets: Lengths that batches are padded to, where kernels are compiled for each; any length by default.
        rows: Rows that a batch is filled up to with empty ones, for the same reason.
    """

    def __init__(
        self,
        tokenizer: Any = None,
        positions: LossPositions = "all",
        reduction: LossReduction = "block",
        states: States = "stored",
        buckets: Sequence[int] = (),
        rows: int = 0,
    ) -> None:
        self.tokenizer, self.states = tokenizer, states
        self.buckets, self.rows = buckets, rows
        self.positions, self.reduction = positions, reduction

    def __call__(self, rows: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
        """Make a batch.

        Args:
            rows: Items of `PackedRows`.

        Returns:
            `input_ids` [R, L], `tags` [R, 7, L], `wanted` and `noise_ratios` [blocks of the batch], and the fields of
            `LossItems`.
        """
        length = max(len(row["input_ids"]) for row in rows)
        if self.buckets:
            length = padded_length(length, self.buckets)
        count = max(len(rows), self.rows)
        ids = torch.zeros(count, length, dtype=torch.long)
        tags = torch.tensor(PADDING)[:, None].repeat(count, 1, length)
        for place, row in enumerate(rows):
            ids[place, : len(row["input_ids"])] = row["input_ids"]
            tags[place, :, : len(row["input_ids"])] = row["tags"]
        batch = {"input_ids": ids, "tags": tags}
        batch.update({name: torch.cat([row[name] for row in rows]) for name in ("wanted", "noise_ratios")})
        return batch if self.states == "on_policy" else self.with_items(batch)

    def with_items(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """The batch and its loss positions, the fields of `LossItems`."""
        items = loss_items(batch["input_ids"], Tags.of(batch["tags"]), self.positions, self.reduction)
        return {**batch, **items._asdict()}
