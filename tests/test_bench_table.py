from __future__ import annotations

import json
from typing import Any

import pytest

from benching import JACOBI, MULTIBLOCK, RECYCLE, WINDOW, load_tiny, prompts_for
from jacobi_forcing.bench import COLUMNS, ModelResult, bench, columns, markdown, notes, rows
from jacobi_forcing.bench.details import details, overhead
from jacobi_forcing.viz.sections import quality_line

Form = dict[str, Any]


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> ModelResult:
    loaded = load_tiny(tmp_path_factory.mktemp("model"))
    decode = [WINDOW, JACOBI, RECYCLE, MULTIBLOCK]
    return bench(loaded, prompts_for(loaded), decode=decode, max_new_tokens=10, task="gsm8k", label="tiny")


@pytest.fixture
def form(result: ModelResult) -> Form:
    value = json.loads(json.dumps(result.to_dict()))
    assert isinstance(value, dict)
    return value


def only(form: Form, *decoders: str, **changes: Any) -> Form:
    """A report of these decoders, with some of their figures replaced."""
    return {**form, "decoders": [{**d, **changes} for d in form["decoders"] if d["decoder"] in decoders]}


def at_batches(form: Form, speedups: dict[int, float], decoder: str = "window") -> Form:
    """A report of one decoder at several batch sizes."""
    (entry,) = (d for d in form["decoders"] if d["decoder"] == decoder)
    entries = [{**entry, "batch_size": size, "speedup": speedup} for size, speedup in speedups.items()]
    return {**form, "decoders": entries}


def test_the_table_never_shows_speed_without_quality_and_exactness(form: Form) -> None:
    table, heads = rows([form, {**form, "label": "other"}]), columns([form])
    assert {len(row) for row in table} == {len(heads)}
    cells = [dict(zip(heads, row, strict=True)) for row in table]
    assert [(row["model"], row["decoder"], row["n"]) for row in cells[:4]] == [
        ("tiny", "library", "–"),
        ("tiny", "ar", "–"),
        ("tiny", "window", "4"),
        ("tiny", "jacobi", "8"),
    ]
    for row in cells:
        assert row["solved"].endswith("% of 3")
        assert row["repeats"].endswith("%")
        assert row["exact"] == "3/3"
    text = markdown([form])
    assert text.count("\n|") == 1 + len(form["decoders"])
    assert "to be expected" in text


def test_a_task_that_is_graded_in_parts_shows_them_beside_the_solve_rate(form: Form) -> None:
    shares = {"parses": 1.0, "schema": 0.75, "fields": 0.5}
    graded = {
        name: {"count": round(4 * share), "share": share, "interval": [0.1, 1.0]} for name, share in shares.items()
    }
    (plain,) = rows([only(form, "ar")])
    quality = {**form["decoders"][0]["quality"], "parts": graded}
    (row,) = rows([{**only(form, "ar"), "quality": quality}])
    cells = dict(zip(columns([{**only(form, "ar"), "quality": quality}]), row, strict=True))
    assert cells["in parts"] == "parses 100.0 %, schema 75.0 %, fields 50.0 %"
    assert len(row) == len(plain) + 1
    assert "schema 75.0 %" in quality_line([{**form, "quality": quality}])


def test_settings_and_batch_have_a_column_where_rows_differ_in_them(form: Form) -> None:
    plain = only(form, "ar", "window")
    assert columns([plain]) == tuple(name for name in COLUMNS if name not in ("settings", "batch", "in parts"))
    assert "settings" in columns([form])
    table = rows([only(form, "window", "recycle")])
    assert [row[1:4] for row in table] == [("window", "–", "4"), ("recycle", "candidates=2", "4")]
    assert columns([at_batches(plain, {1: 1.0, 2: 1.0})])[2] == "batch"


def test_ties_and_faults_are_counted_apart(form: Form) -> None:
    tie = {"prompt": 3, "position": 5, "gap": 0.125, "near_tie": True}
    fault = {"prompt": 8, "position": 2, "gap": 4.0, "near_tie": False}
    both = only(form, "window", mismatches=[tie, fault, tie], exact=17, of=20)
    assert rows([both])[0][columns([both]).index("exact")] == "17/20, near ties 2, faults 1"
    said = notes([both])
    assert "tiny, window n=4: 2 of 20 answers part from ar at a near tie of logits, at most 0.12 apart." in said
    assert any(
        "1 of 20 answers differ from ar beyond rounding, first at token 2 of prompt 8. This is a fault." in s
        for s in said
    )


@pytest.mark.parametrize(("ratio", "expected"), [(3.0, "no speed-up is to be expected"), (1.5, "about 1.3×")])
def test_the_cost_of_a_forward_decides_what_to_expect(form: Form, ratio: float, expected: str) -> None:
    one = only(form, "recycle", tokens_per_forward=2.0, cost_ratio=ratio, median_slots=11)
    (sentence,) = notes([one])
    assert sentence.startswith("tiny, recycle n=4 (candidates=2): " + expected)
    assert f"a forward of 11 tokens costs {ratio:.2f} times one of 1 here, and brings 2.00 tokens" in sentence
    assert rows([one])[0][-1] == f"{ratio:.2f} (n=11)"
    assert rows([only(form, "window", cost_ratio=ratio, median_slots=4)])[0][-1] == f"{ratio:.2f}"


@pytest.mark.parametrize(
    ("speedups", "sentence"),
    [
        ({1: 1.5, 2: 1.2, 4: 0.9}, "crossover between batch 2 (1.20×) and batch 4 (0.90×), where the speed-up falls"),
        ({4: 0.7, 1: 1.5, 2: 0.8}, "crossover between batch 1 (1.50×) and batch 2 (0.80×)"),
        ({1: 1.5, 2: 1.0}, "no crossover at batches of 1, 2: never slower than ar, least so at batch 2 (1.00×)"),
        ({1: 0.9, 2: 1.1}, "no crossover at batches of 1, 2: slower than ar at batch 1 already (0.90×)"),
    ],
)
def test_a_note_names_the_batch_size_at_which_the_speed_up_is_lost(
    form: Form, speedups: dict[int, float], sentence: str
) -> None:
    assert any(note.startswith("tiny, window n=4: " + sentence) for note in notes([at_batches(form, speedups)]))
    assert not any("crossover" in note for note in notes([at_batches(form, {1: 0.5})]))


def test_a_note_tells_of_prompts_that_filled_no_batch(form: Form) -> None:
    assert not any("prompts." in note for note in notes([form]))
    assert "tiny: batches of 2 took the first 2 of 3 prompts." in notes(
        [{**at_batches(form, {2: 1.0}), "decoders": [{**form["decoders"][2], "batch_size": 2, "of": 2}]}]
    )


def test_reports_of_version_1_can_still_be_shown(form: Form) -> None:
    new = ("label", "batch_size", "near_ties", "faults", "mean_slots", "median_slots", "cost_ratio", "lines_won")
    old = [{name: value for name, value in d.items() if name not in new} for d in form["decoders"]]
    old[0] |= {"tokens_per_forward": None, "settings": None}
    former = {**form, "version": 1, "decoders": old}
    assert [row[1] for row in rows([former])] == ["ar", "window", "jacobi", "recycle", "multiblock"]
    # The tiny model never ends its text, and that is all there is to say.
    assert notes([former]) == ["tiny: 3 of 3 answers met the limit of 10 tokens unfinished."]
    ended = [{**d, "quality": {**d["quality"], "finished_rate": 1.0}} for d in old]
    assert notes([{**former, "decoders": ended}]) == []


def test_details_show_how_far_guesses_were_right_and_which_lines_won(form: Form) -> None:
    form = only(form, "ar", "window", "recycle")
    window, recycle = form["decoders"][1:]
    window |= {"draft_accuracy": [0.5, 0.25, 0.1, 0.04], "lines_won": {"0": 8}, "mean_slots": 4.0}
    recycle |= {"draft_accuracy": [0.75, 0.5], "lines_won": {"0": 6, "2": 2}, "mean_slots": 11.25}
    tables = {table.title.partition(":")[0]: table for table in details([form])}
    accuracy, lines = tables["Draft accuracy"], tables["Lines won"]
    assert accuracy.columns == ("model", "decoder", "settings", "n", "+1", "+2", "+4")
    assert accuracy.rows == [
        ("tiny", "window", "–", "4", "50 %", "25 %", "4 %"),
        ("tiny", "recycle", "candidates=2", "4", "75 %", "50 %", "–"),
    ]
    assert lines.columns[4:] == ("mean slots", "draft", "candidate 1", "candidate 2")
    assert lines.rows == [
        ("tiny", "window", "–", "4", "4.0", "100.0 %", "0.0 %", "0.0 %"),
        ("tiny", "recycle", "candidates=2", "4", "11.2", "75.0 %", "0.0 %", "25.0 %"),
    ]
    assert [table.title.partition(" ")[0] for table in details([only(form, "ar")])] == ["Latency"]


def test_details_group_accepted_lengths_and_tell_latencies(form: Form) -> None:
    form = only(form, "ar", "window", accepted={"1": 5, "2": 1, "3": 1, "4": 1, "40": 2})
    form["decoders"][1]["latency"] = {
        "requests": 3,
        "answer": {"mean": 0.5, "p50": 0.4, "p90": 0.8, "p95": 0.9, "p99": 0.98, "worst": 1.0},
        "first_token": {"p50": 0.0123},
        "gap": None,
    }
    tables = {table.title.partition(" ")[0]: table for table in details([form])}
    assert tables["Accepted"].columns[4:] == ("1", "2", "3–4", "5–8", "9–16", "17–32", "33+", "longest")
    (window,) = tables["Accepted"].rows
    assert window[4:] == ("50.0 %", "10.0 %", "20.0 %", "0.0 %", "0.0 %", "0.0 %", "20.0 %", "40")
    cells = ("0.400", "0.800", "0.900", "0.980", "1.000", "12.3", "–", "–", "–")
    assert tables["Latency"].rows[1][4:] == cells


def test_details_show_a_table_for_each_trait_that_tells_requests_apart(form: Form) -> None:
    def group(by: str, low: float, high: float, speedup: float | None = 1.5) -> Form:
        rate = None if speedup is None else 321.4
        counts = {"requests": 2, "tokens_per_forward": 1.234, "exact": 2, "of": 2}
        return {"by": by, "low": low, "high": high, "tokens_per_second": rate, "speedup": speedup, **counts}

    groups = [group("response_tokens", 3, 3), group("response_tokens", 4, 9, None), group("base_right", False, False)]
    tables = {table.title: table for table in details([only(form, "ar", "window", strata=groups)])}
    assert tables["By length of the answer, tokens"].rows == [
        ("tiny", "window", "–", "4", "3", "2", "1.23", "321", "1.50×", "2/2"),
        ("tiny", "window", "–", "4", "4–9", "2", "1.23", "–", "–", "2/2"),
    ]
    assert tables["By the base model's answer"].rows[0][4] == "wrong"
    assert not any("entropy" in title for title in tables)


def test_the_overhead_has_a_table_where_it_was_measured(form: Form) -> None:
    assert overhead([form]) == []
    entry = {
        "decoder": "window",
        "block_size": 4,
        "settings": {},
        "label": "",
        "sweeps": 9,
        "sweep_seconds": 0.0021,
        "forward_seconds": 0.002,
        "ratio": 1.0512,
        "ratio_in_loop": 1.0409,
    }
    (table,) = overhead([{**form, "overhead": [entry]}])
    assert table.rows == [("tiny", "window", "–", "4", "9", "2.10", "2.00", "1.051", "1.041")]
