"""Token arithmetic on plain tensors: blocks, prefixes, noise ratios, ends, rows to fill. No model in here."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from jacobi_forcing.errors import ConfigError


def split(ids: Sequence[int], block_size: int) -> list[list[int]]:
    """Cut a response into blocks of `block_size` tokens; the last one may be shorter.

    Raises:
        ConfigError: `block_size` is below 1.
    """
    if block_size < 1:
        raise ConfigError("The block size is too small", seen=block_size, expected="at least 1 token")
    return [list(ids[start : start + block_size]) for start in range(0, len(ids), block_size)]


def accepted_prefix(draft: Tensor, predictions: Tensor) -> Tensor:
    """Length of the accepted prefix of each draft.

    Slot 0 of a draft is right by construction; slot i+1 is right when it equals the prediction made at slot i and
    every slot before it is right.

    Args:
        draft: Token ids [..., n].
        predictions: The greedy next token at every slot [..., n].

    Returns:
        Lengths [...] from 1 to n, int64.
    """
    agrees = (draft[..., 1:] == predictions[..., :-1]).long()
    return 1 + agrees.cumprod(dim=-1).sum(dim=-1)


def common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """Number of leading tokens in which two sequences agree."""
    for index, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return index
    return min(len(a), len(b))


def noise_ratio(state: Sequence[int], fixed_point: Sequence[int]) -> float:
    """(n - length of the prefix that equals the fixed point) / n, for one state of a block of n tokens."""
    return (len(fixed_point) - common_prefix(state, fixed_point)) / len(fixed_point)


def first_eos(ids: Sequence[int] | Tensor, eos_ids: Sequence[int]) -> int | None:
    """Index of the first token that ends a text, or None."""
    values = ids.tolist() if isinstance(ids, torch.Tensor) else ids
    ends = set(eos_ids)
    return next((index for index, token in enumerate(values) if token in ends), None)


def truncate(ids: Sequence[int], eos_ids: Sequence[int], max_new_tokens: int) -> list[int]:
    """The generated tokens that count: up to and with the first EOS, never more than `max_new_tokens`."""
    kept = list(ids[:max_new_tokens])
    end = first_eos(kept, eos_ids)
    return kept if end is None else kept[: end + 1]


def first_fit(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Put items into rows, each into the first row with room, in the order given.

    Args:
        lengths: Length of each item, none above `capacity`.
        capacity: Room in a row.

    Returns:
        The items of each row, by index.
    """
    rows: list[list[int]] = []
    room: list[int] = []
    # Rows too full for the shortest item are left out, or the search would grow with the square of the data.
    candidates: list[int] = []
    shortest = min(lengths, default=0)
    for item, length in enumerate(lengths):
        row = next((index for index in candidates if room[index] >= length), None)
        if row is None:
            row = len(rows)
            rows.append([])
            room.append(capacity)
            candidates.append(row)
        rows[row].append(item)
        room[row] -= length
        if room[row] < shortest:
            candidates.remove(row)
    return rows
