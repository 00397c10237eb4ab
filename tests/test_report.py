from __future__ import annotations

import builtins
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from jacobi_forcing.cli import main
from jacobi_forcing.errors import ArtefactError, MissingExtraError
from jacobi_forcing.viz.gather import gather
from jacobi_forcing.viz.parts import Table
from jacobi_forcing.viz.payback import payback, verdict
from jacobi_forcing.viz.report_page import page
from jacobi_forcing.viz.sections import build
from result_forms import ablation, bench, decoder, evaluation, model, profile, run, save_run
from result_schemas import assert_valid

BASE = model("base", decoder("window", 16, tpf=1.1, tps=60.0, cost=1.8))
TRAINED = model(
    "round 1", decoder("window", 16, tpf=4.0, tps=250.0, cost=1.6), decoder("jacobi", 16, tpf=3.0, cost=1.5)
)
HOSTILE = "</style><script>alert(1)</script>"


def section(place: Path, title: str) -> Any:
    return next((part for part in build(gather(place)).sections if part.title.startswith(title)), None)


@pytest.fixture
def place(tmp_path: Path) -> Path:
    return save_run(tmp_path / "my-run", run(BASE, TRAINED))


def test_the_results_of_these_tests_are_whole() -> None:
    assert_valid(run(BASE, TRAINED), "run")
    assert_valid(bench(BASE, TRAINED), "bench")


# Verdict and break-even ----------------------------------------------------------------------------------------------


def test_where_a_forward_costs_more_than_it_brings_no_speed_up_is_to_be_expected_and_the_reason_is_told() -> None:
    said = verdict(BASE)
    assert said.startswith("base: no speed-up is to be expected. With window n=16")
    assert "a forward of 16 tokens costs 1.80 times one of 1 on this machine and brings 1.10 tokens" in said
    # Speed stands beside quality here as everywhere.
    assert "measured: 0.60×; 90.0 % of 20 solved, 5.0 % end in a loop, exact 20/20 against ar" in said


def test_what_is_to_be_expected_is_tokens_over_cost_and_the_best_decoder_is_named() -> None:
    assert verdict(TRAINED).startswith("round 1: about 2.5× is to be expected. With window n=16")
    assert "nothing that drafts was measured" in verdict(model("plain"))


def test_the_training_has_paid_after_its_seconds_over_those_saved_a_token() -> None:
    rows = dict(payback(run(BASE, TRAINED)))
    # 120 s of collecting and training; 10 ms a token before (ar), 4 ms after.
    assert rows["collecting and training together"] == "120 s (240 core-seconds on 2 threads)"
    assert rows["fastest before: ar"] == "10.000 ms a token"
    assert rows["fastest after: window n=16"] == "4.000 ms a token"
    assert rows["break-even"] == "20,000 generated tokens, one request at a time"


def test_a_training_that_made_nothing_faster_never_pays() -> None:
    slow = model("round 1", decoder("window", 16, tpf=1.1, tps=60.0, cost=1.8))
    assert dict(payback(run(BASE, slow)))["break-even"].startswith("never")
    assert dict(payback(run(slow)))["break-even"].startswith("not known")


# The parts -----------------------------------------------------------------------------------------------------------


def test_a_run_has_a_table_before_and_after_losses_probes_and_cost(place: Path) -> None:
    table = next(block for block in section(place, "Before and after").blocks if isinstance(block, Table))
    assert [row[:2] for row in table.rows] == [
        *[("base", name) for name in ("library", "ar", "window")],
        *[("round 1", name) for name in ("library", "ar", "window", "jacobi")],
    ]
    titles = [part.title for part in build(gather(place)).sections]
    assert {"Block size", "Losses", "Probes", "What the training cost, and when it has paid"} <= set(titles)


def test_what_was_not_measured_is_named_and_has_no_part(tmp_path: Path) -> None:
    (tmp_path / "report.json").write_text(json.dumps(run()))
    built = build(gather(tmp_path))
    assert [part.title for part in built.sections] == [
        "What the training cost, and when it has paid",
        "Where the figures come from",
    ]
    said = " ".join(built.missing)
    for lacking in ("Decoders were not measured", "no logs", "not probed", "Latencies", "not graded", "not profiled"):
        assert lacking in said
    assert "Nothing was measured, so nothing can be said about a speed-up" in page(gather(tmp_path), built)


def test_wherever_speed_is_shown_quality_is_shown(place: Path) -> None:
    for part in build(gather(place)).sections:
        text = str([block for block in part.blocks])
        if re.search(r"TPS|speed-up|tokens per forward|ms a token", text):
            assert "% end in a loop" in text or "repeats" in text, part.title


def test_benches_in_the_folder_and_from_elsewhere_are_told_of(place: Path, tmp_path: Path) -> None:
    (place / "speeds.json").write_text(json.dumps(bench(TRAINED)))
    other = tmp_path / "other.json"
    other.write_text(json.dumps(bench(model("elsewhere", decoder("window", 32, tpf=5.0, cost=2.0)))))
    found = gather(place, [other])
    assert [name for name, _ in found.of("bench")] == ["speeds.json", "other.json"]
    text = page(found, build(found))
    assert "elsewhere: about 2.5× is to be expected" in text
    assert "speeds.json: 20 prompts of prompts.jsonl" in text


def test_evaluations_and_profiles_have_parts_with_intervals_and_units(place: Path) -> None:
    for name, value in (("eval", evaluation(7)), ("profile", profile())):
        assert_valid(value, name)
        (place / f"{name}.json").write_text(json.dumps(value))
    found = gather(place)
    tasks, device = section(place, "Tasks"), section(place, "What this device does")
    table = next(block for block in tasks.blocks if isinstance(block, Table))
    assert table.rows[1] == (
        *("gsm8k", "window", "16", "70.0 % of 10 (50.0 to 80.0)", "0.0 %", "10/10", "2.00", "40.0", "2.00×"),
        "+1 −0, p = 1",
    )
    assert "up to: 8 tokens at context 64. Settings that fit: window n=8 (8 tokens a forward)." in device.blocks[0].text
    assert [figure.key for figure in device.blocks[1:]] == [("context 64",)] * 2
    assert not any("not graded" in text or "not profiled" in text for text in build(found).missing)


def test_ablations_have_means_and_spreads(place: Path) -> None:
    assert_valid(ablation(), "ablation")
    (place / "ablation.json").write_text(json.dumps(ablation()))
    text, table = section(place, "Ablations").blocks
    assert "Runs still to be made: 1." in text.text
    assert table.rows[0] == ("a", "2", "2.50 ± 0.71", "90.00 ± 0.00 %", "0.00 ± 0.00 %", "4/4", "100")
    assert table.rows[1][2] == "2.50"


def test_latencies_of_requests_have_a_figure_and_a_table(place: Path) -> None:
    times = {name: 0.5 for name in ("mean", "p50", "p90", "p95", "p99", "worst")}
    known = {"latency": {"requests": 3, "answer": times, "first_token": times, "gap": None}}
    known["requests"] = {"tokens": [9] * 3, "forwards": [3] * 3, "seconds": [0.4, 0.5, 0.6]}
    timed = model("timed", decoder("window", 16, tpf=3.0, cost=1.5, **known))
    (place / "speeds.json").write_text(json.dumps(bench(timed)))
    figure, table = section(place, "Latency").blocks
    assert "half of 3 within 0.5 s, all in 0.6 s" in figure.text
    assert table.rows == [("timed", "window n=16", "1", "3", *["0.5"] * 6, "20/20", "5.0 %")]


def test_models_of_one_name_in_two_files_are_told_apart_and_paths_of_machines_are_not_shown(
    place: Path, tmp_path: Path
) -> None:
    other = tmp_path / "other.json"
    other.write_text(json.dumps(bench({**TRAINED, "label": "/somebody/models/round 1"})))
    (model_,) = gather(place, [other]).benches
    assert model_["label"] == "round 1 in other.json"


def test_results_from_before_the_schemas_are_told_of_with_a_note(place: Path) -> None:
    report = json.loads((place / "report.json").read_text())
    del report["schema"]
    (place / "report.json").write_text(json.dumps({"version": 1, "kind": "run", **report}))
    found = gather(place)
    assert found.run is not None
    assert found.notes == ["'report.json' names no schema: read as jforce.run/1."]


def test_other_json_files_are_passed_over_and_damaged_results_are_not(place: Path, tmp_path: Path) -> None:
    (place / "settings.json").write_text('{"x": 1}')
    (place / "list.json").write_text("[1]")
    assert any("list.json is not read" in note for note in gather(place).notes)
    (place / "speeds.json").write_text('{"schema": "jforce.bench/2"}')
    with pytest.raises(ArtefactError, match="is damaged; seen: no models"):
        gather(place)
    with pytest.raises(ArtefactError, match="There are no results in"):
        gather(place / "round-1")
    with pytest.raises(ArtefactError, match="There is no folder"):
        gather(tmp_path / "none")


# The page -----------------------------------------------------------------------------------------------


class Elements(HTMLParser):
    """Counts of elements, what loads something from elsewhere, and every id."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.names: list[str] = []
        self.outside: list[str] = []
        self.ids: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.names.append(tag)
        for name, value in attrs:
            if name in ("src", "href", "xlink:href") and not (value or "").startswith("#"):
                self.outside.append(f"{tag} {name}={value}")
            if name == "id":
                self.ids.append(str(value))


def test_the_page_needs_nothing_else_and_its_figures_follow_its_colours(place: Path) -> None:
    found = gather(place)
    text = page(found, build(found))
    elements = Elements(text)
    assert elements.outside == [] and "@import" not in text and "script" not in elements.names
    drawings = re.findall(r"<svg role.*?</svg>", text, re.DOTALL)
    assert len(drawings) == elements.names.count("figure") == 9
    assert (
        text.count('<svg class="key"') == elements.names.count("svg") - 9 == 2 * 3 + 2 * 2
    )  # three series, two series
    assert len(elements.ids) == len(set(elements.ids))
    for drawing in drawings:
        assert "#01010" not in drawing and "var(--ink)" in drawing and 'aria-label="' in drawing
    assert "tokens per forward (TPF)" in text.replace("&lt;", "<")  # the axis, as a comment of the drawing


def test_hostile_names_stay_text(place: Path, tmp_path: Path) -> None:
    plain = gather(place)
    before = Elements(page(plain, build(plain))).names
    report = run(BASE, {**TRAINED, "label": HOSTILE})
    report["provenance"] = {**report["provenance"], "argv": [HOSTILE]}
    hostile = gather(save_run(tmp_path / "hostile", report))
    after = Elements(page(hostile, build(hostile)))
    assert after.names.count("script") == 0
    assert [name for name in after.names if name not in ("path", "g", "use", "defs", "clippath", "rect")] == [
        name for name in before if name not in ("path", "g", "use", "defs", "clippath", "rect")
    ]


def test_the_command_writes_both_and_names_what_is_missing(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert main(["report", str(place), "-o", str(out)]) == 0
    said = capsys.readouterr()
    assert said.out.splitlines() == [str(out / "report.html"), str(out / "MODEL_CARD.md")]
    assert "base: no speed-up is to be expected" in said.err and "Missing: Latencies" in said.err
    assert (out / "report.html").read_text().startswith("<!doctype html>")
    assert main(["report", str(place), "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["files"]) == 2
    assert main(["report", str(tmp_path / "none")]) == 2


def test_without_matplotlib_the_extra_is_named(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def no_matplotlib(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.split(".")[0] == "matplotlib":
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", no_matplotlib)
    with pytest.raises(MissingExtraError, match=r"jacobi-forcing\[eval\]"):
        build(gather(place))
