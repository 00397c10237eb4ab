"""Responses of another engine: read, compared with the model, refused where they are not its greedy text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from collecting import PROMPTS, plain_response, run, shards
from jacobi_forcing.backbone import Backbone
from jacobi_forcing.cli import main
from jacobi_forcing.config import PromptsConfig
from jacobi_forcing.errors import DataError
from jacobi_forcing.trajectories.given import Given, check_responses, read_responses
from jacobi_forcing.trajectories.prompts import Prompt
from jacobi_forcing.trajectories.store import TrajectoryReader, read_manifest
from tiny_folder import EOS, byte_tokenizer, save_prompts, save_tiny
from tiny_models import shared_model

TEXTS = ["one", "three and more", "x"]
TOKENIZER = byte_tokenizer()


def greedy(limit: int = 14) -> dict[int, list[int]]:
    model = shared_model("llama")
    return {prompt.index: plain_response(model, prompt.ids, limit) for prompt in PROMPTS}


def lines(path: Path, records: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return path


def read(path: Path, **settings: Any) -> dict[int, list[int]]:
    source = PromptsConfig(str(path), template="raw", **settings)
    prompts = [Prompt(index, text, TOKENIZER(text)["input_ids"]) for index, text in enumerate(TEXTS)]
    return read_responses(path, prompts, TOKENIZER, source, [EOS]).responses


def test_ids_are_taken_as_they_are_and_text_is_tokenised(tmp_path: Path) -> None:
    records = [
        {"prompt": "x", "response": "ab", "finish_reason": "length"},
        {"prompt_token_ids": TOKENIZER("one")["input_ids"], "token_ids": [7, 8, EOS, 9]},
        {"prompt": "three and more", "response_ids": [5, 6]},
    ]
    # In any order; nothing after the end; an end where none was cut off.
    assert read(lines(tmp_path / "r.jsonl", records)) == {
        0: [7, 8, EOS],
        1: [5, 6, EOS],
        2: TOKENIZER("ab")["input_ids"],
    }


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"prompt": "another"}, r"no response for 1 of 3 prompts.*'x'"),
        ({"prompt_token_ids": [3, 4]}, "no response for 1 of 3"),
        ({"response_ids": None}, "line 3 has no response"),
        ({"response_ids": "7 8"}, "not a list of token ids"),
        ({"prompt": None}, "line 3 lacks 'prompt'"),
        ({"prompt": "one"}, "another line answers differently"),
    ],
)
def test_what_does_not_fit_the_prompts_is_refused_with_its_line(
    change: dict[str, Any], message: str, tmp_path: Path
) -> None:
    records = [{"prompt": text, "response_ids": [index + 5]} for index, text in enumerate(TEXTS)]
    records[2].update(change)
    with pytest.raises(DataError, match=message):
        read(lines(tmp_path / "r.jsonl", records))


def check(responses: dict[int, list[int]], model: Any = None, count: int = 0, tolerance: float = 1e-3) -> Any:
    backbone = Backbone(model or shared_model("llama"))
    return check_responses(backbone, PROMPTS, responses, count=count, batch_size=2, tolerance=tolerance)


@pytest.mark.parametrize("arch", ["llama", "gemma3", "gpt2"])
def test_greedy_text_passes_the_check(arch: str) -> None:
    model = shared_model(arch)
    responses = {prompt.index: plain_response(model, prompt.ids, 14) for prompt in PROMPTS}
    assert (check(responses, model).checked, check(responses, model).near_ties) == (5, 0)


def test_the_first_difference_is_named(tmp_path: Path) -> None:
    responses = greedy()
    right = responses[3][9]
    responses[3][9:11] = [(right + 1) % 61, 5]
    with pytest.raises(DataError, match=rf"prompt 3 is not the model's greedy text: it differs at token 9.*{right}"):
        check(responses)
    # One that is not looked at does no harm; and one within rounding is counted.
    assert check(responses, count=2).checked == 2
    assert check(responses, tolerance=1e9).near_ties >= 1


def test_a_missing_end_is_a_difference(tmp_path: Path) -> None:
    responses = greedy()
    responses[0] = [*responses[0][:5], 60]
    with pytest.raises(DataError, match="differs at token 5"):
        check(responses)


def test_given_responses_make_the_trajectories_that_the_model_makes_itself(tmp_path: Path) -> None:
    model = shared_model("llama")
    run(model, tmp_path / "own")
    report = run(model, tmp_path / "given", given=Given(greedy(20), "hash"))
    assert shards(tmp_path / "given") == shards(tmp_path / "own")
    assert (report.checked, report.response_near_ties) == (5, 0)


def test_wrong_responses_are_refused_before_anything_is_written(tmp_path: Path) -> None:
    responses = greedy()
    responses[4][0] = (responses[4][0] + 1) % 61
    with pytest.raises(DataError, match="differs at token 0"):
        run(shared_model("llama"), tmp_path / "given", given=Given(responses, "hash"))
    assert not (tmp_path / "given").exists()


def test_the_command_line_takes_prompts_and_responses_from_one_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    save_tiny(tmp_path / "model")
    source = save_prompts(tmp_path / "prompts.jsonl", 4)
    common = ["--model", "model", "--device", "cpu", "--field", "question", "-n", "4", "--max-new-tokens", "9"]
    assert main(["collect", *common, "--prompts", "prompts.jsonl", "-o", "own"]) == 0
    questions = [json.loads(line)["question"] for line in source.read_text().splitlines()]
    own = list(TrajectoryReader(tmp_path / "own"))
    records = [
        {"question": question, "token_ids": trajectory.response_ids, "finish_reason": "length"}
        for question, trajectory in zip(questions, own, strict=True)
    ]
    lines(tmp_path / "responses.jsonl", records)
    assert main(["collect", *common, "--responses", "responses.jsonl", "-o", "given"]) == 0
    assert shards(tmp_path / "given") == shards(tmp_path / "own")
    assert "4 given responses compared" in capsys.readouterr().err
    assert read_manifest(tmp_path / "given")["settings"]["responses_sha256"]
    records[1]["token_ids"][2] += 1
    lines(tmp_path / "responses.jsonl", records)
    assert main(["collect", *common, "--responses", "responses.jsonl", "-o", "wrong"]) == 2
    assert "differs at token 2" in capsys.readouterr().err
    assert main(["collect", *common, "-o", "none"]) == 2
    assert "There are no prompts" in capsys.readouterr().err
