from __future__ import annotations

import copy
import dataclasses
import json
import random
from pathlib import Path
from typing import Any

import pytest

from jacobi_forcing.cli import main
from jacobi_forcing.errors import ConfigError, DataError
from jacobi_forcing.formats import Result, identify
from jacobi_forcing.viz.compare import COLUMNS, METRICS, Change, bounds, compare, failures, remarks, rows
from jacobi_forcing.viz.entries import Entry
from result_forms import PROMPTS, bench, decoder, evaluation, evaluation_items, model, quality, run
from result_schemas import assert_valid

OLD = bench(model("m", decoder("window", 16, tpf=2.0, tps=150.0, cost=1.5)))
NEW = bench(model("m", decoder("window", 16, tpf=3.0, tps=180.0, cost=1.5, quality=quality(9), exact=19)))


def result(value: dict[str, Any]) -> Result:
    return identify(value, "file")


def window(old: dict[str, Any], new: dict[str, Any]) -> Change:
    return next(c for c in compare(result(old), result(new)).changes if c.first.decoder == "window")


def with_requests(value: dict[str, Any], seconds: float, forwards: int) -> dict[str, Any]:
    """The same result with ten requests of 40 tokens."""
    changed = copy.deepcopy(value)
    for entry in changed["models"]:
        known = {"prompt_tokens": 5, "response_tokens": 40, "base_right": None, "answer_tokens": None, "entropy": 1.0}
        entry["items"] = [{"prompt": index, **known} for index in range(10)]
        for each in entry["decoders"]:
            each["requests"] = {"tokens": [40] * 10, "forwards": [forwards] * 10, "seconds": [seconds] * 10}
    return changed


def test_decoders_are_set_side_by_side_with_quality_beside_speed() -> None:
    table = [dict(zip(COLUMNS, row, strict=True)) for row in rows(compare(result(OLD), result(NEW)))]
    assert [row["decoder"] for row in table] == ["library", "ar", "window"]
    assert table[2] == {
        "model": "m",
        "decoder": "window",
        "n": "16",
        "solved": "90.0 % → 45.0 %",
        "repeats": "5.0 %",
        "exact": "20/20 → 19/20",
        "TPF": "2.00 → 3.00",
        "TPS": "150 → 180 (1.20×)",
        "speed-up": "1.50× → 1.80×",
    }


def test_every_metric_is_a_ratio_or_a_difference() -> None:
    change = window(OLD, NEW)
    values = {metric: change.value(metric) for metric in METRICS}
    assert values == pytest.approx({"tpf": 1.5, "tps": 1.2, "speedup": 1.2, "solved": -0.45, "exact": 0.95})
    ungraded = bench(model("m", decoder("window", 16, quality=quality(None))))
    assert window(OLD, ungraded).value("solved") is None


def test_the_interval_of_independent_samples_is_newcombes() -> None:
    # Newcombe 1998, table II, example (a): 56/70 against 48/80, method 10: 0.0524 to 0.3339.
    wilson = {(56, 70): (0.6916, 0.8770), (48, 80): (0.4905, 0.7004)}
    forms = [
        bench(model("m", decoder("window", 16, quality={**quality(n, of), "solve_rate_interval": list(wilson[n, of])})))
        for n, of in ((48, 80), (56, 70))
    ]
    assert window(*forms).solved_interval() == pytest.approx((0.0524, 0.3339), abs=2e-4)


def test_items_that_are_known_one_by_one_are_paired() -> None:
    base = Entry(0, "m", "window", 16, "", 1, 2.0, 100.0, 1.0, 0.5, (0.4, 0.6), 0.0, 10, 10)
    draw = random.Random(0)
    right = [draw.random() < 0.5 for _ in range(40)]
    better = [value or index % 4 == 0 for index, value in enumerate(right)]
    change = Change(
        dataclasses.replace(base, right=right, solve_rate=sum(right) / 40),
        dataclasses.replace(base, right=better, solve_rate=sum(better) / 40),
        False,
    )
    low, high = change.solved_interval() or (0.0, 0.0)
    assert 0 < low < sum(better) / 40 - sum(right) / 40 < high
    assert "(item by item): a difference" in change.quality() and "0 newly wrong" in change.quality()


def test_requests_are_paired_where_both_know_the_same_ones() -> None:
    old, new = with_requests(OLD, 0.4, 20), with_requests(NEW, 0.2, 10)
    assert_valid(old, "bench")
    change = window(old, new)
    assert change.paired
    said = "request by request: TPS 2.00× in the median of 10, faster in 10; TPF +2.00 (95 %: +2.00 to +2.00)."
    assert change.pace() == said
    assert f"m, window n=16, {said}" in remarks(compare(result(old), result(new)))
    new["models"][0]["items"][0]["prompt"] = 99
    assert not window(old, new).paired
    assert not window(OLD, NEW).paired


def test_quality_that_all_decoders_of_a_model_share_is_told_once() -> None:
    said = remarks(compare(result(OLD), result(OLD)))
    assert sum("solve rate" in text for text in said) == 1
    assert said[0].startswith("m: solve rate +0.0 points") and "no difference is shown" in said[0]
    assert sum("solve rate" in text for text in remarks(compare(result(OLD), result(NEW)))) == 3


def test_models_are_matched_by_label_or_by_place() -> None:
    other = bench(model("n", decoder("window", 16, tpf=2.5)))
    found = compare(result(OLD), result(other))
    assert "m is compared with n." in found.notes
    assert rows(found)[2][0] == "m → n"
    both = bench(model("x", decoder("window", 16)), model("m", decoder("window", 32)))
    found = compare(result(OLD), result(both))
    assert "The model x is in one of both only." in found.notes
    assert "m, window n=16 is in the first only." in found.notes
    assert "m, window n=32 is in the second only." in found.notes
    with pytest.raises(DataError, match="no model in common"):
        compare(result(OLD), result(bench(model("x"), model("y"))))


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (run(model("m")), "kinds that cannot be compared; seen: bench and run"),
        (bench(model("m"), prompts={**PROMPTS, "offset": 7}), "'prompts.offset' differs; seen: 0 and 7"),
        (bench(model("m", max_new_tokens=32)), "'max_new_tokens of the models' differs"),
        (bench(model("m", task="none")), "'task of the models' differs"),
        (bench(model("m", prompts=19)), "'prompts of the models' differs"),
    ],
)
def test_unlike_kinds_and_different_prompts_are_refused_with_the_reason(other: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        compare(result(OLD), result(other))


def test_runs_are_compared_by_what_their_evaluation_asked() -> None:
    first, second = run(model("base"), model("round 1")), run(model("base"), model("round 1"))
    assert len(compare(result(first), result(second)).changes) == 4
    second["recipe"] = {**second["recipe"], "evaluation": {"prompts": PROMPTS}}
    first["recipe"] = {**first["recipe"], "evaluation": {"prompts": {**PROMPTS, "source": "x.jsonl"}}}
    with pytest.raises(DataError, match=r"'prompts\.source' differs"):
        compare(result(first), result(second))
    with pytest.raises(DataError, match="Nothing was measured"):
        compare(result(run()), result(run()))


def test_evaluations_are_compared_task_by_task_and_item_by_item() -> None:
    old, new = evaluation(5), evaluation(9)
    assert_valid(old, "eval")
    before, after = [index < 5 for index in range(10)], [index != 7 for index in range(10)]
    items = (evaluation_items(before), evaluation_items(after))
    assert_valid(items[0][0], "eval-item")
    found = compare(result(old), result(new), items)
    assert [(c.first.model, c.first.decoder, c.paired) for c in found.changes] == [
        ("gsm8k", "ar", True),
        ("gsm8k", "window", True),
    ]
    assert "4 items newly right, 0 newly wrong, p = 0.125 (McNemar)" in found.changes[1].quality()
    assert found.changes[1].value("solved") == pytest.approx(0.4)
    assert "as of independent samples" in compare(result(old), result(new)).changes[1].quality()
    other = copy.deepcopy(new)
    other["tasks"][0]["data"]["sha256"] = "1" * 64
    with pytest.raises(DataError, match="'data of gsm8k' differs"):
        compare(result(old), result(other))


def test_other_machines_are_named() -> None:
    other = bench(model("m", decoder("window", 16), threads=8))
    assert any("The machines differ" in note for note in compare(result(OLD), result(other)).notes)


def test_what_lies_below_its_bound_is_named_and_what_is_not_known_has_not_passed() -> None:
    found = compare(result(OLD), result(NEW))
    assert failures(found, bounds(["tpf=0.9", "tps=1"])) == []
    (said,) = failures(found, bounds(["exact=1"]))
    assert said.startswith("m, window n=16: exact is 0.95, at least 1 is asked for")
    assert len(failures(found, bounds(["solved=-0.4"]))) == 1
    ungraded = bench(model("m", decoder("window", 16, quality=quality(None))))
    assert any(
        "solved is not known" in text for text in failures(compare(result(OLD), result(ungraded)), {"solved": 0})
    )


@pytest.mark.parametrize(
    ("text", "message"), [("tps", "wrong form"), ("tps=x", "wrong form"), ("speed=1", "no metric")]
)
def test_bounds_are_checked(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        bounds([text])


def test_the_command_ends_with_status_3_where_a_bound_is_not_met(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in (("old", OLD), ("new", NEW), ("run", run(model("m")))):
        (tmp_path / f"{name}.json").write_text(json.dumps(value))
    old, new = str(tmp_path / "old.json"), str(tmp_path / "new.json")
    assert main(["compare", old, new, "--fail-below", "tps=1.0"]) == 0
    assert "150 → 180 (1.20×)" in capsys.readouterr().out
    assert main(["compare", new, old, "--fail-below", "tps=0.9"]) == 3
    assert "window n=16: tps is 0.8333" in " ".join(capsys.readouterr().err.split())
    assert main(["compare", new, old, "-d", "ar", "--fail-below", "tps=0.9", "--json"]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    (change,) = json.loads(line)["changes"]
    assert (change["decoder"], change["tps"]) == ("ar", 1.0)
    assert main(["compare", old, new, "-d", "jacobi", "--fail-below", "tps=0.9"]) == 3
    assert main(["compare", old, str(tmp_path / "run.json")]) == 2
    assert "kinds that cannot be compared" in capsys.readouterr().err
