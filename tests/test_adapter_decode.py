"""The adapter drafts, the base verifies: the text is the untouched base's own, whatever the adapter says."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from decoding import DECODERS, library, ours, prompt, reference
from jacobi_forcing import DecodeConfig, generate
from jacobi_forcing.adapter import GatedAdapter
from jacobi_forcing.backbone import Backbone
from jacobi_forcing.blocks import truncate
from jacobi_forcing.decode.engine import make_row, run, sweeps
from test_adapter import adapted
from test_decode_cache import check
from tiny_models import ARCHITECTURES, shared_model, tiny_model

each_architecture = pytest.mark.parametrize("arch", ARCHITECTURES)
each_decoder = pytest.mark.parametrize("decoder", DECODERS)


@functools.cache
def shared_adapted(arch: str) -> PreTrainedModel:
    """A base with a random adapter, so that drafts are wrong often; for tests that do not change it."""
    return adapted(arch)[0]


@each_architecture
@each_decoder
def test_the_text_is_the_bases_own(arch: str, decoder: str) -> None:
    for block_size in (1, 2, 8):
        assert ours(shared_adapted(arch), prompt(), 40, decoder=decoder, block_size=block_size) == reference(arch)


@each_architecture
def test_fifty_prompts_in_one_batch(arch: str) -> None:
    backbone = Backbone(shared_adapted(arch))
    for decoder in ("window", "multiblock"):
        config = DecodeConfig(decoder, 8, candidates=2)
        ids = [prompt(3 + seed % 9, seed) for seed in range(50)]
        rows = [make_row(backbone, row, config, [], 12) for row in ids]
        run(backbone, rows)
        for row, text in zip(rows, ids, strict=True):
            assert row.generated == library(shared_model(arch), text, 12)


@each_architecture
@each_decoder
def test_what_is_committed_is_the_bases_kv(arch: str, decoder: str) -> None:
    backbone = Backbone(shared_adapted(arch))
    config = DecodeConfig(decoder, 4)
    rows = [make_row(backbone, prompt(length), config, [], 16) for length in (3, 40, 11)]
    for seats, cache in sweeps(backbone, rows):
        check(shared_model(arch), seats, cache)


@each_architecture
def test_the_next_draft_is_what_the_adapter_predicts_behind_the_bases_kv(arch: str) -> None:
    model = shared_adapted(arch)
    adapter = GatedAdapter.of(model)
    assert adapter is not None
    row = make_row(Backbone(model), prompt(), DecodeConfig("window", 6), [], 40)
    before = [list(row.text), list(row.guesses), 0]
    changed = 0
    for _ in sweeps(Backbone(model), [row]):
        text, guesses, skipped = before
        # The known text once through the base, and its last token with the draft once more through the adapter, at the
        # positions behind the text but for that token. Seen from there the base's copy of that token does not exist.
        # Guesses that are nearly sure to be right go through the base alone, and the draft builds on its copies.
        ids = torch.tensor([[*text[:-1], text[-1], *guesses]])
        gate = torch.arange(len(text) - 1 + skipped, ids.shape[1])
        with torch.no_grad(), adapter.gated(gate):
            predicted = model(input_ids=ids).logits.argmax(-1)[0, len(text) - 1 :].tolist()
        with torch.no_grad():
            plain = model(input_ids=ids).logits.argmax(-1)[0, len(text) - 1 :].tolist()
        added = len(row.text) - len(text)
        leftover = predicted[added:]
        assert row.guesses[: len(leftover)] == leftover[: len(row.guesses)]
        changed += leftover != plain[added:]
        before = [list(row.text), list(row.guesses), row.skipped]
    assert changed > 5


def test_guesses_are_verified_as_far_as_they_are_likely_to_be_right() -> None:
    row = make_row(Backbone(shared_adapted("llama")), prompt(), DecodeConfig("window", 8), [], 40)
    verify, draft = row.propose()
    assert (verify.ids, len(draft.ids), draft.gated, draft.follows) == (prompt(), 9, True, True)
    # One token is known; eight are predicted behind it, of which seven fit in the window. Chances multiply up.
    row.absorb([5, *range(20, 29)], [1.0, 1.0, 0.5, 0.5, 0.5, 0.3, 1.0, 1.0, 1.0, 1.0])
    verify, draft = row.propose()
    assert draft.ids == [5, *range(21, 28)]
    assert verify.ids == [5, 21, 22, 23]
    sure = [0.0] * 4 + [0.0] * 4 + [1.0] * 4
    row.absorb([21, 22, 23, 40, *range(30, 38)], sure)
    # Three guesses and the base's 40 were added; four predictions are left, and three slots of fresh fill behind them.
    # Fill is never verified; what is nearly sure to be right is not drafted again.
    verify, draft = row.propose()
    assert verify.ids == [40, 34, 35, 36, 37]
    assert (draft.ids[0], len(draft.ids), draft.lead) == (37, 4, [34, 35, 36])
    assert (draft.start, draft.follows) == (verify.start + 4, True)


def test_a_draft_that_builds_on_guesses_goes_on_with_the_bases_predictions_where_they_were_wrong() -> None:
    row = make_row(Backbone(shared_adapted("llama")), prompt(), DecodeConfig("window", 6), [], 40)
    row.propose()
    row.absorb([5, *range(20, 27)], [1.0] * 8)
    verify, draft = row.propose()
    assert (verify.ids, draft.ids) == ([5, 21, 22, 23, 24, 25], [25])
    # The first guess is right, the second wrong: its slot tells 41, and what the base said behind it is all there is.
    row.absorb([21, 41, 42, 43, 44, 45, 50], [0.6] * 7)
    assert row.text[-2:] == [21, 41]
    assert row.guesses[:4] == [42, 43, 44, 50]


@pytest.mark.parametrize("decoder", ["jacobi", "window", "recycle", "multiblock"])
def test_an_end_token_ends_the_text_at_any_offset(decoder: str) -> None:
    for offset in range(12):
        end = reference("llama")[offset]
        found = ours(shared_adapted("llama"), prompt(), 40, decoder=decoder, block_size=4, eos_token_id=end)
        assert found == truncate(reference("llama"), [end], 40)


@each_architecture
def test_a_right_draft_is_accepted_whole(arch: str) -> None:
    """An adapter whose product is zero drafts like the base: counts are those of plain decoding but for the prefill."""
    model = tiny_model(arch)
    GatedAdapter.attach(model, rank=2)
    texts = {}
    for name, candidate in (("apart", model), ("plain", shared_model(arch))):
        row = make_row(Backbone(candidate), [7] * 6, DecodeConfig("window", 8), [], 30)
        run(Backbone(candidate), [row])
        texts[name] = (row.generated, row.stats.forwards)
    assert texts["apart"][0] == texts["plain"][0]
    assert abs(texts["apart"][1] - texts["plain"][1]) <= 3


def test_the_library_finds_the_adapter_by_itself(tmp_path: Path) -> None:
    ids = torch.tensor([prompt()])
    adapted("llama")[1].save(tmp_path)
    model = tiny_model("llama")
    GatedAdapter.load(model, tmp_path)
    out = model.generate(
        ids,
        custom_generate=generate,
        decode=DecodeConfig("window", 8),
        max_new_tokens=20,
        return_dict_in_generate=True,
    )
    assert out.sequences[0, 11:].tolist() == reference("llama")[:20]
    # The prompt twice over its last token, then verify and draft lines side by side.
    assert out.stats.rows[0].sweeps[0].slots == 11 + 9
    assert 9 <= out.stats.rows[0].sweeps[1].slots <= 8 + 8
    assert model.generate(ids, do_sample=False, max_new_tokens=20)[0, 11:].tolist() == reference("llama")[:20]


@each_architecture
def test_sampled_text_is_the_bases_own_too(arch: str) -> None:
    sampling = {"do_sample": True, "temperature": 0.8, "top_k": 20, "max_new_tokens": 16, "pad_token_id": 0}
    ids = torch.tensor([prompt()])
    for seed in range(3):
        expected = generate(shared_model(arch), ids, decode=DecodeConfig("ar", sample_seed=seed), **sampling)
        for decoder in DECODERS:
            decode = DecodeConfig(decoder, 6, sample_seed=seed)
            assert torch.equal(generate(shared_adapted(arch), ids, decode=decode, **sampling), expected)


def test_penalties_and_stop_criteria_hold_for_the_bases_text() -> None:
    ids = torch.tensor([prompt()])
    options = {"repetition_penalty": 1.3, "no_repeat_ngram_size": 2, "max_new_tokens": 30, "do_sample": False}
    expected = shared_model("llama").generate(ids, **options)
    for decoder in DECODERS:
        found = generate(shared_adapted("llama"), ids, decode=DecodeConfig(decoder, 6), **options)
        assert torch.equal(found, expected)
