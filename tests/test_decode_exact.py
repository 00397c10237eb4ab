"""Gate 3: every greedy decoder equals the library's own greedy generate, token for token, in fp32."""

from __future__ import annotations

import pytest
import torch

from decoding import DECODERS, first_met_at, library, ours, prompt, reference, told_row
from jacobi_forcing import DecodeConfig, generate
from jacobi_forcing.backbone import Backbone
from jacobi_forcing.blocks import truncate
from jacobi_forcing.decode.engine import make_row, run
from tiny_models import ARCHITECTURES, VOCAB, shared_model, tiny_model

PARALLEL = ("jacobi", "window", "recycle", "multiblock")
BLOCK_SIZES = (1, 2, 3, 4, 16, 64)
each_architecture = pytest.mark.parametrize("arch", ARCHITECTURES)


@each_architecture
def test_ar_equals_the_library(arch: str) -> None:
    assert ours(shared_model(arch), prompt(), 40, decoder="ar") == reference(arch)


@each_architecture
@pytest.mark.parametrize("block_size", BLOCK_SIZES)
def test_parallel_decoders_equal_the_library_at_every_block_size(arch: str, block_size: int) -> None:
    for decoder in PARALLEL:
        assert ours(shared_model(arch), prompt(), 40, decoder=decoder, block_size=block_size) == reference(arch)


@each_architecture
@pytest.mark.parametrize("decoder", PARALLEL)
def test_runs_of_every_length_are_accepted_without_a_change(arch: str, decoder: str) -> None:
    """Random models seldom guess right, so these drafts are told the truth, with mistakes."""
    lengths: set[int] = set()
    for block_size in (2, 4, 16):
        for wrong in (0.0, 0.3):
            config = DecodeConfig(decoder=decoder, block_size=block_size, num_blocks=1)
            row = told_row(prompt(), reference(arch), config, 40, wrong=wrong)
            run(Backbone(shared_model(arch)), [row])
            assert row.generated == reference(arch)
            lengths |= set(row.stats.accepted)
    assert {1, 2, 3, 4, 16} <= lengths


@each_architecture
@pytest.mark.parametrize("block_size", [4, 16])
def test_an_end_token_at_any_offset_of_a_block_ends_the_text(arch: str, block_size: int) -> None:
    model = shared_model(arch)
    for offset in range(block_size + 1):
        ids, end = first_met_at(arch, offset)
        expected = library(model, ids, 40, eos_token_id=end, pad_token_id=0)
        assert len(expected) == offset + 1
        for decoder in PARALLEL:
            found = ours(model, ids, 40, decoder=decoder, block_size=block_size, eos_token_id=end, pad_token_id=0)
            assert found == expected


@pytest.mark.parametrize("decoder", PARALLEL)
@pytest.mark.parametrize("block_size", [4, 16])
def test_an_end_token_inside_an_accepted_run_ends_the_text(decoder: str, block_size: int) -> None:
    text = reference("gpt2")
    config = DecodeConfig(decoder=decoder, block_size=block_size)
    for offset in range(2 * block_size + 1):
        row = told_row(prompt(), text, config, 40, eos_ids=[text[offset]], wrong=0.0)
        run(Backbone(shared_model("gpt2")), [row])
        assert row.generated == truncate(text, [text[offset]], 40)


@each_architecture
def test_the_first_of_several_end_tokens_ends_the_text(arch: str) -> None:
    model = shared_model(arch)
    ids, late = first_met_at(arch, 9)
    early = library(model, ids, 40)[3]
    for ends in ([late, early], [early, late]):
        expected = library(model, ids, 40, eos_token_id=ends, pad_token_id=0)
        assert len(expected) <= 4
        for decoder in DECODERS:
            assert ours(model, ids, 40, decoder=decoder, eos_token_id=ends, pad_token_id=0) == expected


@each_architecture
def test_without_an_end_token_there_are_exactly_as_many_tokens_as_asked(arch: str) -> None:
    model = tiny_model(arch, eos_token_id=[*range(VOCAB)])
    expected = library(model, prompt(), 17, eos_token_id=None, pad_token_id=0)
    assert len(expected) == 17
    for decoder in DECODERS:
        assert len(ours(model, prompt(), 17, decoder=decoder, pad_token_id=0)) == 1
        assert ours(model, prompt(), 17, decoder=decoder, eos_token_id=None, pad_token_id=0) == expected


@each_architecture
@pytest.mark.parametrize("block_size", [1, 3, 16])
def test_a_budget_that_is_no_multiple_of_the_block_size_is_kept(arch: str, block_size: int) -> None:
    for budget in {1, block_size - 1, block_size, block_size + 1, 2 * block_size + 1} - {0}:
        for decoder in DECODERS:
            found = ours(shared_model(arch), prompt(), budget, decoder=decoder, block_size=block_size)
            assert found == reference(arch)[:budget]


@each_architecture
@pytest.mark.parametrize("draft_init", ["prompt", "vocabulary", "last", "pool"])
def test_the_draft_seed_and_fill_do_not_leak_into_the_text(arch: str, draft_init: str) -> None:
    settings = {"draft_init": draft_init, "block_size": 8, "vocabulary": range(VOCAB)}
    for seed in range(5):
        decoder = PARALLEL[seed % len(PARALLEL)]
        found = ours(shared_model(arch), prompt(), 40, decoder=decoder, draft_seed=seed, **settings)
        assert found == reference(arch)


def _left_padded(prompts: list[list[int]], pad: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    longest = max(map(len, prompts))
    ids = torch.tensor([[pad] * (longest - len(row)) + row for row in prompts])
    mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in prompts])
    return ids, mask


@each_architecture
@pytest.mark.parametrize("decoder", DECODERS)
def test_each_row_of_an_unequal_batch_equals_its_batch_of_one(arch: str, decoder: str) -> None:
    model, lengths = shared_model(arch), (3, 7, 11, 40)
    texts = [reference(arch, length) for length in lengths]
    # Ends at different times, so that rows leave the batch; the text of a row that has ended is padded.
    end = texts[1][5]
    ids, mask = _left_padded([prompt(length) for length in lengths])
    out = generate(
        model,
        ids,
        attention_mask=mask,
        decode=DecodeConfig(decoder=decoder, block_size=4),
        max_new_tokens=40,
        eos_token_id=end,
        pad_token_id=60,
        return_dict_in_generate=True,
    )
    for length, text, found, stats in zip(lengths, texts, out.sequences[:, 40:].tolist(), out.stats.rows, strict=True):
        expected = truncate(text, [end], 40)
        assert found[: len(expected)] == expected
        assert set(found[len(expected) :]) <= {60}
        alone = ours(model, prompt(length), 40, decoder=decoder, block_size=4, eos_token_id=end, pad_token_id=60)
        assert alone == expected
        assert stats.tokens == len(expected)


@each_architecture
def test_unequal_rows_that_accept_runs_of_unequal_length_do_not_mix(arch: str) -> None:
    lengths = (3, 7, 11, 40)
    config = DecodeConfig(block_size=8)
    rows = [
        told_row(prompt(length), reference(arch, length), config, 20 + 4 * index, wrong=0.3 * (index % 2))
        for index, length in enumerate(lengths)
    ]
    run(Backbone(shared_model(arch)), rows)
    for index, (row, length) in enumerate(zip(rows, lengths, strict=True)):
        assert row.generated == reference(arch, length)[: 20 + 4 * index]
    assert len({row.stats.forwards for row in rows}) > 1


@pytest.mark.parametrize(
    ("arch", "settings"),
    [
        ("gemma3", {"layer_types": ["sliding_attention", "sliding_attention"]}),
        ("gemma3", {}),
        ("mistral", {"sliding_window": 6}),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1}),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 0}),
    ],
)
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_a_sliding_window_shorter_than_the_text_is_kept(arch: str, settings: dict[str, object], attention: str) -> None:
    model = tiny_model(arch, attn_implementation=attention, **settings)
    assert 6 in Backbone(model).windows.values()
    texts = {length: library(model, prompt(length), 24) for length in (3, 11, 40)}
    for decoder in DECODERS:
        for length, text in texts.items():
            assert ours(model, prompt(length), 24, decoder=decoder, block_size=8) == text
    config = DecodeConfig(block_size=8)
    rows = [told_row(prompt(length), text, config, 24) for length, text in texts.items()]
    run(Backbone(model), rows)
    assert [row.generated for row in rows] == list(texts.values())


@each_architecture
def test_eager_attention_gives_the_same_text(arch: str) -> None:
    model = tiny_model(arch, attn_implementation="eager")
    expected = [library(model, prompt(length), 24) for length in (3, 11)]
    for decoder in DECODERS:
        config = DecodeConfig(decoder=decoder, block_size=8)
        rows = [make_row(Backbone(model), prompt(length), config, [], 24) for length in (3, 11)]
        run(Backbone(model), rows)
        assert [row.generated for row in rows] == expected
