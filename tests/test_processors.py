"""Logits processors at every slot: each decoder gives the library's own text, whatever stands in its list."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    PrefixConstrainedLogitsProcessor,
    PreTrainedModel,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
)
from transformers.generation import logits_process

from decoding import DECODERS, first_met_at, prompt, reference, told_row
from jacobi_forcing import DecodeConfig
from jacobi_forcing.backbone import Backbone
from jacobi_forcing.blocks import truncate
from jacobi_forcing.decode.engine import make_row, run
from jacobi_forcing.decode.rows import Row
from jacobi_forcing.decode.sampling import IGNORE_PREFIX, READ_CONTENT, READ_LENGTH, make_choose
from jacobi_forcing.errors import ConfigError
from jacobi_forcing.sweep import Line
from tiny_models import ARCHITECTURES, VOCAB, shared_model

BUDGET, END = 24, 7
# A text that ends early unless it is kept from it: every third token is an end token.
ENDS = list(range(1, VOCAB, 3))
SETTINGS: dict[str, dict[str, Any]] = {
    "repetition_penalty": {"repetition_penalty": 1.3},
    "no_repeat_ngram_size": {"no_repeat_ngram_size": 2},
    "bad_words_ids": {"bad_words_ids": [[5], [9, 11], *([a, b] for a in range(20, 40) for b in range(0, 60, 2))]},
    "sequence_bias": {"sequence_bias": [[[a, b], 4.0] for a in range(VOCAB) for b in (3, 44)]},
    "suppress_tokens": {"suppress_tokens": list(range(0, VOCAB, 2))},
    "begin_suppress_tokens": {"begin_suppress_tokens": list(range(40))},
    "min_new_tokens": {"min_new_tokens": 20, "eos_token_id": ENDS},
    "min_length": {"min_length": 25, "eos_token_id": ENDS},
    "forced_eos_token_id": {"forced_eos_token_id": END, "eos_token_id": END},
    "exponential_decay": {"exponential_decay_length_penalty": (8, 1.2), "eos_token_id": END},
    "renormalize_logits": {"renormalize_logits": True, "remove_invalid_values": True, "suppress_tokens": [3]},
    "prefix_allowed_tokens_fn": {
        "prefix_allowed_tokens_fn": lambda _, ids: [(3 * int(ids[-1]) + k) % 61 for k in range(9)]
    },
}
# Several at once, so that their order counts.
SETTINGS["content"] = {"repetition_penalty": 1.3, "no_repeat_ngram_size": 3, **SETTINGS["bad_words_ids"]}
SETTINGS["all"] = (
    SETTINGS["content"] | SETTINGS["min_new_tokens"] | {"suppress_tokens": [2, 4], "forced_eos_token_id": END}
)


def prepared(model: PreTrainedModel, ids: Tensor, **settings: Any) -> LogitsProcessorList:
    """The processors that the library makes out of its settings."""
    caught: list[LogitsProcessorList] = []

    def catch(model: PreTrainedModel, input_ids: Tensor, logits_processor: LogitsProcessorList, **_: Any) -> Tensor:
        caught.append(logits_processor)
        return input_ids

    model.generate(ids, custom_generate=catch, pad_token_id=0, max_new_tokens=BUDGET, **settings)
    return caught[0]


def expected_text(model: PreTrainedModel, ids: Sequence[int], **settings: Any) -> list[int]:
    settings = {"pad_token_id": 0, "max_new_tokens": BUDGET, "do_sample": False} | settings
    return model.generate(torch.tensor([ids]), **settings)[0, len(ids) :].tolist()


@functools.cache
def library_text(arch: str, name: str, length: int = 11) -> list[int]:
    return expected_text(shared_model(arch), prompt(length), **SETTINGS[name])


def end_ids(settings: dict[str, Any]) -> list[int]:
    ends = settings.get("eos_token_id", [])
    return ends if isinstance(ends, list) else [ends]


def check(arch: str, decoder: str, settings: dict[str, Any], expected: list[int]) -> None:
    model, ids = shared_model(arch), prompt()
    choose = make_choose(prepared(model, torch.tensor([ids]), **settings), do_sample=False, seed=None)
    config = DecodeConfig(decoder=decoder, block_size=5)
    row = told_row(ids, expected, config, BUDGET, end_ids(settings))
    run(Backbone(model), [row], choose=choose)
    assert row.generated == expected
    assert decoder == "ar" or max(row.stats.accepted) >= 3


@pytest.mark.parametrize("decoder", DECODERS)
@pytest.mark.parametrize("name", SETTINGS)
def test_each_setting_gives_the_text_of_the_library(name: str, decoder: str) -> None:
    check("llama", decoder, SETTINGS[name], library_text("llama", name))


@pytest.mark.parametrize("decoder", DECODERS)
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_settings_give_the_text_of_the_library_on_every_architecture(arch: str, decoder: str) -> None:
    for name in ("content", "all"):
        check(arch, decoder, SETTINGS[name], library_text(arch, name))


def test_every_setting_changes_the_text() -> None:
    """Otherwise the tests above would say nothing."""
    for name, settings in SETTINGS.items():
        assert library_text("llama", name) != truncate(reference("llama"), end_ids(settings), BUDGET)


def padded(lengths: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Prompts of these lengths as one batch padded on the left, and its attention mask."""
    longest = max(lengths)
    ids = torch.tensor([[0] * (longest - length) + prompt(length) for length in lengths])
    return ids, (ids != 0).long()


def batch(model: PreTrainedModel, config: DecodeConfig, lengths: Sequence[int], ends: Sequence[int]) -> list[Row]:
    rows = [make_row(Backbone(model), prompt(length), config, ends, BUDGET) for length in lengths]
    for row in rows:
        row.padding = max(lengths) - row.prompt_length
    return rows


@pytest.mark.parametrize("decoder", ["ar", "recycle"])
@pytest.mark.parametrize("name", sorted(SETTINGS.keys() - {"min_length"}))
def test_rows_of_a_padded_batch_get_the_text_that_each_gets_alone(name: str, decoder: str) -> None:
    settings, model, lengths = SETTINGS[name], shared_model("llama"), (4, 30, 11)
    ids, mask = padded(lengths)
    choose = make_choose(prepared(model, ids, attention_mask=mask, **settings), do_sample=False, seed=None)
    rows = batch(model, DecodeConfig(decoder=decoder, block_size=3), lengths, end_ids(settings))
    run(Backbone(model), rows, choose=choose)
    assert [row.generated for row in rows] == [library_text("llama", name, length) for length in lengths]


def test_the_least_length_counts_the_padding_as_the_library_does() -> None:
    settings: dict[str, Any] = {"min_length": 40, "eos_token_id": ENDS}
    model, lengths = shared_model("llama"), (4, 30, 11)
    ids, mask = padded(lengths)
    out = model.generate(ids, attention_mask=mask, pad_token_id=0, max_new_tokens=BUDGET, **settings)[:, 30:]
    rows = batch(model, DecodeConfig(block_size=3), lengths, ENDS)
    choose = make_choose(prepared(model, ids, attention_mask=mask, **settings), do_sample=False, seed=None)
    run(Backbone(model), rows, choose=choose)
    assert [row.generated + [0] * (out.shape[1] - len(row.generated)) for row in rows] == out.tolist()
    assert min(len(row.generated) for row in rows) > 10


def test_a_constraint_is_asked_about_the_prompt_that_a_row_came_from() -> None:
    model, lengths = shared_model("llama"), (4, 4, 9, 9)
    allowed = PrefixConstrainedLogitsProcessor(lambda prompt, ids: list(range(20 * prompt, 20 * prompt + 20)), 2)
    rows = batch(model, DecodeConfig(block_size=4), lengths, [])
    run(Backbone(model), rows, choose=make_choose(LogitsProcessorList([allowed]), do_sample=True, seed=0))
    assert [{token // 20 for token in row.generated} for row in rows] == [{0}, {0}, {1}, {1}]


@pytest.mark.parametrize("decoder", DECODERS)
def test_a_grammar_that_knows_no_wrong_text_is_not_upset_by_guesses(decoder: str) -> None:
    """Tokens must go up by 1 to 3; the function has no answer for other texts."""
    model, ids, broken = shared_model("llama"), [1], []

    def allowed(_: int, text: Tensor) -> list[int]:
        steps = text.diff()
        if ((steps < 1) | (steps > 3)).any():
            broken.append(text.tolist())
            return []
        return [int(text[-1]) + step for step in (1, 2, 3)]

    settings = {"prefix_allowed_tokens_fn": allowed, "max_new_tokens": 15}
    expected = expected_text(model, ids, **settings)
    choose = make_choose(
        prepared(model, torch.tensor([ids]), prefix_allowed_tokens_fn=allowed), do_sample=False, seed=None
    )
    row = make_row(Backbone(model), ids, DecodeConfig(decoder=decoder, block_size=5), [], 15)
    run(Backbone(model), [row], choose=choose)
    assert row.generated == expected
    assert bool(broken) == (decoder != "ar")


@pytest.mark.parametrize("decoder", DECODERS)
def test_a_text_that_leads_to_no_allowed_token_is_refused_as_by_the_library(decoder: str) -> None:
    model = shared_model("llama")
    ids, end = first_met_at("llama", 5)
    truth = expected_text(model, ids)

    def dead_end(_: int, text: Tensor) -> list[int]:
        return list(range(VOCAB)) if len(text) < len(ids) + 6 else []

    choose = make_choose(
        LogitsProcessorList([PrefixConstrainedLogitsProcessor(dead_end, 1)]), do_sample=False, seed=None
    )
    config = DecodeConfig(decoder=decoder, block_size=4)
    with pytest.raises(ValueError, match="unsatisfiable"):
        run(Backbone(model), [told_row(ids, truth, config, BUDGET)], choose=choose)
    # The text ends before it gets there, though guesses go on.
    row = told_row(ids, truth, config, BUDGET, eos_ids=[end], wrong=0.0)
    run(Backbone(model), [row], choose=choose)
    assert row.generated == truth[:6]


class NoStep(LogitsProcessor):
    """Forbids a token right behind its neighbour, and writes down the texts it was asked about."""

    prefix_only = True

    def __init__(self) -> None:
        self.asked: list[list[int]] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.asked += input_ids.tolist()
        banned = torch.arange(scores.shape[-1]) - input_ids[:, -1:]
        return scores.masked_fill((banned.abs() < 15) & (banned != 0), -torch.inf)


@pytest.mark.parametrize("decoder", DECODERS)
def test_a_processor_of_ones_own_is_taken_by_its_word(decoder: str) -> None:
    settings = {"logits_processor": LogitsProcessorList([NoStep()]), "repetition_penalty": 1.2}
    check("llama", decoder, settings, expected_text(shared_model("llama"), prompt(), **settings))


@pytest.mark.parametrize("do_sample", [False, True])
def test_finished_rows_padding_and_the_inside_of_prompts_are_not_looked_at(do_sample: bool) -> None:
    model, config, asked = shared_model("llama"), DecodeConfig(decoder="ar"), NoStep()
    fresh, later, gone = (make_row(Backbone(model), ids, config, [], 9) for ids in ([1, 2, 3], [4, 5], [6]))
    later.known, later.text = 1, [4, 5, 8]
    gone.finished = True
    lines = [[Line([1, 2, 3, 30], 0)], [Line([8, 50], 2), Line([8], 2)], []]
    logits = torch.full((3, 6, VOCAB), torch.nan, dtype=torch.bfloat16)
    for seat, column in ((0, 2), (0, 3), (1, 0), (1, 1), (1, 2)):
        logits[seat, column] = 0
        logits[seat, column, 10 * seat + column] = 100
    before = logits.clone()
    choose = make_choose(LogitsProcessorList([TemperatureLogitsWarper(0.5), asked]), do_sample=do_sample, seed=0)
    chosen = choose(logits, [fresh, later, gone], lines, 0).ids
    assert asked.asked == [[1, 2, 3], [1, 2, 3, 30], [4, 5, 8], [4, 5, 8, 50], [4, 5, 8]]
    torch.testing.assert_close(logits, before, equal_nan=True)
    assert chosen.shape == (3, 6)
    assert (chosen[0, :2] == 0).all()
    assert (chosen[1, 3:] == 0).all()
    assert (chosen[2] == 0).all()


class Subclass(TopKLogitsWarper):
    pass


@pytest.mark.parametrize(
    "processor",
    [
        logits_process.WatermarkLogitsProcessor(VOCAB, "cpu"),
        logits_process.EncoderNoRepeatNGramLogitsProcessor(2, torch.tensor([[1, 2]])),
        logits_process.ClassifierFreeGuidanceLogitsProcessor(2.0),
        logits_process.AlternatingCodebooksLogitsProcessor(1, 2, 3),
        Subclass(3),
    ],
)
def test_what_may_depend_on_more_than_the_text_is_refused_by_name(processor: LogitsProcessor) -> None:
    with pytest.raises(ConfigError, match=rf"seen: {type(processor).__name__}; .*prefix_only = True"):
        make_choose(LogitsProcessorList([TopKLogitsWarper(3), processor]), do_sample=True, seed=0)


def test_a_penalty_for_another_batch_is_refused() -> None:
    penalty = RepetitionPenaltyLogitsProcessor(1.3, prompt_ignore_length=torch.tensor([0, 2]))
    rows = batch(shared_model("llama"), DecodeConfig(), [3], [])
    with pytest.raises(ConfigError, match="seen: 2 rows; expected: 1 rows"):
        run(Backbone(shared_model("llama")), rows, choose=make_choose([penalty], do_sample=False, seed=None))


def test_every_processor_of_the_library_is_in_one_kind_or_refused() -> None:
    assert not (IGNORE_PREFIX & READ_LENGTH | IGNORE_PREFIX & READ_CONTENT | READ_LENGTH & READ_CONTENT)
    names = {cls.__name__ for cls in IGNORE_PREFIX | READ_LENGTH | READ_CONTENT}
    foreign = ("Whisper", "Guidance", "Watermark", "Bark", "Dia", "Alternating", "Encoder")
    others = {
        name
        for name, cls in vars(logits_process).items()
        if isinstance(cls, type) and issubclass(cls, LogitsProcessor) and not any(word in name for word in foreign)
    }
    assert names == others - {"LogitsProcessor"}
