"""Who sees whom in a packed row, from the tags alone (paper, Fig. 2).

Prompt of 2 tokens, block size 2, two blocks; k is noisy, c is clean:

    noise_conditioned (Fig. 2b)               clean_context (Fig. 2a, CLLM)
          P P k k c c k k c c                       P P k k c c k k c c
    P0    1 . . . . . . . . .                 P0    1 . . . . . . . . .
    P1    1 1 . . . . . . . .                 P1    1 1 . . . . . . . .
    k0a   1 1 1 . . . . . . .                 k0a   1 1 1 . . . . . . .
    k0b   1 1 1 1 . . . . . .                 k0b   1 1 1 1 . . . . . .
    c0a   1 1 . . 1 . . . . .                 c0a   1 1 . . 1 . . . . .
    c0b   1 1 . . 1 1 . . . .                 c0b   1 1 . . 1 1 . . . .
    k1a   1 1 1 1 . . 1 . . .                 k1a   1 1 . . 1 1 1 . . .
    k1b   1 1 1 1 . . 1 1 . .                 k1b   1 1 . . 1 1 1 1 . .
    c1a   1 1 . . 1 1 . . 1 .                 c1a   1 1 . . 1 1 . . 1 .
    c1b   1 1 . . 1 1 . . 1 1                 c1b   1 1 . . 1 1 . . 1 1

noise_conditioned_window lies between the two: a noisy block sees the noisy blocks of its own window, and clean blocks
before it. That is what decoding shows: what was committed is clean, what is in flight is noisy. intra_window_clean
(NC-IC, Table 5) is the other way about: clean blocks of its own window, and noisy ones of earlier windows.
"""

from __future__ import annotations

import torch
from torch import Tensor

from jacobi_forcing.errors import ConfigError
from jacobi_forcing.tags import Kind, Tags

# Plain numbers: inside a kernel an enumeration would be in the way.
_PROMPT, _NOISY, _CLEAN = int(Kind.PROMPT), int(Kind.NOISY), int(Kind.CLEAN)
KINDS = ("noise_conditioned", "noise_conditioned_window", "intra_window_clean", "clean_context")


def visible(queries: Tags, keys: Tags, mask: str) -> Tensor:
    """Whether each query token may look at each key token.

    Clean tokens see the prompt and clean tokens, in every mask: they are the model's plain reading of the text. What a
    noisy token sees before its own block is what the masks differ in: noisy blocks, or clean ones. Padding sees
    padding alone, and no sample sees another.

    Args:
        queries: Tags [..., Q].
        keys: Tags [..., K].
        mask: One of `KINDS`.

    Returns:
        bool [..., Q, K].

    Raises:
        ConfigError: There is no such mask.
    """
    # Narrow integers: on a CPU these comparisons over Q x K are most of what a mask costs.
    queries, keys = (Tags(*(column.to(torch.int32) for column in tags)) for tags in (queries, keys))
    across, down = Tags(*(column[..., :, None] for column in queries)), Tags(*(column[..., None, :] for column in keys))
    return sees(across, down, mask)


def sees(query: Tags, key: Tags, mask: str) -> Tensor:
    """The rule behind `visible`, element by element: also what a FlexAttention kernel asks for a single pair.

    Args:
        query: Tags of any shape.
        key: Tags of the same shape, or one that is broadcast with it.
        mask: One of `KINDS`.

    Raises:
        ConfigError: There is no such mask.
    """
    if mask not in KINDS:
        raise ConfigError("Unknown mask", seen=repr(mask), expected="one of " + ", ".join(KINDS))
    stream = query.kind == key.kind
    if mask != "noise_conditioned":
        # Where a noisy token sees noise; elsewhere it sees clean tokens.
        window = query.window == key.window
        noise = window if mask == "noise_conditioned_window" else query.block == key.block
        if mask == "intra_window_clean":
            noise = noise | ~window
        noisy = query.kind == _NOISY
        stream = (stream & (~noisy | noise)) | (noisy & (key.kind == _CLEAN) & ~noise)
    seen = stream | (key.kind == _PROMPT)
    # A noisy token shares its position with its twin, so "not later in the text" holds in every stream alike.
    return seen & (key.position <= query.position) & (query.sample == key.sample)
