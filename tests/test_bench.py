from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from jacobi_forcing.backbone import Backbone
from jacobi_forcing.bench import COLUMNS, SCHEMA_VERSION, ModelResult, bench, cost_ratios, markdown, notes, rows, speed
from jacobi_forcing.bench.exactness import find_mismatch
from jacobi_forcing.config import DecodeConfig, ModelConfig
from jacobi_forcing.errors import DataError
from jacobi_forcing.loading import Loaded, load
from jacobi_forcing.trajectories.prompts import Prompt
from tiny_folder import EOS, byte_tokenizer, save_tiny
from tiny_models import tiny_model

WINDOW, JACOBI = DecodeConfig(decoder="window", block_size=4), DecodeConfig(decoder="jacobi", block_size=8)


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> Loaded:
    return load(ModelConfig(str(save_tiny(tmp_path_factory.mktemp("model"))), device="cpu"))


@pytest.fixture(scope="module")
def prompts(loaded: Loaded) -> list[Prompt]:
    texts = ["one", "twenty-two", "three hundred and three"]
    return [Prompt(index, text, loaded.tokenizer(text)["input_ids"], "#### 1") for index, text in enumerate(texts)]


@pytest.fixture(scope="module")
def result(loaded: Loaded, prompts: list[Prompt]) -> ModelResult:
    return bench(loaded, prompts, decode=[WINDOW, JACOBI, WINDOW], max_new_tokens=10, task="gsm8k", label="tiny")


def test_every_decoder_is_measured_once_beside_ar_and_the_library(result: ModelResult) -> None:
    assert [decoder.decoder for decoder in result.decoders] == ["library", "ar", "window", "jacobi"]


def test_tokens_and_forwards_are_exact(result: ModelResult) -> None:
    ar, window = result["ar"], result["window"]
    assert ar.tokens == ar.forwards
    assert ar.tokens_per_forward == 1.0
    assert ar.accepted == {1: ar.tokens}
    assert window.tokens == ar.tokens == result["library"].tokens
    assert window.forwards == sum(window.accepted.values())
    assert sum(length * count for length, count in window.accepted.items()) == window.tokens
    assert result["library"].tokens_per_forward is None


def test_every_decoder_equals_ar_and_ar_equals_the_library(result: ModelResult) -> None:
    for decoder in result.decoders:
        assert (decoder.exact, decoder.mismatches) == (3, [])
    entries = result.to_dict()["decoders"]
    assert [entry["exact_against"] for entry in entries] == ["ar", "library", "ar", "ar"]


def test_ar_is_its_own_measure(result: ModelResult) -> None:
    assert result["ar"].speedup == pytest.approx(1.0)
    assert result["ar"].median_speedup == pytest.approx(1.0)


def test_the_json_form_names_its_version_and_pairs_speed_with_quality(result: ModelResult) -> None:
    form = json.loads(json.dumps(result.to_dict()))
    assert form["version"] == SCHEMA_VERSION
    for decoder in form["decoders"]:
        assert decoder["tokens_per_second"] > 0
        assert {"solve_rate", "repetition_rate", "finished_rate"} <= decoder["quality"].keys()
        assert decoder["of"] == 3
    assert form["cost"].keys() == {"1", "4", "8"}


def test_the_first_answer_of_each_decoder_is_thrown_away_and_decoders_take_turns(
    loaded: Loaded, prompts: list[Prompt], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[tuple[int, str]] = []
    real = speed._answer

    def spy(loaded: Loaded, backbone: Backbone, prompt: Prompt, config: DecodeConfig | None, limit: int) -> Any:
        calls.append((prompt.index, "library" if config is None else config.decoder))
        return real(loaded, backbone, prompt, config, limit)

    monkeypatch.setattr(speed, "_answer", spy)
    bench(loaded, prompts[:2], decode=[WINDOW], max_new_tokens=2)
    assert calls[:3] == [(0, "library"), (0, "ar"), (0, "window")]
    assert calls[3:] == [
        (0, "library"),
        (0, "ar"),
        (0, "window"),
        (1, "ar"),
        (1, "window"),
        (1, "library"),
    ]


def test_a_decoder_that_changes_the_text_is_reported_as_a_fault(
    loaded: Loaded, prompts: list[Prompt], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = speed._answer

    def corrupt(loaded: Loaded, backbone: Backbone, prompt: Prompt, config: DecodeConfig | None, limit: int) -> Any:
        answer = real(loaded, backbone, prompt, config, limit)
        if config is WINDOW and prompt.index == 1:
            answer.ids[3] = (answer.ids[3] + 1) % 258
        return answer

    monkeypatch.setattr(speed, "_answer", corrupt)
    found = bench(loaded, prompts, decode=[WINDOW], max_new_tokens=6)
    assert found["window"].exact == 2
    (mismatch,) = found["window"].mismatches
    assert (mismatch.prompt, mismatch.position, mismatch.near_tie) == (1, 3, False)
    assert any(
        "differ from ar beyond rounding, first at token 3 of prompt 1" in note for note in notes([found.to_dict()])
    )


def test_a_near_tie_is_told_from_a_fault() -> None:
    model = tiny_model("llama", vocab_size=64)
    head = model.get_output_embeddings().weight
    with torch.no_grad():
        head[9] = head[8]  # two tokens that no forward can tell apart
    backbone, prompt = Backbone(model), Prompt(5, "", [3, 4], None)
    tie = find_mismatch(backbone, prompt, [7, 8, 1], [7, 9, 2])
    assert tie is not None and tie.near_tie and tie.gap == 0 and tie.position == 1
    cut = find_mismatch(backbone, prompt, [7, 8], [7, 8, 9])
    assert cut is not None and cut.gap is None and not cut.near_tie
    assert find_mismatch(backbone, prompt, [7, 8], [7, 8]) is None


def test_costs_are_relative_to_a_forward_of_one_token() -> None:
    backbone = Backbone(tiny_model("llama", max_position_embeddings=64))
    costs = cost_ratios(backbone, [8, 32], context=50, repeats=3)
    assert list(costs) == [1, 8, 32]
    assert costs[1]["ratio"] == 1.0
    assert all(entry["seconds"] > 0 for entry in costs.values())


@pytest.mark.parametrize(("ratio", "expected"), [(3.0, "no speed-up is to be expected"), (1.5, "about 1.3×")])
def test_the_cost_of_a_forward_decides_what_to_expect(result: ModelResult, ratio: float, expected: str) -> None:
    form = result.to_dict()
    form["decoders"] = [{**d, "tokens_per_forward": 2.0} for d in form["decoders"] if d["decoder"] == "window"]
    form["cost"]["4"]["ratio"] = ratio
    (sentence,) = notes([form])
    assert expected in sentence
    assert f"costs {ratio:.2f} times one of 1 here, and brings 2.00 tokens" in sentence


def test_the_table_never_shows_speed_without_quality_and_exactness(result: ModelResult) -> None:
    table = rows([result.to_dict(), {**result.to_dict(), "label": "other"}])
    assert {len(row) for row in table} == {len(COLUMNS)}
    assert [row[:3] for row in table[:3]] == [("tiny", "ar", "–"), ("tiny", "window", "4"), ("tiny", "jacobi", "8")]
    for row in table:
        cells = dict(zip(COLUMNS, row, strict=True))
        assert cells["solved"].endswith("% of 3")
        assert cells["repeats"].endswith("%")
        assert cells["exact"] == "3/3"
    text = markdown([result.to_dict()])
    assert text.count("\n|") == 4
    assert "to be expected" in text


def test_no_prompts_are_an_error(loaded: Loaded) -> None:
    with pytest.raises(DataError, match="nothing to measure"):
        bench(loaded, [], decode=[WINDOW], max_new_tokens=4)


def test_models_that_ask_for_sampling_are_measured_greedily(tmp_path: Path, prompts: list[Prompt]) -> None:
    model = tiny_model("llama", vocab_size=258, eos_token_id=EOS, pad_token_id=0)
    model.generation_config.update(do_sample=True, temperature=0.7, top_p=0.8, repetition_penalty=1.2)
    model.save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    found = bench(load(ModelConfig(str(tmp_path), device="cpu")), prompts[:1], decode=[WINDOW], max_new_tokens=6)
    assert found["ar"].exact == found["window"].exact == 1
