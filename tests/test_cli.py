from __future__ import annotations

import contextlib
import functools
import io
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM, AutoTokenizer

from jacobi_forcing import __version__
from jacobi_forcing.cli import main
from jacobi_forcing.config import DecodeConfig, RoundConfig
from jacobi_forcing.schema import dataclasses_help
from tiny_folder import save_prompts, save_tiny

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
GENERATE_KEYS = {
    "text",
    "tokens",
    "forwards",
    "tokens_per_forward",
    "seconds",
    "tokens_per_second",
    "decoder",
    "block_size",
    "model",
}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A working folder with a model and prompts."""
    folder = tmp_path_factory.mktemp("place")
    save_tiny(folder / "model")
    save_prompts(folder / "prompts.jsonl", 6)
    with contextlib.chdir(folder):
        yield folder


@pytest.fixture(autouse=True)
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")


def expected_text(place: Path, prompt: str, tokens: int) -> str:
    """What the library's own greedy generate writes."""
    model = AutoModelForCausalLM.from_pretrained(place / "model")
    tokenizer = AutoTokenizer.from_pretrained(place / "model")
    ids = torch.tensor([tokenizer(prompt)["input_ids"]])
    out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, do_sample=False)
    return str(tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True))


def last_json(output: str) -> dict[str, Any]:
    value = json.loads(output.splitlines()[-1])
    assert isinstance(value, dict)
    return value


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


# The other verbs --------------------------------------------------------------------------------------------------


def test_collect_train_and_bench_hand_on_to_each_other(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prompts = ["--prompts", "prompts.jsonl", "--field", "question"]
    collect = ["collect", "-m", "model", *prompts, "-o", "trajectories", "-n", "4", "--max-new-tokens", "12", "--json"]
    assert main(collect) == 0
    assert last_json(capsys.readouterr().out)["trajectories"] == 6
    train = ["train", "-m", "model", "-t", "trajectories", "-o", "trained", "--steps", "2", "--lr", "1e-3", "-w", "2"]
    assert main([*train, "--max-length", "96", "--json"]) == 0
    (line,) = capsys.readouterr().out.splitlines()  # the library's trainer keeps silent
    trained = json.loads(line)
    assert trained["model"] == "trained/model"
    assert main([*train, "--max-length", "96"]) == 0
    captured = capsys.readouterr()
    assert captured.out == "trained/model\n"
    assert "done before" in captured.err
    assert main([*train, "--max-length", "100"]) == 2
    refusal = capsys.readouterr().err
    assert "round.max_length" in refusal and "--redo" not in refusal
    # A model that lies where the trained one would go is never written over.
    before = (place / "model" / "model.safetensors").read_bytes()
    assert main(["train", "-m", "model", "-t", "trajectories", "-o", ".", "--steps", "1", "--max-length", "96"]) == 2
    assert "not of a run; seen: model" in capsys.readouterr().err
    assert (place / "model" / "model.safetensors").read_bytes() == before

    bench = [
        "bench",
        "-m",
        "model",
        "--compare",
        "trained/model",
        *prompts,
        "--task",
        "gsm8k",
        "--answer-field",
        "answer",
    ]
    assert main([*bench, "-l", "2", "-n", "4", "-n", "8", "--max-new-tokens", "8", "-o", "bench.json"]) == 0
    captured = capsys.readouterr()
    report = last_json(captured.out)
    assert report == json.loads((place / "bench.json").read_text())
    assert [entry["label"] for entry in report["models"]] == ["model", "trained/model"]
    for entry in report["models"]:
        assert [(d["decoder"], d["block_size"]) for d in entry["decoders"]] == [
            ("library", None),
            ("ar", None),
            ("window", 4),
            ("window", 8),
        ]
        assert all(d["exact"] == d["of"] == 2 for d in entry["decoders"])
    assert "speed-up" in captured.out and "exact" in captured.out and "repeats" in captured.out
    assert "to be expected" in captured.err


def write_recipe(place: Path, output: str, prompts: str = "prompts.jsonl") -> None:
    recipe = {
        "model": {"name": "model", "device": "cpu"},
        "prompts": {"source": prompts, "field": "question", "limit": 4},
        "collect": {"max_new_tokens": 8},
        "rounds": [{"block_size": 4, "window_size": 2, "steps": 1, "max_length": 96}],
        "evaluation": {"prompts": {"offset": 4}, "max_new_tokens": 6, "decode": [{"block_size": 4}]},
        "output": output,
    }
    (place / "recipe.yaml").write_text(yaml.safe_dump(recipe))


def test_run_prints_the_table_and_the_report(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_recipe(place, "run")
    assert main(["run", "recipe.yaml"]) == 0
    captured = capsys.readouterr()
    assert captured.out.count("round 1") == 3  # the library, ar and window
    assert "collect-1" in captured.err and "train-1" in captured.err
    assert main(["run", "recipe.yaml", "--json"]) == 0
    captured = capsys.readouterr()
    (line,) = captured.out.splitlines()
    assert json.loads(line) == {**json.loads((place / "run" / "report.json").read_text()), "output": "run"}
    assert "done before" in captured.err


def test_quickstart_ends_with_a_sample_and_the_next_commands(
    place: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    write_recipe(place, "quick")
    monkeypatch.setattr("jacobi_forcing.recipe.settings.SHIPPED", (place,))
    (place / "recipe.yaml").rename(place / "quickstart.yaml")
    recipe = yaml.safe_load((place / "quickstart.yaml").read_text())
    recipe |= {"mode": "adapter", "adapter": {"rank": 2, "lines_per_response": 2}, "output": "quick-adapter"}
    recipe["rounds"] = [{"block_size": 4, "steps": 1, "learning_rate": 1e-3, "max_length": 96}]
    (place / "quickstart-adapter.yaml").write_text(yaml.safe_dump(recipe))
    monkeypatch.setattr("jacobi_forcing.cli.quickstart.train_together", lambda *_, **__: False)
    assert main(["quickstart", "--mode", "both"]) == 0
    captured = capsys.readouterr()
    assert captured.out.count("adapter, round 1") == 3
    assert captured.out.count("base ") == 3
    assert "--compare quick/model --adapter quick-adapter/model" in captured.err
    said = " ".join(captured.err.split())
    assert "Which to choose: full: new weights" in said and "adapter: the base and a drafting adapter" in said
    assert main(["quickstart"]) == 0  # both by default, and at once
    captured = capsys.readouterr()
    assert captured.out.count("adapter, round 1") == 3
    assert captured.err.count("done before") == 7
    assert main(["quickstart", "--mode", "adapter"]) == 0
    assert "--model builtin:word-problems --adapter quick-adapter/model" in capsys.readouterr().err
    assert main(["quickstart", "--mode", "half"]) == 2
    assert main(["quickstart", "--mode", "full"]) == 0
    captured = capsys.readouterr()
    assert "What is 4 + 8?" in captured.out  # the first held-out prompt
    assert "sweep 1: +" in captured.err
    assert "jforce generate --model quick/model --show-sweeps 'What is 4 + 8?'" in captured.err
    assert "jforce bench" in captured.err


# Processes --------------------------------------------------------------------------------------------------------

WITHOUT_EXTRAS = """
import sys
for name in ("accelerate", "datasets", "pyarrow"):
    sys.modules[name] = None  # importing it now fails, and find_spec calls it absent
from jacobi_forcing.cli import main
status = main(["generate", "What is 6?", "-m", "model", "--max-new-tokens", "4", "--json"])
more = main(["collect", "-m", "model", "-p", "prompts.jsonl", "--field", "question", "-o", "extra", "-n", "4"])
print(status, more)
"""


def start(place: Path, *arguments: str) -> subprocess.Popen[str]:
    source = str(Path(__file__).resolve().parents[1] / "src")
    environment = {**os.environ, "PYTHONPATH": source, "OMP_NUM_THREADS": "1"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    # Tests that a shell runs in the background inherit that Ctrl-C is ignored.
    heeding = functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    return subprocess.Popen(
        [sys.executable, *arguments], cwd=place, env=environment, text=True, preexec_fn=heeding, **pipes
    )


@pytest.mark.timeout(300)  # here and below: a process imports torch, on a machine that may be busy
def test_a_process_prints_nothing_but_json_and_our_own_lines(place: Path) -> None:
    arguments = ["generate", "What is 5?", "-m", "model", "--max-new-tokens", "4", "--json"]
    out, err = start(place, "-m", "jacobi_forcing", *arguments).communicate(timeout=250)
    assert json.loads(out).keys() >= GENERATE_KEYS
    assert err.splitlines() == ["The tokenizer has no chat template: prompts are used as they are"]


@pytest.mark.timeout(300)
def test_generate_does_without_the_training_extras_and_collect_names_the_one_it_needs(place: Path) -> None:
    out, err = start(place, "-c", WITHOUT_EXTRAS).communicate(timeout=250)
    answer, statuses = out.splitlines()
    assert json.loads(answer).keys() >= GENERATE_KEYS
    assert statuses == "0 2"
    assert "Error: The package 'pyarrow' is not installed; install it with: pip install 'jacobi-forcing[train]'." in err


@pytest.mark.timeout(300)
def test_ctrl_c_ends_quietly_with_status_130(place: Path) -> None:
    save_prompts(place / "many.jsonl", 2000)
    arguments = ["collect", "-m", "model", "-p", "many.jsonl", "--field", "question", "-o", "stopped"]
    process = start(place, "-m", "jacobi_forcing", *arguments, "--shard-size", "1")
    deadline = time.monotonic() + 200
    while not (place / "stopped" / "shard-00000.parquet").exists():
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "Traceback" not in err
