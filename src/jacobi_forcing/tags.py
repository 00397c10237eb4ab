"""The tag table: what each token of a packed row is, and how a sample lies in a row.

A response of two blocks behind its prompt becomes `[prompt][k_0][c_0][k_1][c_1]`: k_i is a trajectory state of block i
(noisy), c_i its fixed point (clean), and the two share their positions. Several samples may share a row.

Positions, the attention mask and the pairs of the losses all follow from the tags; no other place knows the layout.
"""

from __future__ import annotations

import functools
from enum import IntEnum
from typing import NamedTuple

import torch
from torch import Tensor


class Kind(IntEnum):
    """What a token of a packed row is."""

    PROMPT = 0
    NOISY = 1
    CLEAN = 2
    PAD = 3


class Tags(NamedTuple):
    """The tag table: for every token of a row [L], or of several rows [R, L], int64.

    Attributes:
        sample: Which sample of its row it belongs to, from 0; -1 for padding.
        kind: A `Kind`.
        block: Index of its block in the response; -1 outside a response.
        offset: Its slot in the block; -1 outside a response.
        position: Its position in the sample's text, from 0; a noisy token has its clean twin's.
        window: Which noise cycle its block belongs to (phase counted in); -1 outside a response.
        ends: 1 where a finished response ends: nothing may be predicted from there.
    """

    sample: Tensor
    kind: Tensor
    block: Tensor
    offset: Tensor
    position: Tensor
    window: Tensor
    ends: Tensor

    @classmethod
    def of(cls, table: Tensor) -> Tags:
        """The columns of a table [..., 7, L], which is how a row carries its tags."""
        return cls(*table.unbind(-2))

    def table(self) -> Tensor:
        """All columns as one tensor [..., 7, L]."""
        return torch.stack(tuple(self), dim=-2)


PADDING = (-1, Kind.PAD, -1, -1, 0, -1, 0)
"""The tag of a padding token, column by column. Its position is 0, which every model has."""


@functools.lru_cache(maxsize=512)
def layout(prompt_length: int, response_length: int, block_size: int, finished: bool) -> tuple[Tensor, Tensor]:
    """How one sample lies in a row.

    Args:
        prompt_length: Tokens of the prompt.
        response_length: Tokens of the response, blocks of `block_size` with a shorter last one.
        block_size: n.
        finished: Whether the response's last token ends the text.

    Returns:
        The table of its tags [7, L] with L = prompt + 2 * response (sample is 0, windows are not filled in), and for
        each slot the index of its token in prompt + noisy blocks + clean blocks [L]. They are cached: do not write.
    """
    slot = torch.arange(response_length)
    is_clean = torch.arange(2).repeat_interleave(response_length)
    slot = slot.repeat(2)
    # Sorting by block, noisy before clean, is all there is to the layout; it leaves the order in each block alone.
    order = (slot // block_size * 2 + is_clean).argsort(stable=True)
    slot, is_clean = slot[order], is_clean[order]
    prompt = torch.arange(prompt_length)
    outside = torch.full((prompt_length,), -1)
    tags = Tags(
        sample=torch.zeros(prompt_length + 2 * response_length, dtype=torch.long),
        kind=torch.cat([torch.full_like(prompt, Kind.PROMPT), torch.where(is_clean == 1, Kind.CLEAN, Kind.NOISY)]),
        block=torch.cat([outside, slot // block_size]),
        offset=torch.cat([outside, slot % block_size]),
        position=torch.cat([prompt, prompt_length + slot]),
        window=torch.full((prompt_length + 2 * response_length,), -1),
        ends=torch.cat([torch.zeros_like(prompt), ((slot == response_length - 1) & finished).long()]),
    )
    return tags.table(), torch.cat([prompt, prompt_length + order])
