"""The table of one domain and the curves of its training: made of what there is, part by part, and never of less."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import smollm2_curve as curve
import smollm2_table as maker
from jacobi_forcing.adapter import GatedAdapter
from jacobi_forcing.config import ModelConfig
from jacobi_forcing.errors import ArtefactError
from jacobi_forcing.formats import read_result
from jacobi_forcing.loading import load
from jacobi_forcing.recipe.reporter import Reporter
from result_forms import quality, run, save_run
from result_schemas import assert_valid
from test_recipe import Told
from tiny_folder import save_prompts, save_tiny


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("table")
    save_tiny(folder / "base")
    save_tiny(folder / "runs/smollm2-gsm8k/round-1/model", seed=1)
    save_prompts(folder / "test.jsonl", 5)
    adapter = GatedAdapter.attach(load(ModelConfig(str(folder / "base"), device="cpu")).model, rank=2)
    torch.manual_seed(0)
    for part in adapter.parameters():
        torch.nn.init.normal_(part, std=0.1)
    adapter.save(folder / "runs/smollm2-gsm8k-adapter/model")
    threads = torch.get_num_threads()
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        yield folder
    torch.set_num_threads(threads)


def asked(*more: str) -> Any:
    found = maker.arguments().parse_args(
        [
            *("smollm2-gsm8k", "--base", "base", "--data", "test.jsonl", "--limit", "4", "--speed-prompts", "2"),
            *("--block-sizes", "4", "--base-decoders", "window", "jacobi", "--decoders", "window"),
            *("--set", "evaluation.prompts.template=raw", "--set", "evaluation.max_new_tokens=8"),
            *("--set", "model.device=cpu", *more),
        ]
    )
    found.output = found.output or Path("out")
    return found


@pytest.fixture(scope="module")
def table(place: Path) -> dict[str, Any]:
    found = maker.make(asked(), Reporter())
    assert isinstance(found, dict)
    return found


def test_every_model_that_is_there_has_its_rows_and_the_others_a_note(table: dict[str, Any]) -> None:
    rows = [(row["model"], row["decoder"]) for row in table["rows"]]
    assert rows == [
        *(("base", name) for name in ("ar", "window", "jacobi")),
        *(("round 1", name) for name in ("ar", "window")),
        *(("adapter", name) for name in ("ar", "window")),
    ]
    for label in ("CLLM-style", "round 2"):
        assert sum(note.startswith(f"{label} is left out") for note in table["notes"]) == 1
    (aim,) = (note for note in table["notes"] if note.startswith("Aim of tokens per forward 1.6: missed"))
    assert "; the base alone has " in aim
    for label in ("round 1", "adapter"):
        assert any(note.startswith(f"{label}, window n=4, the fastest of its model: ") for note in table["notes"])
    assert any(note.startswith("round 1:") and "the base's interval" in note for note in table["notes"])


def test_speed_stands_beside_quality_exactness_and_agreement(table: dict[str, Any]) -> None:
    rows = {(row["model"], row["decoder"]): row for row in table["rows"]}
    for row in rows.values():
        assert (row["quality"]["answers"], row["of"], row["exact"]) == (4, 2, 2)
    assert rows["base", "ar"]["tokens_per_forward"] == rows["base", "ar"]["speedup"] == 1.0
    # The base and the adapter write the base's text; other weights write another.
    for key in (("base", "ar"), ("base", "jacobi"), ("adapter", "window")):
        assert rows[key]["as_base"] == {"equal": 2, "of": 2, "prefix": 1.0}
    assert rows["round 1", "window"]["as_base"]["of"] == 4
    assert rows["round 1", "window"]["as_base"]["equal"] < 4
    assert rows["adapter", "window"]["quality"] == rows["base", "ar"]["quality"]


def test_the_files_are_a_table_and_a_bench_that_reports_read(table: dict[str, Any], place: Path) -> None:
    assert json.loads((place / "out/table.json").read_text()) == json.loads(json.dumps(table))
    text = (place / "out/table.md").read_text()
    assert text.count("\n| ") == len(table["rows"]) + 1
    assert str(place) not in text + (place / "out/bench.json").read_text()
    value = read_result(place / "out/bench.json", "bench").value
    assert_valid(value, "bench")
    assert [model["label"] for model in value["models"]] == ["base", "round 1", "adapter"]


def test_what_is_done_is_kept_and_what_has_changed_is_measured_anew(
    table: dict[str, Any], place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = Told()
    assert maker.make(asked(), told)["rows"] == table["rows"]
    assert told.done == []
    assert told.skipped == [
        *("quality-base", "speed-base", "quality-round-1", "speed-round-1", "quality-base", "speed-adapter")
    ]

    def dead(*_: Any) -> None:
        raise KeyboardInterrupt

    # Killed in the last part: what came before is kept.
    speed = maker.measure_speed
    monkeypatch.setattr(
        maker, "measure_speed", lambda entry, *rest: dead() if entry.label == "adapter" else speed(entry, *rest)
    )
    other = asked("--output", "other", "--speed-prompts", "1")
    with pytest.raises(KeyboardInterrupt):
        maker.make(other, Reporter())
    assert {row["model"] for row in json.loads((place / "other/table.json").read_text())["rows"]} == {"base", "round 1"}
    monkeypatch.undo()
    monkeypatch.chdir(place)
    told = Told()
    maker.make(other, told)
    assert told.done == ["speed-adapter"]


@pytest.mark.parametrize("text", ["{", "[1]", "{}", '{"state": "done", "key": "x", "inputs": {}}'])
def test_a_part_whose_file_is_damaged_is_named_and_done_again_once_that_is_deleted(
    table: dict[str, Any], place: Path, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    monkeypatch.chdir(place)
    marker = place / "out/stages/speed-base.json"
    whole = marker.read_text()
    marker.write_text(text)
    with pytest.raises(ArtefactError, match=r"speed-base\.json' is damaged; .*delete it, and that part is done again"):
        maker.make(asked(), Reporter())
    assert marker.read_text() == text
    marker.unlink()
    told = Told()
    monkeypatch.setattr(maker, "measure_speed", lambda *_: json.loads(whole)["result"])
    maker.make(asked(), told)
    assert told.done == ["speed-base"]


def test_agreement_counts_equal_texts_and_what_texts_have_in_common() -> None:
    found = maker.agreement([[1, 2, 3], [1, 2, 9, 9]], [[1, 2, 3], [1, 2, 3, 4]])
    assert found == {"equal": 1, "of": 2, "prefix": 0.75}


def test_points_are_placed_by_the_tokens_of_all_rounds_before(tmp_path: Path) -> None:
    folder = tmp_path / "smollm2-orders"
    save_run(folder, run(stages={"collect-1": {"seconds": 1, "core_seconds": 1800}, "train-1": {"core_seconds": 5400}}))
    lines = [{"step": step, "loss": 1.0, "train_tokens": 100 * step} for step in (10, 20, 30)]
    text = "".join(json.dumps({"schema": "jforce.train-log/1", **line}) + "\n" for line in lines)
    (folder / "round-1/log.jsonl").write_text(text)
    second = folder / "round-2"
    second.mkdir()
    (second / "log.jsonl").write_text(text)
    probe = {"step": 15, "tokens_per_forward": 3.0, **quality(), "decoder": "window", "block_size": 16}
    (second / "probe.jsonl").write_text(json.dumps({"schema": "jforce.probe/1", **probe}) + "\n")
    found = curve.gather(folder)
    assert [(point["round"], point["tokens"]) for point in curve.points(found)] == [(1, 0), (1, 3000), (2, 4500)]
    assert curve.cost(found)["core_hours"] == 2.0


def test_training_has_paid_when_what_is_saved_is_what_it_cost(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def row(model: str, decoder: str, speedup: float, rate: float) -> dict[str, Any]:
        return {"model": model, "decoder": decoder, "tokens_per_second": rate, "speedup": speedup}

    # The adapter was measured while the machine was busy: twice as fast as ar, whose rate was 7 there.
    base = [row("base", "ar", 1.0, 10.0), row("base", "window", 0.5, 5.0)]
    table = {"rows": [*base, row("adapter", "ar", 1.0, 7.0), row("adapter", "window", 2.0, 14.0)]}
    even = curve.break_even(2.0, table, "adapter")
    assert (even["tokens"], even["decoder_before"]) == (144_000, "ar")  # 7200 s / (0.1 - 0.05) s a token
    assert curve.break_even(2.0, table, "round 2")["tokens"] is None
    slower = {"rows": [*base, row("round 2", "window", 0.9, 20.0)]}
    assert curve.break_even(2.0, slower, "round 2")["tokens"] is None
    with pytest.raises(SystemExit, match="no train_tokens"):
        curve.tokens_at([{"step": 10, "loss": 1.0}], 5)


def test_the_figure_is_a_drawing_of_every_run(tmp_path: Path) -> None:
    points = [{"round": 1, "tokens": tokens, "tokens_per_forward": 1.0 + tokens} for tokens in (0, 100)]
    curve.draw([{"label": label, "core_hours": 1.0, "points": points} for label in ("one", "two")], tmp_path / "c.svg")
    text = (tmp_path / "c.svg").read_text()
    assert text.startswith("<?xml") and "<svg" in text
