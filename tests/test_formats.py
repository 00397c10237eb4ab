from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from jacobi_forcing.errors import ArtefactError
from jacobi_forcing.formats import common, identify, read_lines, read_result, schema, stamped, versions
from result_schemas import assert_valid, validator

LINE = {"step": 10, "loss": 1.5}
PROBE = {
    "step": 0,
    "tokens_per_forward": 1.5,
    "answers": 2,
    "mean_tokens": 8.0,
    "finished_rate": 1.0,
    "repetition_rate": 0.0,
    "solved": None,
    "solve_rate": None,
    "solve_rate_interval": None,
    "decoder": "window",
    "block_size": 4,
}
BENCH: dict[str, Any] = {"models": [], "prompts": {}, "provenance": {}}


def test_every_schema_is_a_schema_and_names_itself() -> None:
    Draft202012Validator.check_schema(common())
    assert {"bench", "run", "train-log", "probe", "trajectories"} <= versions().keys()
    for kind, known in versions().items():
        for version in known:
            form = schema(kind, version)
            Draft202012Validator.check_schema(form)
            assert form["$id"] == f"urn:jforce:{kind}:{version}"
            assert form["properties"]["schema"] == {"const": f"jforce.{kind}/{version}"}
            assert "schema" in form["required"]
            assert form["title"]
            list(validator(kind, version).iter_errors({}))  # every reference leads somewhere


def test_a_stamp_comes_first_and_is_the_highest_version() -> None:
    value = stamped("bench", BENCH)
    assert next(iter(value.items())) == ("schema", f"jforce.bench/{versions()['bench'][-1]}")
    with pytest.raises(KeyError):
        stamped("benhc", BENCH)


def test_a_whole_result_is_held_against_its_schema() -> None:
    assert_valid(stamped("train-log", LINE), "train-log")
    assert_valid(stamped("probe", PROBE), "probe")
    for wrong in ({"step": -1, "loss": 1.0}, {"step": 1}, {"step": 1, "loss": "nan"}):
        with pytest.raises(AssertionError):
            assert_valid(stamped("train-log", wrong))
    with pytest.raises(AssertionError, match=r"\$.models"):
        assert_valid(stamped("bench", BENCH))
    with pytest.raises(AssertionError, match="no schema is named"):
        assert_valid(LINE)


@pytest.mark.parametrize(
    ("value", "kinds", "message"),
    [
        ({"x": 1}, (), "is no result of jforce; seen: schema: None; expected: .*bench"),
        ({"schema": "other/1", **BENCH}, (), "is no result of jforce; seen: schema: other/1"),
        ({"schema": 2, **BENCH}, (), "is no result of jforce; seen: schema: 2"),
        ({"schema": "jforce.song/1"}, (), "is no result of jforce"),
        (stamped("bench", BENCH), ("run",), "another kind; seen: bench; expected: run"),
        ({"schema": "jforce.bench/99", **BENCH}, (), "install a newer jacobi-forcing"),
        ({"kind": "bench", "version": 1, **BENCH}, (), "measure again"),
        (stamped("bench", {"models": []}), (), "is damaged; seen: no prompts, provenance; expected: jforce.bench/2"),
    ],
)
def test_what_cannot_be_read_is_refused_with_what_to_do(
    value: dict[str, Any], kinds: tuple[str, ...], message: str
) -> None:
    with pytest.raises(ArtefactError, match=message):
        identify(value, "file.json", *kinds)


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        ({"kind": "bench", "version": 2, **BENCH}, "bench"),
        (LINE, "train-log"),
        ({"step": 5, "train_loss": 2.0}, "train-log"),
        (PROBE, "probe"),
    ],
)
def test_results_from_before_the_schemas_are_read_with_a_note(value: dict[str, Any], kind: str, tmp_path: Path) -> None:
    path = tmp_path / "old.json"
    path.write_text(json.dumps(value))
    result = read_result(path, kind)
    assert (result.kind, result.value) == (kind, value)
    assert result.note is not None and f"names no schema: read as jforce.{kind}/" in result.note
    path.write_text(json.dumps(stamped(kind, value)))
    assert read_result(path, kind).note is None


def test_lines_are_read_one_by_one_and_a_damaged_one_is_named(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    path.write_text(json.dumps(stamped("train-log", LINE)) + "\n" + json.dumps(LINE) + "\n")
    assert [line["step"] for line in read_lines(path, "train-log")] == [10, 10]
    for damage, message in (('{"step"', "line 2"), ("[]", "line 2"), (json.dumps(PROBE), "log.jsonl:2.*another kind")):
        path.write_text(json.dumps(LINE) + "\n" + damage + "\n")
        with pytest.raises(ArtefactError, match=message):
            read_lines(path, "train-log")
    with pytest.raises(ArtefactError, match="Cannot read"):
        read_lines(tmp_path / "none.jsonl", "train-log")
