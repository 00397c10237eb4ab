"""Every decoder at every setting on fifty prompts: the ids of the library's greedy generate, in fp32."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from decoding import prompt
from jacobi_forcing import DecodeConfig
from jacobi_forcing.backbone import Backbone
from jacobi_forcing.decode.engine import make_row, run
from tiny_models import ARCHITECTURES, shared_model

PROMPTS, TOKENS = 50, 16
BLOCK_SIZES, BLOCKS, CANDIDATES = (2, 4, 16, 64), (1, 2, 3), (0, 1, 4)


def prompts() -> list[list[int]]:
    """Half of them wander, half repeat themselves, so that the pool has something to offer."""
    return [prompt(12, seed) if seed % 2 else prompt(4, seed) * 3 for seed in range(PROMPTS)]


@functools.cache
def expected(arch: str) -> list[list[int]]:
    ids = torch.tensor(prompts())
    return shared_model(arch).generate(ids, do_sample=False, max_new_tokens=TOKENS)[:, 12:].tolist()


def settings(decoder: str) -> Iterator[dict[str, Any]]:
    for candidates in CANDIDATES if decoder in ("recycle", "multiblock") else (4,):
        for num_blocks in BLOCKS if decoder == "multiblock" else (2,):
            yield {"candidates": candidates, "num_blocks": num_blocks}


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("block_size", BLOCK_SIZES)
@pytest.mark.parametrize("decoder", ["jacobi", "window", "recycle", "multiblock"])
def test_lossless_means_the_same_ids(arch: str, decoder: str, block_size: int) -> None:
    backbone = Backbone(shared_model(arch))
    for options in settings(decoder):
        config = DecodeConfig(decoder=decoder, block_size=block_size, **options)
        rows = [make_row(backbone, ids, config, [], TOKENS) for ids in prompts()]
        run(backbone, rows)
        assert [row.generated for row in rows] == expected(arch), options
