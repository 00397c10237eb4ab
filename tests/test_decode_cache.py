"""Gate 4: after every sweep the cache holds the KV of prompt and committed tokens, and nothing else."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from transformers import DynamicCache, PreTrainedModel

from decoding import DECODERS, prompt, reference, told_row
from jacobi_forcing import DecodeConfig
from jacobi_forcing.backbone import Backbone
from jacobi_forcing.cache import KVCache
from jacobi_forcing.decode.engine import make_row, sweeps
from jacobi_forcing.decode.rows import Row
from tiny_models import ARCHITECTURES, shared_model


@torch.no_grad()
def fresh(model: PreTrainedModel, ids: Sequence[int]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Keys and values of a text, computed at once by the model itself, for each layer."""
    cache = DynamicCache()
    model(input_ids=torch.tensor([ids]), cache=cache, use_cache=True)
    return [(layer.keys[0], layer.values[0]) for layer in cache.layers]


def check(model: PreTrainedModel, rows: Sequence[Row], cache: KVCache) -> None:
    assert cache.pending == 0
    assert cache.width == max(cache.lengths)
    for index, row in enumerate(rows):
        # The KV of the last known token is computed by the next sweep.
        committed = [*row.prompt, *row.generated[:-1]]
        assert cache.lengths[index] == len(committed)
        for (keys, values), (expected_keys, expected_values) in zip(
            cache.content(index), fresh(model, committed), strict=True
        ):
            torch.testing.assert_close(keys, expected_keys, atol=1e-5, rtol=1e-5)
            torch.testing.assert_close(values, expected_values, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("decoder", DECODERS)
def test_the_cache_of_one_row_equals_a_fresh_computation(arch: str, decoder: str) -> None:
    model = shared_model(arch)
    config = DecodeConfig(decoder=decoder, block_size=4)
    for row in (
        make_row(Backbone(model), prompt(), config, [], 12),
        told_row(prompt(), reference(arch), config, 24),
    ):
        for rows, cache in sweeps(Backbone(model), [row]):
            check(model, rows, cache)
        assert row.finished


@pytest.mark.parametrize("arch", ["llama", "gemma3", "gpt2"])
@pytest.mark.parametrize("decoder", DECODERS)
def test_the_cache_of_unequal_rows_equals_fresh_computations(arch: str, decoder: str) -> None:
    model = shared_model(arch)
    config = DecodeConfig(decoder=decoder, block_size=4)
    started = [
        told_row(prompt(length), reference(arch, length), config, budget, wrong=0.3)
        for length, budget in ((3, 20), (40, 6), (11, 13))
    ]
    at_work = []
    for rows, cache in sweeps(Backbone(model), started):
        assert cache.rows == len(rows)
        check(model, rows, cache)
        at_work.append(len(rows))
    assert at_work[0] == 3
    assert at_work[-1] < 3
    assert sum(at_work) == sum(row.stats.forwards for row in started)


@pytest.mark.parametrize("decoder", DECODERS)
def test_nothing_accepted_behind_an_end_token_stays_in_the_cache(decoder: str) -> None:
    text = reference("llama")
    config = DecodeConfig(decoder=decoder, block_size=8)
    for offset in range(9):
        row = told_row(prompt(), text, config, 24, eos_ids=[text[offset]], wrong=0.0)
        for rows, cache in sweeps(Backbone(shared_model("llama")), [row]):
            check(shared_model("llama"), rows, cache)
