from __future__ import annotations

import io
import json
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from cli_tools import GENERATE_KEYS, last_json
from jacobi_forcing import __version__
from jacobi_forcing.cli import main
from jacobi_forcing.config import DecodeConfig, RoundConfig
from jacobi_forcing.schema import dataclasses_help

VERBS = (
    "generate",
    "collect",
    "train",
    "run",
    "bench",
    "eval",
    "profile",
    "tune",
    "trace",
    "report",
    "compare",
    "quickstart",
)


pytestmark = pytest.mark.usefixtures("wide")


def expected_text(place: Path, prompt: str, tokens: int) -> str:
    """What the library's own greedy generate writes."""
    model = AutoModelForCausalLM.from_pretrained(place / "model")
    tokenizer = AutoTokenizer.from_pretrained(place / "model")
    ids = torch.tensor([tokenizer(prompt)["input_ids"]])
    out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, do_sample=False)
    return str(tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True))


# generate ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("decoder", ["ar", "jacobi", "window"])
def test_generate_prints_one_json_object_with_the_librarys_text(
    place: Path, capsys: pytest.CaptureFixture[str], decoder: str
) -> None:
    arguments = ["generate", "What is 1?", "-m", "model", "-d", decoder, "-n", "4", "--max-new-tokens", "20", "--json"]
    assert main(arguments) == 0
    captured = capsys.readouterr()
    (line,) = captured.out.splitlines()
    result = json.loads(line)
    assert result.keys() >= GENERATE_KEYS
    assert result["text"] == expected_text(place, "What is 1?", 20)
    assert (result["decoder"], result["block_size"], result["model"]) == (decoder, 4, "model")
    assert result["tokens_per_forward"] == pytest.approx(result["tokens"] / result["forwards"], abs=1e-4)
    assert result["tokens_per_second"] == pytest.approx(result["tokens"] / result["seconds"], rel=0.1)


def test_generate_prints_the_text_on_standard_output_and_figures_on_standard_error(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["generate", "What is 2?", "--model", "model", "--max-new-tokens", "9"]) == 0
    captured = capsys.readouterr()
    assert captured.out == expected_text(place, "What is 2?", 9) + "\n"
    assert "tokens a forward" in captured.err
    assert "has no chat template" in captured.err


def test_prompts_come_from_files_and_pipes_too(
    place: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (place / "prompt.txt").write_text("What is 3?\n")
    common = ["--model", "model", "--max-new-tokens", "6", "--json"]
    assert main(["generate", "--prompt-file", "prompt.txt", *common]) == 0
    monkeypatch.setattr(sys, "stdin", io.StringIO("What is 3?\n"))
    assert main(["generate", *common]) == 0
    monkeypatch.setattr(sys, "stdin", io.StringIO("What is 3?"))
    assert main(["generate", "-", *common]) == 0
    texts = {json.loads(line)["text"] for line in capsys.readouterr().out.splitlines()}
    assert texts == {expected_text(place, "What is 3?", 6)}


def test_sweeps_are_shown_on_standard_error_and_leave_the_result_alone(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["generate", "What is 4?", "-m", "model", "-n", "4", "--max-new-tokens", "8", "--json", "--show-sweeps"]
    assert main(arguments) == 0
    captured = capsys.readouterr()
    result = last_json(captured.out)
    assert result["text"] == expected_text(place, "What is 4?", 8)
    shown = [line for line in captured.err.splitlines() if line.startswith("sweep ")]
    assert len(shown) == result["forwards"]
    assert sum(int(line.split("+")[1].split()[0]) for line in shown) == result["tokens"]


def test_the_longest_answer_ends_by_default_where_the_context_ends(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["generate", "x" * 250, "--model", "model", "--json"]) == 0
    assert last_json(capsys.readouterr().out)["tokens"] <= 6  # of 256 positions


# Bad input --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["generate", "x", "--model", "./nothing"], "There is no model './nothing'"),
        (["generate", "x", "--model", "nobody/nothing"], "hub cannot be reached"),
        (["generate", "x", "--model", "model", "--block-size", "0"], "block_size"),
        (["generate", "x", "--model", "model", "--decoder", "fast"], "one of ar, jacobi, window"),
        (["generate", "x", "--model", "model", "--draft-init", "zeros"], "draft_init"),
        (["generate", "x", "--model", "model", "--template", "fancy"], "template"),
        (["generate", "x", "--model", "model", "--template", "chat"], "no chat template"),
        (["generate", "x", "--model", "model", "--dtype", "int4"], "dtype"),
        (["generate", "x", "--model", "model", "--device", "toaster"], "'toaster' cannot be used"),
        (["generate", "x", "--model", "model", "--max-new-tokens", "0"], "max_new_tokens"),
        (["generate", "x", "--model", "model", "--max-new-tokens", "300"], "use max_new_tokens=255 or less"),
        (["generate", "x" * 300, "--model", "model"], "prompt is longer than the model's context; seen: 300 tokens"),
        (["generate", "", "--model", "model"], "The prompt is empty"),
        (["generate", "x", "--prompt-file", "y"], "both given"),
        (["generate", "--prompt-file", "nothing.txt"], "Cannot read 'nothing.txt'"),
        (["generate", "x", "--block-size", "four"], "see jforce generate --help"),
        (["generate", "x", "--blocksize", "4"], "see jforce generate --help"),
        (["generat", "x"], "see jforce --help"),
        (["run", "nothing.yaml"], "There is no recipe 'nothing.yaml'"),
        (["run", "quickstart", "--set", "rounds.0.stepps=1"], "did you mean 'steps'"),
        (["quickstart", "--set", "sed=1"], "did you mean 'seed'"),
        (["bench", "--model", "model", "--task", "chess"], "one of none, word_problems, gsm8k"),
        (["bench", "--model", "model", "-p", "prompts.jsonl"], "line 1 lacks 'prompt'"),
        (["bench", "--model", "model", "-p", "prompts.jsonl", "--field", "question", "-n", "0"], "block_size"),
        (["collect", "-m", "model", "-p", "broken.jsonl", "-o", "out"], "'broken.jsonl' line 2 is not valid JSON"),
        (["collect", "-m", "model", "-p", "prompts.jsonl", "-o", "out", "-n", "0"], "block_size"),
        (["train", "-m", "model", "-t", "nothing", "-o", "out", "--steps", "1"], "no trajectories in 'nothing'"),
    ],
)
def test_bad_input_ends_with_status_2_and_one_line(
    place: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    (place / "broken.jsonl").write_text('{"prompt": "a"}\n{"prompt": \n')
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    errors = [line for line in captured.err.splitlines() if line.startswith("Error: ")]
    assert len(errors) == 1
    assert message in errors[0]
    assert "Traceback" not in captured.err


def test_debug_shows_the_traceback(place: Path) -> None:
    with pytest.raises(ValueError, match="There is no model"):
        main(["generate", "x", "--model", "./nothing", "--debug"])


def test_a_fault_of_our_own_is_one_line_as_well(
    place: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("jacobi_forcing.loading.load", lambda _: 1 / 0)
    assert main(["generate", "x", "--model", "model"]) == 1
    fault = "Error: ZeroDivisionError: division by zero (a fault of jforce; --debug shows where)\n"
    assert capsys.readouterr().err == fault


# Help -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_has_help(capsys: pytest.CaptureFixture[str], verb: str) -> None:
    assert main([verb, "--help"]) == 0
    out = capsys.readouterr().out
    assert f"jforce {verb}" in out
    assert "--json" in out
    assert "--debug" in out


def test_help_gives_units_defaults_and_the_settings_own_words(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "--help"]) == 0
    text = " ".join(capsys.readouterr().out.replace("│", " ").split())
    for field, default in (("block_size", "16"), ("decoder", "window"), ("draft_seed", "0")):
        words = dataclasses_help(DecodeConfig, field)
        assert f"{words[1:]}. [default: {default}]" in text
    assert "float32, bfloat16, float16" in text
    assert main(["train", "--help"]) == 0
    text = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert dataclasses_help(RoundConfig, "max_length")[1:] in text


def test_without_a_verb_the_help_is_shown_and_the_status_is_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    captured = capsys.readouterr()
    assert "quickstart" in captured.out
    assert captured.err == "Error: A verb is missing; see jforce --help.\n"


def test_the_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"jforce {__version__}\n"
