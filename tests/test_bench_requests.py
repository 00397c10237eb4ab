from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch

from benching import RECYCLE, WINDOW, load_tiny, prompts_for
from jacobi_forcing.backbone import Backbone
from jacobi_forcing.bench import ModelResult, bench
from jacobi_forcing.bench.contestants import Contestant, Turn
from jacobi_forcing.bench.latency import latency, percentiles
from jacobi_forcing.bench.strata import Traits, mean_entropy, strata, thirds
from jacobi_forcing.cli.app import main
from jacobi_forcing.loading import Loaded
from jacobi_forcing.trajectories.prompts import Prompt
from tiny_folder import save_tiny


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> Loaded:
    return load_tiny(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def prompts(loaded: Loaded) -> list[Prompt]:
    return prompts_for(loaded, 6)


@pytest.fixture(scope="module")
def result(loaded: Loaded, prompts: list[Prompt]) -> ModelResult:
    return bench(loaded, prompts, decode=[WINDOW, RECYCLE], max_new_tokens=10, task="gsm8k", batch_sizes=[1, 2])


def turn(tokens: int, seconds: float, forwards: int) -> Turn:
    marks = [seconds * (step + 1) / forwards for step in range(forwards)]
    return Turn([[7] * tokens], 99, seconds, [1] * forwards, marks)


# Latency ----------------------------------------------------------------------------------------------------------


def test_percentiles_lie_on_straight_lines_between_the_sorted_times() -> None:
    found = percentiles([float(second) for second in reversed(range(101))])
    assert found == pytest.approx({"mean": 50, "p50": 50, "p90": 90, "p95": 95, "p99": 99, "worst": 100})
    assert percentiles([1.0, 3.0]) == pytest.approx(
        {"mean": 2, "p50": 2, "p90": 2.8, "p95": 2.9, "p99": 2.98, "worst": 3}
    )
    assert set(percentiles([0.25]).values()) == {0.25}


def test_a_batch_answers_when_its_last_row_has() -> None:
    pair = Turn([[5, 5], [5]], 9, 4.0, [1, 1, 1], [1.0, 3.0, 4.0])
    found = latency([pair, turn(3, 1.0, 1)])
    assert found["requests"] == 3
    assert found["answer"]["mean"] == pytest.approx(3.0)
    assert (found["answer"]["p50"], found["answer"]["worst"]) == (4.0, 4.0)
    assert found["first_token"]["mean"] == pytest.approx(1.0)
    assert (found["gap"]["mean"], found["gap"]["worst"]) == pytest.approx((1.5, 2.0))
    assert latency([turn(3, 1.0, 1)])["gap"] is None


def test_every_forward_has_a_mark_and_the_last_one_is_the_answer(loaded: Loaded, prompts: list[Prompt]) -> None:
    backbone = Backbone(loaded.model)
    for contestant in (Contestant("library"), Contestant("window", WINDOW)):
        took = contestant.take(loaded, backbone, prompts[:2], 8)
        assert len(took.marks) == len(took.widths) > 1
        assert took.marks == sorted(took.marks)
        assert took.marks[0] > 0
        assert took.marks[-1] == took.seconds


# Strata -----------------------------------------------------------------------------------------------------------


def test_thirds_keep_equal_values_together() -> None:
    assert thirds([30, 10, 20]) == [[1], [2], [0]]
    assert thirds([5, 5, 5]) == [[0, 1, 2]]
    assert thirds([False, True, True, True]) == [[0], [1, 2, 3]]
    assert [len(group) for group in thirds(list(range(12)))] == [4, 4, 4]
    assert [len(group) for group in thirds([1, 2])] == [1, 1]


def test_strata_tell_speed_and_exactness_of_short_and_long_answers_apart() -> None:
    traits = [Traits(index, 4, tokens, None, None, 0.5) for index, tokens in enumerate([10, 20, 30])]
    found = strata(
        [turn(10, 1.0, 10), turn(20, 1.0, 10), turn(30, 1.0, 5)],
        [turn(10, 1.0, 10), turn(20, 2.0, 20), turn(30, 3.0, 30)],
        traits,
        wrong=[2],
    )
    assert [(group["by"], group["low"], group["high"]) for group in found] == [
        ("response_tokens", tokens, tokens) for tokens in (10, 20, 30)
    ]
    assert [group["tokens_per_forward"] for group in found] == pytest.approx([1, 2, 6])
    assert [group["tokens_per_second"] for group in found] == pytest.approx([10, 20, 30])
    assert [group["speedup"] for group in found] == pytest.approx([1, 2, 3])
    assert [group["exact"] for group in found] == [1, 1, 0]


def test_strata_cover_all_requests_and_add_up(result: ModelResult) -> None:
    for decoder in result.to_dict()["decoders"]:
        by = {group["by"] for group in decoder["strata"]}
        assert "entropy" in by
        for name in by:
            groups = [group for group in decoder["strata"] if group["by"] == name]
            assert len(groups) > 1
            for count in ("tokens", "forwards", "exact", "of"):
                assert sum(group[count] for group in groups) == decoder[count]
            assert all((group["speedup"] is None) == (decoder["batch_size"] > 1) for group in groups)


def test_requests_are_told_one_by_one(result: ModelResult) -> None:
    form = json.loads(json.dumps(result.to_dict()))
    assert [item["prompt"] for item in form["items"]] == list(range(6))
    assert all(item["answer_tokens"] == len("#### 1") for item in form["items"])
    assert all(item["base_right"] is False for item in form["items"])
    for decoder in form["decoders"]:
        for count in ("tokens", "forwards"):
            assert sum(decoder["requests"][count]) == decoder[count]
        assert len(decoder["requests"]["seconds"]) == decoder["latency"]["requests"] == 6
        assert decoder["latency"]["answer"]["worst"] == max(decoder["requests"]["seconds"])


def test_the_entropy_is_that_of_the_models_own_distribution(loaded: Loaded, prompts: list[Prompt]) -> None:
    prompt, answer = prompts[0].ids, [9, 8, 7]
    ids = torch.tensor([[*prompt, *answer]])
    with torch.inference_mode():
        logs = loaded.model(input_ids=ids).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
    expected = float(-(logs.exp() * logs).sum(-1).mean())
    assert mean_entropy(Backbone(loaded.model), prompt, answer) == pytest.approx(expected, rel=1e-4)


def test_difficulty_is_the_base_models_where_one_is_given(
    loaded: Loaded, prompts: list[Prompt], result: ModelResult
) -> None:
    base = [dataclasses.replace(one, entropy=9.0, base_right=True, response_tokens=77) for one in result.traits[:2]]
    found = bench(loaded, prompts[:3], decode=[], max_new_tokens=10, task="gsm8k", base=base).traits
    assert [(one.entropy == 9.0, one.base_right) for one in found] == [(True, True), (True, True), (False, False)]
    assert all(one.response_tokens == 10 for one in found)


# The verb ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["-p", "nowhere.jsonl"], "Cannot read 'nowhere.jsonl'"),
        (["-p", "prompts.jsonl", "--offset", "5"], "holds no prompts in the range"),
        (["--subset", "hard"], "has no such subset"),
    ],
)
def test_wrong_prompts_are_refused_before_a_model_is_loaded(
    arguments: list[str],
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    save_tiny(tmp_path / "model")
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "x"}\n')

    def refuse(*_: object) -> None:
        raise AssertionError("the model was loaded")

    monkeypatch.setattr("jacobi_forcing.loading.load", refuse)
    assert main(["bench", "-m", "model", *arguments]) == 2
    assert said in capsys.readouterr().err
