"""Options of decoders on the command line: every setting, sampling, saved settings, rivals, batches, details."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from jacobi_forcing.cli import main
from jacobi_forcing.config import DecodeConfig
from jacobi_forcing.decode.saved import save_custom_generate
from jacobi_forcing.schema import dataclasses_help
from result_schemas import assert_valid
from tiny_folder import save_prompts, save_tiny

FIELDS = [field.name for field in dataclasses.fields(DecodeConfig)]
BENCH = ["bench", "-m", "model", "-p", "prompts.jsonl", "--field", "question", "--max-new-tokens", "6"]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A working folder with two models of one tokenizer, one of which has settings of its own, and prompts."""
    folder = tmp_path_factory.mktemp("place")
    save_tiny(folder / "model")
    save_tiny(folder / "small", "gpt2", seed=2)
    save_tiny(folder / "settled")
    save_custom_generate(folder / "settled", DecodeConfig("recycle", 5, candidates=1))
    save_prompts(folder / "prompts.jsonl", 5)
    with contextlib.chdir(folder):
        yield folder


@pytest.fixture(autouse=True)
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "250")


def answer(capsys: pytest.CaptureFixture[str], *arguments: str, model: str = "model") -> dict[str, Any]:
    """What `jforce generate --json` prints for one prompt."""
    capsys.readouterr()
    assert main(["generate", "What is 1?", "-m", model, "--max-new-tokens", "20", "--json", *arguments]) == 0
    value = json.loads(capsys.readouterr().out)
    assert isinstance(value, dict)
    return value


def report(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[list[dict[str, Any]], dict[str, Any], str]:
    """Decoders and model entry of `jforce bench`, and all it said."""
    capsys.readouterr()
    assert main([*BENCH, *arguments]) == 0
    said = capsys.readouterr()
    value = json.loads(said.out.splitlines()[-1])
    assert_valid(value, "bench")
    (entry,) = value["models"]
    return entry["decoders"], entry, said.out + said.err


def words(text: str) -> str:
    return " ".join(text.replace("│", " ").split())


@pytest.mark.parametrize("verb", ["generate", "bench"])
def test_every_setting_of_decoders_is_an_option_in_its_own_words(capsys: pytest.CaptureFixture[str], verb: str) -> None:
    assert main([verb, "--help"]) == 0
    text = words(capsys.readouterr().out)
    for field in FIELDS:
        if (verb, field) == ("bench", "sample_seed"):
            continue  # answers are compared with greedy ones
        assert f"--{field.replace('_', '-')} " in text
        assert dataclasses_help(DecodeConfig, field)[1:] in text
    assert "--no-prompt-ngrams" in text


# generate ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        "-d recycle --candidates 2 --no-prompt-ngrams",
        "-d multiblock --num-blocks 3 --spawn-ratio 0.5 --candidates 0",
        "-d window --draft-init pool",
        "-d window --static-shapes",
    ],
)
def test_no_setting_changes_the_text(place: Path, capsys: pytest.CaptureFixture[str], options: str) -> None:
    plain = answer(capsys, "-d", "ar")
    assert plain["temperature"] == 0
    assert answer(capsys, "-n", "4", *options.split())["text"] == plain["text"]


def test_settings_saved_with_a_model_hold_where_no_option_is_given(
    place: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    used: list[DecodeConfig] = []
    from jacobi_forcing.cli import answers

    real = answers.decode_ids
    monkeypatch.setattr(answers, "decode_ids", lambda *a, **k: used.append(k["decode"]) or real(*a, **k))
    for arguments, expected in (
        ([], DecodeConfig("recycle", 5, candidates=1)),
        (["-n", "3"], DecodeConfig("recycle", 3, candidates=1)),
        (["-d", "window", "--candidates", "4"], DecodeConfig("window", 5)),  # the defaults, but given
    ):
        result = answer(capsys, *arguments, model="settled")
        assert used[-1] == expected
        assert (result["decoder"], result["block_size"]) == (expected.decoder, expected.block_size)
    answer(capsys)
    assert used[-1] == DecodeConfig()


def test_a_temperature_samples_and_the_seed_decides_what(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--temperature", "1.5", "--top-k", "40", "--top-p", "0.95"]
    ar = answer(capsys, "-d", "ar", *options, "--sample-seed", "1")
    assert ar["temperature"] == 1.5
    assert answer(capsys, "-d", "recycle", "-n", "4", *options, "--sample-seed", "1")["text"] == ar["text"]
    assert answer(capsys, "-d", "ar", *options, "--sample-seed", "2")["text"] != ar["text"]
    greedy = answer(capsys, "-d", "ar")["text"]
    assert greedy != ar["text"]
    assert answer(capsys, "-d", "ar", "--temperature", "0")["text"] == greedy
    assert answer(capsys, "-d", "ar", "--temperature", "1.5", "--top-k", "1")["text"] == greedy


# bench ------------------------------------------------------------------------------------------------------------


def test_every_combination_is_measured_once_and_told_apart(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = "-l 1 -n 4 -d window -d recycle -d multiblock --candidates 0 --candidates 4 --num-blocks 3".split()
    decoders, _, said = report(capsys, *options)
    assert [(d["decoder"], d["label"]) for d in decoders] == [
        ("library", ""),
        ("ar", ""),
        ("window", ""),
        ("recycle", "candidates=0"),
        ("recycle", ""),
        ("multiblock", "candidates=0, num_blocks=3"),
        ("multiblock", "num_blocks=3"),
    ]
    assert all(d["exact"] == d["of"] == 1 for d in decoders)
    assert "candidates=0, num_blocks=3" in said


def test_rivals_stand_in_the_same_table(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = "-l 2 -n 4 --rival prompt-lookup --lookup-tokens 3 --rival assisted --assistant small".split()
    decoders, _, said = report(capsys, *options)
    assert [d["decoder"] for d in decoders] == ["library", "ar", "prompt-lookup", "assisted", "window"]
    assert decoders[2]["settings"] == {"prompt_lookup_num_tokens": 3}
    assert decoders[3]["assistant_forwards"] > 0
    assert all(d["exact"] == 2 and d["tokens_per_forward"] >= 1 for d in decoders)
    assert "drafts of 3" in said and "assisted (small)" in said


def test_batch_sizes_details_and_overhead_are_shown(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = "-n 4 -d recycle --batch-size 1 --batch-size 2 --details --overhead".split()
    decoders, entry, said = report(capsys, *options)
    assert [(d["decoder"], d["batch_size"], d["of"]) for d in decoders] == [
        (name, size, of) for size, of in ((1, 5), (2, 4)) for name in ("library", "ar", "recycle")
    ]
    assert [o["decoder"] for o in entry["overhead"]] == ["ar", "recycle"]
    for title in ("Draft accuracy", "Lines won", "Overhead of the decoding loop"):
        assert title in said
    assert "crossover" in said
    assert "Draft accuracy" not in report(capsys, "-l", "1")[2]


def test_with_json_all_tables_go_to_standard_error(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*BENCH, "-l", "1", "--details", "--json"]) == 0
    captured = capsys.readouterr()
    (line,) = captured.out.splitlines()
    assert json.loads(line)["schema"] == "jforce.bench/2"
    assert "Draft accuracy" in captured.err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([*BENCH, "--rival", "beams"], "There is no rival 'beams'; expected: one of prompt-lookup, assisted"),
        ([*BENCH, "--rival", "assisted"], "name one with --assistant"),
        ([*BENCH, "--assistant", "small"], "add --rival assisted"),
        ([*BENCH, "--rival", "assisted", "--assistant", "./none"], "There is no model './none'"),
        ([*BENCH, "--rival", "prompt-lookup", "-b", "2"], "one row at a time; seen: prompt-lookup"),
        ([*BENCH, "-b", "0"], "see jforce bench --help"),
        ([*BENCH, "-b", "6"], "too few prompts for a batch of 6; seen: 5 prompts"),
        ([*BENCH, "--spawn-ratio", "2"], "spawn_ratio"),
        ([*BENCH, "--candidates", "-1"], "candidates"),
        (["generate", "x", "-m", "model", "--top-k", "3"], "Decoding is greedy; seen: --top-k"),
        (["generate", "x", "-m", "model", "--temperature", "0", "--sample-seed", "3"], "Decoding is greedy"),
        (["generate", "x", "-m", "model", "--temperature", "-1"], "see jforce generate --help"),
        (["generate", "x", "-m", "model", "--num-blocks", "0"], "num_blocks"),
    ],
)
def test_bad_options_end_with_status_2_and_one_line(
    place: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    (error,) = [line for line in captured.err.splitlines() if line.startswith("Error: ")]
    assert message in error
