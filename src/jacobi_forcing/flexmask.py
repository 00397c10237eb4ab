"""The mask of packed rows for FlexAttention: the same rule as the dense mask, kept as a rule instead of a square.

A dense mask of a row of L tokens is L x L values. A `BlockMask` says for each square of 128 x 128 whether it is empty,
whole or mixed, and only for mixed ones is the rule asked again, inside the kernel. The rule is `mask.sees`, read off
the tag table.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from jacobi_forcing.backbone import Backbone, MaskLike
from jacobi_forcing.errors import ConfigError
from jacobi_forcing.mask import sees, visible
from jacobi_forcing.tags import Tags

SQUARE = 128
"""Tokens along the edge of a square, what the kernels are made for."""
STRIP = 8
"""Squares of queries whose visibility exists at a time while the squares are sorted."""


def bucket_lengths(max_length: int) -> tuple[int, ...]:
    """The lengths that rows of at most `max_length` tokens are padded to: a half, three quarters, and the whole of it.

    Each is rounded up to whole squares. So a kernel is compiled for three lengths at most, whatever the rows are.
    """
    return tuple(sorted({-(-max_length * quarters // (4 * SQUARE)) * SQUARE for quarters in (2, 3, 4)}))


def padded_length(length: int, buckets: Sequence[int]) -> int:
    """The shortest of the buckets that holds a row.

    Raises:
        ConfigError: The row is longer than all of them.
    """
    for bucket in sorted(buckets):
        if length <= bucket:
            return bucket
    raise ConfigError("A row is longer than every bucket", seen=length, expected=f"at most {max(buckets)} tokens")


def row_mask(backbone: Backbone, tags: Tags, mask: str, *, flex: bool) -> MaskLike:
    """What the model's layers take for packed rows.

    Args:
        backbone: The model.
        tags: Of the rows, each [R, L].
        mask: One of `mask.KINDS`.
        flex: As a `BlockMask`, for a model that runs FlexAttention; else as an additive mask [R, 1, L, L].

    Returns:
        A mask, or one for each kind of layer where kinds are mixed.
    """
    if not flex:
        return backbone.attention_mask(visible(tags, tags, mask), tags.position, tags.position)
    masks = {kind: block_mask(tags, mask, window) for kind, window in backbone.windows.items()}
    return masks if len(masks) > 1 else next(iter(masks.values()))


def block_mask(tags: Tags, mask: str, window: int | None = None) -> BlockMask:
    """Sort the squares of the mask, without ever making the whole of it.

    Args:
        tags: Of the rows, each [R, L]; L is a multiple of `SQUARE`.
        mask: One of `mask.KINDS`.
        window: Sliding window of the layers, tokens; None where they see everything.

    Raises:
        ConfigError: The rows have another length, or there is no such mask.
    """
    length = tags.sample.shape[-1]
    if length % SQUARE:
        expected = f"a multiple of {SQUARE}"
        raise ConfigError("Rows have a wrong length for FlexAttention", seen=length, expected=expected)
    counts = torch.cat([_counts(tags, strip, mask, window) for strip in _strips(tags)], dim=1)
    whole, some = counts == SQUARE * SQUARE, counts > 0
    return BlockMask.from_kv_blocks(
        *_lists(some & ~whole),
        *_lists(whole),
        BLOCK_SIZE=SQUARE,
        mask_mod=_rule(tags, mask, window),
        seq_lengths=(length, length),
    )


def _rule(tags: Tags, mask: str, window: int | None):  # type: ignore[no-untyped-def]  # torch names the type nowhere public
    """Whether query `q` of row `b` sees key `k`; the heads are alike."""
    columns = Tags(*(column.to(torch.int32).contiguous() for column in tags))

    def rule(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        query, key = Tags(*(column[b, q] for column in columns)), Tags(*(column[b, k] for column in columns))
        seen = sees(query, key, mask)
        return seen if window is None else seen & (query.position - key.position < window)

    return rule


def _strips(tags: Tags) -> list[Tags]:
    return [Tags(*strip) for strip in zip(*(column.split(STRIP * SQUARE, dim=-1) for column in tags), strict=True)]


def _counts(tags: Tags, strip: Tags, mask: str, window: int | None) -> Tensor:
    """How many pairs of each square may look, for a strip of queries [R, squares of queries, squares of keys]."""
    seen = visible(strip, tags, mask)
    if window is not None:
        seen = seen & (strip.position[..., :, None] - tags.position[..., None, :] < window)
    rows, queries, keys = seen.shape
    return seen.view(rows, queries // SQUARE, SQUARE, keys // SQUARE, SQUARE).sum(dim=(2, 4))


def _lists(chosen: Tensor) -> tuple[Tensor, Tensor]:
    """For each square of queries how many squares of keys are chosen, and which, those first [R, 1, …]."""
    count = chosen.sum(dim=-1, dtype=torch.int32)
    order = chosen.to(torch.int8).argsort(dim=-1, descending=True, stable=True).to(torch.int32)
    return count[:, None].contiguous(), order[:, None].contiguous()
