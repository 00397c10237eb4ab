from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from benching import JACOBI, MULTIBLOCK, RECYCLE, WINDOW, library_answer, load_tiny, names, prompts_for
from jacobi_forcing.adapter import GatedAdapter
from jacobi_forcing.backbone import Backbone
from jacobi_forcing.bench import SCHEMA_VERSION, ModelResult, bench, cost_ratios
from jacobi_forcing.bench.contestants import Contestant, Turn, contestants, used
from jacobi_forcing.config import DecodeConfig, ModelConfig
from jacobi_forcing.errors import ConfigError, DataError
from jacobi_forcing.loading import Loaded, load
from jacobi_forcing.trajectories.prompts import Prompt
from tiny_folder import EOS, byte_tokenizer
from tiny_models import tiny_model

Take = tuple[int, int, str]
"""Batch size, first prompt and contestant of a timed call."""


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> Loaded:
    return load_tiny(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def prompts(loaded: Loaded) -> list[Prompt]:
    return prompts_for(loaded, 5)


@pytest.fixture(scope="module")
def result(loaded: Loaded, prompts: list[Prompt]) -> ModelResult:
    decode = [WINDOW, JACOBI, WINDOW, RECYCLE, MULTIBLOCK]
    return bench(loaded, prompts[:3], decode=decode, max_new_tokens=10, task="gsm8k", label="tiny")


@pytest.fixture(scope="module")
def batched(loaded: Loaded, prompts: list[Prompt]) -> ModelResult:
    return bench(loaded, prompts, decode=[WINDOW, RECYCLE], max_new_tokens=12, batch_sizes=[2, 1])


def spy(monkeypatch: pytest.MonkeyPatch) -> list[Take]:
    """Every timed call, in order."""
    calls: list[Take] = []
    real = Contestant.take

    def take(self: Contestant, loaded: Loaded, backbone: Backbone, batch: Sequence[Prompt], limit: int) -> Turn:
        calls.append((len(batch), batch[0].index, self.name))
        return real(self, loaded, backbone, batch, limit)

    monkeypatch.setattr(Contestant, "take", take)
    return calls


# Batches of one ---------------------------------------------------------------------------------------------------


def test_every_decoder_is_measured_once_beside_ar_and_the_library(result: ModelResult) -> None:
    assert names(result) == [(name, 1) for name in ("library", "ar", "window", "jacobi", "recycle", "multiblock")]


def test_tokens_and_forwards_are_exact(result: ModelResult) -> None:
    ar, window, library = result["ar"], result["window"], result["library"]
    assert ar.tokens == ar.forwards == library.forwards == library.tokens
    assert ar.tokens_per_forward == library.tokens_per_forward == 1.0
    for decoder in result.decoders:
        form = decoder.to_dict()
        assert decoder.tokens == ar.tokens
        # Counted by a hook on the model, and by our decoders themselves.
        assert decoder.forwards == form["model_forwards"]
        if decoder.decode is not None:
            counts = {int(length): count for length, count in form["accepted"].items()}
            assert sum(counts.values()) == decoder.forwards
            assert sum(length * count for length, count in counts.items()) == decoder.tokens
            assert sum(form["lines_won"].values()) == decoder.forwards
    assert ar.to_dict()["accepted"] == {"1": ar.tokens}
    assert window.forwards < window.tokens


def test_what_forwards_took_and_what_guesses_were_worth_is_told(result: ModelResult) -> None:
    forms = {decoder.decoder: decoder.to_dict() for decoder in result.decoders}
    assert forms["ar"]["median_slots"] == forms["library"]["median_slots"] == 1
    assert 1 < forms["window"]["mean_slots"] <= 4
    assert 4 <= forms["recycle"]["mean_slots"] <= 4 + 2 * 5
    assert forms["recycle"]["lines_won"].keys() <= {"0", "1", "2"}
    assert forms["ar"]["draft_accuracy"] == []
    assert len(forms["window"]["draft_accuracy"]) == 4
    assert all(0 <= share <= 1 for share in forms["multiblock"]["draft_accuracy"])


def test_every_decoder_equals_ar_and_ar_equals_the_library(result: ModelResult) -> None:
    for decoder in result.decoders:
        assert (decoder.exact, decoder.near_ties, decoder.faults, decoder.mismatches) == (3, 0, 0, [])
    entries = result.to_dict()["decoders"]
    assert [entry["exact_against"] for entry in entries] == ["ar", "library", "ar", "ar", "ar", "ar"]


def test_ar_is_its_own_measure(result: ModelResult) -> None:
    assert result["ar"].speedup == pytest.approx(1.0)
    assert result["ar"].median_speedup == pytest.approx(1.0)


def test_the_json_form_names_its_version_and_pairs_speed_with_quality(result: ModelResult) -> None:
    form = json.loads(json.dumps(result.to_dict()))
    assert form["version"] == SCHEMA_VERSION == 2
    for decoder in form["decoders"]:
        assert decoder["tokens_per_second"] > 0
        assert {"solve_rate", "repetition_rate", "finished_rate"} <= decoder["quality"].keys()
        assert (decoder["of"], decoder["near_ties"], decoder["faults"]) == (3, 0, 0)


def test_a_decoders_cost_is_that_of_the_forwards_it_ran(result: ModelResult) -> None:
    costs = {entry.slots: entry.ratio for entry in result.cost}
    for decoder in result.decoders:
        if decoder.decoder in ("ar", "library"):
            assert decoder.cost_ratio is None
        else:
            assert decoder.cost_ratio == costs[decoder.median_slots]
    assert costs[1] == 1.0
    assert {(entry.batch_size, entry.slots) for entry in result.cost} == {
        (1, slots) for slots in {1, *(decoder.median_slots for decoder in result.decoders)}
    }


def test_the_first_answer_of_each_decoder_is_thrown_away_and_decoders_take_turns(
    loaded: Loaded, prompts: list[Prompt], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = spy(monkeypatch)
    bench(loaded, prompts[:2], decode=[WINDOW], max_new_tokens=2)
    first = [(1, 0, "library"), (1, 0, "ar"), (1, 0, "window")]
    assert calls == [*first, *first, (1, 1, "ar"), (1, 1, "window"), (1, 1, "library")]


def test_models_that_ask_for_sampling_are_measured_greedily(tmp_path: Path, prompts: list[Prompt]) -> None:
    model = tiny_model("llama", vocab_size=258, eos_token_id=EOS, pad_token_id=0)
    model.generation_config.update(do_sample=True, temperature=0.7, top_p=0.8, repetition_penalty=1.2)
    model.save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    found = bench(load(ModelConfig(str(tmp_path), device="cpu")), prompts[:1], decode=[WINDOW], max_new_tokens=6)
    assert found["ar"].exact == found["window"].exact == 1


# Several rows at a time -------------------------------------------------------------------------------------------


def test_each_batch_size_has_its_own_ar_and_library(batched: ModelResult) -> None:
    field = ("library", "ar", "window", "recycle")
    assert names(batched) == [(name, size) for size in (1, 2) for name in field]
    assert [decoder.answers for decoder in batched.decoders] == [5] * 4 + [4] * 4
    for size in (1, 2):
        ar = next(d for d in batched.decoders if (d.decoder, d.batch_size) == ("ar", size))
        assert ar.speedup == pytest.approx(1.0)
        assert all(d.pace is ar.turns for d in batched.decoders if d.batch_size == size)


def test_every_row_of_a_batch_gets_the_text_that_it_gets_alone(
    batched: ModelResult, loaded: Loaded, prompts: list[Prompt]
) -> None:
    alone = [library_answer(loaded, prompt, 12) for prompt in prompts]
    assert len({len(prompt.ids) for prompt in prompts[:2]}) == 2
    for decoder in batched.decoders:
        assert [ids for turn in decoder.turns for ids in turn.ids] == alone[: decoder.answers]
        assert (decoder.exact, decoder.faults) == (decoder.answers, 0)


def test_rows_that_end_early_are_cut_at_their_end_token(loaded: Loaded, prompts: list[Prompt]) -> None:
    texts = [library_answer(loaded, prompt, 8) for prompt in prompts[:2]]
    place, end = next((place, token) for place, token in enumerate(texts[0]) if place and token not in texts[1])
    loaded.model.generation_config.eos_token_id = end
    try:
        found = bench(loaded, prompts[:2], decode=[WINDOW], max_new_tokens=8, batch_sizes=[2])
    finally:
        loaded.model.generation_config.eos_token_id = EOS
    place = texts[0].index(end)
    for decoder in found.decoders:
        assert decoder.turns[0].ids == [texts[0][: place + 1], texts[1]]
        assert decoder.faults == 0


def test_forwards_of_a_batch_are_counted_for_each_row_and_for_the_model(batched: ModelResult) -> None:
    for decoder in batched.decoders:
        form = decoder.to_dict()
        if decoder.batch_size == 2:
            assert form["model_forwards"] < form["forwards"]
        if decoder.decoder in ("ar", "library"):
            assert decoder.tokens_per_forward == 1.0
    one, two = ([d for d in batched.decoders if d.decoder == "window" and d.batch_size == size] for size in (1, 2))
    assert two[0].forwards == sum(turn.row_forwards for turn in one[0].turns[:4])


def test_batches_are_cut_in_order_and_take_turns_like_single_prompts(
    loaded: Loaded, prompts: list[Prompt], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = spy(monkeypatch)
    bench(loaded, prompts, decode=[], max_new_tokens=2, batch_sizes=[2])
    first = [(2, 0, "library"), (2, 0, "ar")]
    assert calls == [*first, *first, (2, 2, "ar"), (2, 2, "library")]


def test_progress_counts_the_prompts_of_all_batch_sizes(loaded: Loaded, prompts: list[Prompt]) -> None:
    told: list[tuple[int, int]] = []
    bench(
        loaded,
        prompts,
        decode=[],
        max_new_tokens=1,
        batch_sizes=[2, 4],
        on_progress=lambda done, total: told.append((done, total)),
    )
    assert told == [(2, 8), (4, 8), (8, 8)]


# Settings ---------------------------------------------------------------------------------------------------------


def test_decoders_that_differ_in_settings_they_do_not_use_are_one() -> None:
    few, many = (DecodeConfig(decoder="window", candidates=count, num_blocks=count) for count in (1, 9))
    assert used(few) == used(many) == DecodeConfig(decoder="window")
    assert len(contestants([few, many])) == 3
    recycle = [dataclasses.replace(config, decoder="recycle") for config in (few, many)]
    assert [contestant.label for contestant in contestants(recycle)[2:]] == ["candidates=1", "candidates=9"]


@pytest.mark.parametrize(
    ("options", "label"),
    [
        ({"decoder": "window", "block_size": 8}, ""),
        ({"decoder": "window", "draft_init": "pool", "prompt_ngrams": False}, "prompt_ngrams=False, draft_init=pool"),
        ({"decoder": "window", "prompt_ngrams": False}, ""),
        ({"decoder": "multiblock", "num_blocks": 3, "spawn_ratio": 0.5}, "num_blocks=3, spawn_ratio=0.5"),
        ({"decoder": "recycle", "num_blocks": 3}, ""),
        ({"decoder": "ar", "static_shapes": True, "block_size": 3}, "static_shapes=True"),
        ({"decoder": "jacobi", "draft_init": "last", "draft_seed": 3}, "draft_init=last"),
    ],
)
def test_a_label_names_the_settings_that_are_not_the_defaults_and_matter(options: dict[str, Any], label: str) -> None:
    assert Contestant(options["decoder"], used(DecodeConfig(**options))).label == label


def test_what_cannot_be_measured_is_refused(loaded: Loaded, prompts: list[Prompt]) -> None:
    with pytest.raises(DataError, match="nothing to measure"):
        bench(loaded, [], decode=[WINDOW], max_new_tokens=4)
    with pytest.raises(DataError, match=r"too few prompts for a batch of 6; seen: 5 prompts"):
        bench(loaded, prompts, decode=[], max_new_tokens=4, batch_sizes=[1, 6])
    with pytest.raises(ConfigError, match="batch size is too small"):
        bench(loaded, prompts, decode=[], max_new_tokens=4, batch_sizes=[0])


# Cost -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [1, 3])
def test_costs_are_relative_to_a_forward_of_one_token(rows: int) -> None:
    backbone = Backbone(tiny_model("llama", max_position_embeddings=64))
    seen: list[tuple[int, int]] = []
    hook = lambda _m, _a, kwargs, _o: seen.append(tuple(kwargs["input_ids"].shape))  # noqa: E731 - short
    backbone.model.register_forward_hook(hook, with_kwargs=True)
    costs = cost_ratios(backbone, [8, 32], context=50, rows=rows, repeats=3)
    assert list(costs) == [1, 8, 32]
    assert costs[1]["ratio"] == 1.0
    assert all(entry["seconds"] > 0 for entry in costs.values())
    # The context shrinks so that the widest sweep fits; then sizes take turns.
    assert seen[:4] == [(rows, 32), (rows, 1), (rows, 8), (rows, 32)]


def test_with_a_gated_adapter_half_of_the_tokens_of_a_timed_sweep_run_through_it() -> None:
    adapter = GatedAdapter.attach(tiny_model("llama"), rank=2)
    backbone = Backbone(adapter.model)
    through: set[tuple[int, int]] = set()

    def seen(module: torch.nn.Module, args: tuple[torch.Tensor, ...]) -> None:
        index = adapter._gate.index
        through.add((args[0].shape[1], index.stop - index.start if isinstance(index, slice) else 0))

    next(iter(adapter.layers.values())).register_forward_pre_hook(seen)
    cost_ratios(backbone, [9], context=1, repeats=1)
    assert through == {(1, 0), (9, 4)}
