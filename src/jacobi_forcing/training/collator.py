"""Rows of a data set -> one batch with its loss positions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from jacobi_forcing.config import LossPositions, LossReduction
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
    """

    def __init__(
        self, tokenizer: Any = None, positions: LossPositions = "all", reduction: LossReduction = "block"
    ) -> None:
        self.tokenizer = tokenizer
        self.positions, self.reduction = positions, reduction

    def __call__(self, rows: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
        """Make a batch.

        Args:
            rows: Items of `PackedRows`.

        Returns:
            `input_ids` [R, L], `tags` [R, 7, L], `noise_ratios` [blocks of the batch], and the fields of `LossItems`.
        """
        length = max(len(row["input_ids"]) for row in rows)
        ids = torch.stack([pad(row["input_ids"], (0, length - len(row["input_ids"]))) for row in rows])
        tags = torch.tensor(PADDING)[:, None].repeat(len(rows), 1, length)
        for table, row in zip(tags, rows, strict=True):
            table[:, : len(row["input_ids"])] = row["tags"]
        return {
            "input_ids": ids,
            "tags": tags,
            "noise_ratios": torch.cat([row["noise_ratios"] for row in rows]),
            **loss_items(ids, Tags.of(tags), self.positions, self.reduction)._asdict(),
        }
