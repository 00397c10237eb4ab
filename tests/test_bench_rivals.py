from __future__ import annotations

import copy
import dataclasses
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from benching import RECYCLE, WINDOW, library_answer, load_forgetful, load_tiny, names, prompts_for
from jacobi_forcing.backbone import Backbone
from jacobi_forcing.bench import ModelResult, assisted, bench, notes, prompt_lookup, rows
from jacobi_forcing.bench.contestants import Contestant
from jacobi_forcing.config import ModelConfig
from jacobi_forcing.errors import ConfigError
from jacobi_forcing.loading import Loaded, load
from tiny_folder import PAD, byte_tokenizer
from tiny_models import tiny_model

TOKENS = 24


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> Loaded:
    return load_forgetful(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def stranger(tmp_path_factory: pytest.TempPathFactory) -> Loaded:
    """Another model with the same tokenizer."""
    return load_tiny(tmp_path_factory.mktemp("assistant"), "gpt2", seed=3)


@pytest.fixture(scope="module")
def result(loaded: Loaded, stranger: Loaded) -> ModelResult:
    rivals = [prompt_lookup(5), assisted(loaded, stranger)]
    prompts = prompts_for(loaded)
    return bench(loaded, prompts, decode=[WINDOW, RECYCLE], rivals=rivals, max_new_tokens=TOKENS, label="tiny")


@contextmanager
def calls_of(model: Any) -> Iterator[list[int]]:
    """Tokens of every call of a model's forward, seen from outside the library and without hooks."""
    seen: list[int] = []
    real = model.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        seen.append(kwargs["input_ids"].shape[1])
        return real(*args, **kwargs)

    model.forward = forward
    try:
        yield seen
    finally:
        del model.forward


def test_rivals_are_measured_beside_our_decoders_and_are_exact(result: ModelResult) -> None:
    assert [name for name, _ in names(result)] == ["library", "ar", "prompt-lookup", "assisted", "window", "recycle"]
    for decoder in result.decoders:
        assert (decoder.exact, decoder.faults) == (3, 0)
        assert [ids for turn in decoder.turns for ids in turn.ids] == [
            ids for turn in result["ar"].turns for ids in turn.ids
        ]


def test_rivals_write_what_the_library_writes(result: ModelResult, loaded: Loaded) -> None:
    alone = [library_answer(loaded, prompt, TOKENS) for prompt in prompts_for(loaded)]
    for name in ("library", "prompt-lookup", "assisted"):
        assert [ids for turn in result[name].turns for ids in turn.ids] == alone


def test_their_forwards_are_counted_exactly(result: ModelResult, loaded: Loaded, stranger: Loaded) -> None:
    for name, options in (
        ("library", {}),
        ("prompt-lookup", {"prompt_lookup_num_tokens": 5}),
        ("assisted", {"assistant_model": stranger.model}),
    ):
        helped = 0
        for prompt, turn in zip(prompts_for(loaded), result[name].turns, strict=True):
            ids = torch.tensor([prompt.ids])
            with calls_of(loaded.model) as seen, calls_of(stranger.model) as helper:
                mask = torch.ones_like(ids)
                loaded.model.generate(ids, attention_mask=mask, do_sample=False, max_new_tokens=TOKENS, **options)
            assert turn.widths == seen
            helped += len(helper)
        assert result[name].to_dict()["assistant_forwards"] == helped
        assert (helped > 0) == (name == "assisted")
    assert result["library"].forwards == result["library"].tokens == 3 * TOKENS


def test_a_text_that_runs_in_circles_is_looked_up(result: ModelResult) -> None:
    lookup = result["prompt-lookup"]
    assert lookup.forwards < lookup.tokens
    assert lookup.tokens_per_forward == lookup.tokens / lookup.forwards > 1
    assert lookup.to_dict()["settings"] == {"prompt_lookup_num_tokens": 5}


def test_a_model_that_assists_itself_is_right_in_one_forward(loaded: Loaded) -> None:
    twin = dataclasses.replace(loaded, model=copy.deepcopy(loaded.model))
    # So that it drafts all it may: up to 20 tokens, and one less than are wanted.
    twin.model.generation_config.assistant_confidence_threshold = 0.0
    found = bench(loaded, prompts_for(loaded, 1), decode=[], rivals=[assisted(loaded, twin)], max_new_tokens=8)
    form = found["assisted"].to_dict()
    assert (form["tokens"], form["forwards"], form["assistant_forwards"], form["exact"]) == (8, 1, 7, 1)


def test_tables_and_notes_show_them_like_any_decoder(result: ModelResult, stranger: Loaded) -> None:
    form = json.loads(json.dumps(result.to_dict()))
    cells = {row[1]: row for row in rows([form])}
    assert cells["prompt-lookup"][2] == "drafts of 5"
    assert cells["assisted"][2] == Path(stranger.config.name).name
    said = notes([form])
    assert any(
        line.startswith("tiny, assisted") and "forwards of the assistant come with each" in line for line in said
    )
    assert any(line.startswith("tiny, prompt-lookup") and "to be expected" in line for line in said)


def test_rivals_take_one_row_at_a_time(loaded: Loaded) -> None:
    prompts = prompts_for(loaded, 2)
    found = bench(loaded, prompts, decode=[], rivals=[prompt_lookup()], max_new_tokens=2, batch_sizes=[1, 2])
    assert names(found) == [("library", 1), ("ar", 1), ("prompt-lookup", 1), ("library", 2), ("ar", 2)]
    with pytest.raises(ConfigError, match="one row at a time; seen: prompt-lookup"):
        bench(loaded, prompts, decode=[], rivals=[prompt_lookup()], max_new_tokens=2, batch_sizes=[2])


def test_an_assistant_with_a_wider_head_and_the_same_tokenizer_will_do(loaded: Loaded, tmp_path: Path) -> None:
    tiny_model("llama", vocab_size=300, pad_token_id=PAD).save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    helper = load(ModelConfig(str(tmp_path), device="cpu"))
    turn = assisted(loaded, helper).take(loaded, Backbone(loaded.model), prompts_for(loaded, 1), 6)
    assert turn.ids == [library_answer(loaded, prompts_for(loaded, 1)[0], 6)]
    assert turn.assistant_forwards > 0


def test_an_assistant_with_another_tokenizer_is_refused(loaded: Loaded, stranger: Loaded) -> None:
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens(["more"])
    other = Loaded(stranger.config, stranger.model, tokenizer)
    with pytest.raises(ConfigError, match="has another tokenizer"):
        assisted(loaded, other)


def test_a_look_up_of_no_token_is_refused() -> None:
    with pytest.raises(ConfigError, match="lookup_tokens"):
        prompt_lookup(0)


def test_hooks_are_gone_after_a_turn(loaded: Loaded) -> None:
    before = len(loaded.model._forward_hooks)
    Contestant("library").take(loaded, Backbone(loaded.model), prompts_for(loaded, 1), 2)
    assert len(loaded.model._forward_hooks) == before
