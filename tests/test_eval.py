"""`jforce eval` and what is behind it: quality, speed and the comparison with ar out of one run, resumable."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from jacobi_forcing.cli import main
from jacobi_forcing.embedded import base_folder
from jacobi_forcing.embedded.problems import problems
from jacobi_forcing.evaluate import harness
from jacobi_forcing.evaluate.journal import Journal
from result_schemas import assert_valid

ITEMS = 4
COMMON = ["eval", "--tasks", "gsm8k", "--data", "gsm8k.jsonl", "--max-new-tokens", "90", "--device", "cpu"]


def problem_records() -> list[dict[str, str]]:
    """Problems that the embedded model solves, as GSM8K has them; the last reference is wrong by one."""
    found = list(problems("heldout", 3, ITEMS, steps=2))
    results = [problem.result + (index == ITEMS - 1) for index, problem in enumerate(found)]
    return [{"question": p.question, "answer": f"#### {result}"} for p, result in zip(found, results, strict=True)]


def write_lines(path: Path, records: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("place")
    write_lines(folder / "gsm8k.jsonl", problem_records())
    with contextlib.chdir(folder):
        yield folder


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert main([*COMMON, *arguments]) == 0
    value: dict[str, Any] = json.loads(capsys.readouterr().out.splitlines()[-1])
    return value


def lines_of(folder: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path(folder, "items.jsonl").read_text().splitlines()]


@pytest.fixture
def report(place: Path, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    """The same run for every test of it: later ones find its answers."""
    return run(capsys, "-d", "window", "-d", "multiblock", "-n", "8", "-o", "whole")


def test_quality_and_speed_come_out_of_the_same_run(report: dict[str, Any]) -> None:
    assert_valid(report, "eval")
    assert json.loads(Path("whole", "eval.json").read_text()).keys() == report.keys()
    (task,) = report["tasks"]
    assert [entry["decoder"] for entry in task["decoders"]] == ["ar", "window", "multiblock"]
    for entry in task["decoders"]:
        assert (entry["quality"]["answers"], entry["quality"]["solved"]) == (ITEMS, ITEMS - 1)
        assert entry["quality"]["solve_rate_interval"] == [0.3006, 0.9544]  # Wilson's for 3 of 4
        assert entry["tokens_per_second"] > 0 and entry["seconds"] > 0
    ar, window, multiblock = task["decoders"]
    assert ar["tokens_per_forward"] == 1.0 and ar["forwards"] == ar["tokens"] and ar["paired"] is None
    assert ar["speedup"] == 1.0 and ar["cost_ratio"] is None
    assert window["tokens"] == ar["tokens"] and window["forwards"] < ar["forwards"]
    assert window["cost_ratio"] > 0 and multiblock["median_slots"] > window["median_slots"]


def test_each_decoder_is_paired_with_ar_item_by_item(report: dict[str, Any]) -> None:
    for entry in report["tasks"][0]["decoders"][1:]:
        paired = entry["paired"]
        assert (paired["exact"], paired["of"], paired["differ"], paired["faults"]) == (ITEMS, ITEMS, [], 0)
        assert (paired["only_this"], paired["only_ar"], paired["mcnemar_p"]) == (0, 0, 1.0)
        assert paired["difference_interval"] == [0.0, 0.0]


def test_every_answer_has_a_line_with_the_librarys_ids(report: dict[str, Any]) -> None:
    found = lines_of("whole")
    assert len(found) == 3 * ITEMS
    model = AutoModelForCausalLM.from_pretrained(base_folder())
    tokenizer = AutoTokenizer.from_pretrained(base_folder())
    for line in found:
        assert_valid(line, "eval-item")
        record = problem_records()[line["item"]]
        ids = tokenizer(f"Question: {record['question']}\nAnswer:", return_tensors="pt")["input_ids"]
        expected = model.generate(ids, do_sample=False, max_new_tokens=90)[0, ids.shape[1] :].tolist()
        assert line["ids"] == expected
        assert line["tokens"] == len(expected) and line["finished"]
        assert line["right"] is (line["item"] != ITEMS - 1)
        assert line["answer"] == str(list(problems("heldout", 3, ITEMS, steps=2))[line["item"]].result)


def test_the_table_shows_no_speed_without_quality(place: Path, capsys: pytest.CaptureFixture[str], report: Any) -> None:
    run(capsys, "-d", "window", "-n", "8", "-o", "whole", "--json")
    assert main([*COMMON, "-d", "window", "-n", "8", "-o", "whole"]) == 0
    captured = capsys.readouterr()
    head, ar, window, last = captured.out.splitlines()
    heads = "task decoder n right 95 % interval repeats cut off exact TPF TPS speed-up s/item cost(n)/cost(1)"
    assert head.split() == heads.split()
    assert "75.0 % of 4" in ar and "75.0 % of 4" in window and f"{ITEMS}/{ITEMS}" in window
    assert json.loads(last)["schema"] == "jforce.eval/1"
    assert "right and wrong on the same items as ar" in captured.err
    assert "answers were made before" in captured.err


def test_batches_have_the_same_ids(place: Path, capsys: pytest.CaptureFixture[str], report: Any) -> None:
    run(capsys, "-d", "window", "-n", "8", "-b", "3", "-o", "batched")
    alone = {(line["item"], line["decoder"]): line["ids"] for line in lines_of("whole")}
    found = lines_of("batched")
    assert {line["rows"] for line in found} == {1, 3}
    assert all(line["ids"] == alone[line["item"], line["decoder"]] for line in found)


# Killed and gone on with ------------------------------------------------------------------------------------------


def test_a_run_that_was_killed_goes_on_with_the_items_left(
    place: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, report: dict[str, Any]
) -> None:
    real, calls = Journal.add, []

    def add(self: Journal, answers: Any) -> None:
        calls.append(answers)
        if len(calls) == 4:
            raise KeyboardInterrupt
        real(self, answers)

    arguments = [*COMMON, "-d", "window", "-n", "8", "-o", "killed"]
    with monkeypatch.context() as patch:
        patch.setattr(Journal, "add", add)
        assert main(arguments) == 130
    path = Path("killed", "answers.jsonl")
    kept = path.read_text().splitlines()
    assert len(kept) == 3 and not Path("killed", "eval.json").exists()
    with path.open("a") as file:
        file.write('{"task": "gsm8k", "item": 3, "de')  # the line at which a kill -9 hit
    decoded: list[int] = []
    plain = harness.JForceLM._answers

    def answers(self: Any, contender: Any, batch: Any) -> Any:
        decoded.extend(one.item for one in batch)
        return plain(self, contender, batch)

    monkeypatch.setattr(harness.JForceLM, "_answers", answers)
    run(capsys, "-d", "window", "-n", "8", "-o", "killed")
    assert len(decoded) == 2 * ITEMS - 3
    assert path.read_text().splitlines()[:3] == kept
    whole = {(line["item"], line["decoder"]): line["ids"] for line in lines_of("whole")}
    assert {(line["item"], line["decoder"]): line["ids"] for line in lines_of("killed")} == {
        key: ids for key, ids in whole.items() if key[1] != "multiblock"
    }


def test_answers_of_other_settings_are_not_gone_on_with(
    place: Path, capsys: pytest.CaptureFixture[str], report: Any
) -> None:
    assert main([*COMMON, "-d", "window", "-n", "8", "-o", "whole", "-b", "2"]) == 2
    error = capsys.readouterr().err
    assert "were made otherwise; seen: batch_size: 1; expected: batch_size: 2; name another --output" in error


def test_a_damaged_line_is_named(tmp_path: Path) -> None:
    Journal(tmp_path, {"a": 1})
    (tmp_path / "answers.jsonl").write_text('{"task": "gsm8k"}\n')
    with pytest.raises(Exception, match="line 1 is damaged"):
        Journal(tmp_path, {"a": 1})


# Without a model, and wrong calls ---------------------------------------------------------------------------------

REFERENCES: dict[str, list[dict[str, Any]]] = {
    "gsm8k": [{"question": "1 + 1?", "answer": "1+1=<<1+1=2>>2\n#### 2"}],
    "math": [{"problem": "Halve $\\pi$.", "solution": "$\\boxed{\\frac{\\pi}{2}}$", "answer": "\\frac{\\pi}{2}"}],
    "humaneval": [
        {
            "task_id": "HumanEval/0",
            "prompt": "def one():\n",
            "entry_point": "one",
            "canonical_solution": "    return 1\n",
            "test": "def check(candidate):\n    assert candidate() == 1\n",
        }
    ],
    "mbpp": [
        {"task_id": 1, "text": "Give one.", "code": "def one():\n    return 1", "test_list": ["assert one() == 1"]},
        {"task_id": 2, "text": "Give two.", "code": "def two():\n    return 1", "test_list": ["assert two() == 2"]},
    ],
}


def test_the_datas_own_answers_can_be_graded(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = {name: write_lines(tmp_path / f"{name}.jsonl", records) for name, records in REFERENCES.items()}
    data = [text for name, path in files.items() for text in ("--data", f"{name}={path}")]
    assert main(["eval", "--check-references", "--tasks", ",".join(files), *data]) == 0
    captured = capsys.readouterr()
    value = json.loads(captured.out.splitlines()[-1])
    assert_valid(value, "references")
    assert [(task["task"], task["items"], task["right"]) for task in value["tasks"]] == [
        ("gsm8k", 1, 1),
        ("math", 1, 1),
        ("humaneval", 1, 1),
        ("mbpp", 2, 1),
    ]
    assert value["tasks"][3]["wrong"][0]["detail"].startswith("failed: AssertionError")
    assert value["tasks"][3]["isolation"]["rlimits"] is True
    assert "Generated code ran" in captured.err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--tasks", "mmlu"], "There is no task 'mmlu'; expected: one or more of gsm8k, math, humaneval, mbpp"),
        (["--tasks", ","], "names none, or one twice"),
        (["--tasks", "gsm8k,math", "--data", "x.jsonl"], "not clear which task a file is for"),
        (["--tasks", "gsm8k", "--data", "math=x.jsonl"], "The data of 'math' is given for nothing"),
        (["--tasks", "gsm8k", "--data", "missing.jsonl"], "Cannot read 'missing.jsonl'"),
        (["--tasks", "gsm8k", "-d", "beam"], "one of ar, jacobi, window, recycle, multiblock"),
        (["--tasks", "mbpp", "--data", "gsm8k.jsonl"], "'gsm8k.jsonl' line 1 lacks 'text', which mbpp needs"),
    ],
)
def test_wrong_calls_say_what_to_do(
    place: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert main(["eval", *arguments]) == 2
    assert message in capsys.readouterr().err
