from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from benching import load_tiny, prompts_for
from jacobi_forcing import DecodeConfig, generate
from jacobi_forcing.adapter import GatedAdapter
from jacobi_forcing.bench import contestants
from jacobi_forcing.bench.tune import FULL, SHORT, Grid, Search, tune
from jacobi_forcing.cli.app import main
from jacobi_forcing.errors import ConfigError, DataError
from jacobi_forcing.loading import Loaded
from result_schemas import assert_valid
from tiny_folder import save_prompts, save_tiny

SMALL = Grid(("window", "recycle"), (2, 4), (1, 2))
CALL = ["tune", "-m", "model", "-p", "prompts.jsonl", "--field", "question", "-l", "2", "--max-new-tokens", "6"]
CALL += ["-d", "window", "-d", "recycle", "-n", "2", "-n", "4", "--candidates", "1", "--repeats", "1"]


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> Loaded:
    return load_tiny(tmp_path_factory.mktemp("model"))


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    save_tiny(tmp_path / "model")
    save_prompts(tmp_path / "prompts.jsonl")
    return tmp_path


class Clock:
    """A clock on which a decoder's call takes as long as a script says; everything else is real."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, seconds: Any) -> None:
        self.calls: list[tuple[str, int]] = []
        real = contestants.Contestant.take

        def take(one: contestants.Contestant, *arguments: Any) -> contestants.Turn:
            turn = real(one, *arguments)
            assert one.decode is not None
            self.calls.append((one.decode.decoder, one.decode.block_size))
            return contestants.dataclasses.replace(turn, seconds=seconds(one.decode))

        monkeypatch.setattr(contestants.Contestant, "take", take)


def scripted(config: DecodeConfig) -> float:
    """`recycle` with n = 4 and two candidates is the fastest."""
    speed = {"ar": 1.0, "window": 2.0, "recycle": 3.0}[config.decoder]
    return 1.0 / (speed + config.block_size / 100 + (config.candidates if config.decoder == "recycle" else 0) / 100)


def test_the_grid_names_every_setting_once() -> None:
    names = [(one.decoder, one.block_size, one.candidates) for one in SMALL.settings()]
    assert names[0][0] == "ar"
    assert names[1:3] == [("window", 2, 4), ("window", 4, 4)]
    assert names[3:] == [("recycle", *pair) for pair in itertools.product((2, 4), (1, 2))]
    assert Grid(("recycle",), (4,), (0, 1)).settings()[1].decoder == "window"
    blocks = Grid(("multiblock",), (4,), (1,), (2, 3), (0.0, 0.5)).settings()[1:]
    assert [(one.num_blocks, one.spawn_ratio) for one in blocks] == [(2, 0.0), (2, 0.5), (3, 0.0), (3, 0.5)]


@pytest.mark.parametrize("full", [False, True])
def test_the_fastest_setting_is_found_under_a_scripted_clock(
    loaded: Loaded, full: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    Clock(monkeypatch, scripted)
    how = Search(full=full, compare=full, repeats=2)
    result = tune(loaded, prompts_for(loaded, 4), grid=SMALL, how=how, max_new_tokens=6)
    best = result["best"]
    assert (best["decoder"], best["block_size"], best["settings"]["candidates"]) == ("recycle", 4, 2)
    assert best["speedup"] == pytest.approx(
        scripted(DecodeConfig("ar")) / scripted(DecodeConfig("recycle", 4, 2)), rel=0.01
    )
    assert result["search"] == (FULL if full else SHORT)
    assert (result["comparison"] is not None) == full
    if full:
        assert result["comparison"]["ratio"] == 1.0
        assert result["runs"] == {FULL: 7 * 4 * 2, SHORT: result["runs"][SHORT]}
        assert all(one["runs"] == 8 for one in result["settings"])
    else:
        assert result["runs"][SHORT] < 7 * 4 * 2
        assert any(one["batches"] < 4 for one in result["settings"])
    for one in result["settings"]:
        assert one["exact"] == one["of"] == one["batches"]


def test_a_setting_at_fault_is_shown_and_never_recommended(loaded: Loaded, monkeypatch: pytest.MonkeyPatch) -> None:
    Clock(monkeypatch, scripted)
    real = contestants.Contestant.take

    def take(one: contestants.Contestant, *arguments: Any) -> contestants.Turn:
        turn = real(one, *arguments)
        if one.decode is not None and one.decode.decoder == "recycle":
            return contestants.dataclasses.replace(turn, ids=[[*ids[:-1], ids[-1] ^ 1] for ids in turn.ids])
        return turn

    monkeypatch.setattr(contestants.Contestant, "take", take)
    result = tune(loaded, prompts_for(loaded, 3), grid=SMALL, how=Search(full=True, repeats=1), max_new_tokens=6)
    assert (result["best"]["decoder"], result["best"]["block_size"]) == ("window", 4)
    wrong = [one for one in result["settings"] if one["faults"]]
    assert {one["decoder"] for one in wrong} == {"recycle"}
    assert all(one["exact"] == 0 for one in wrong)


def test_where_nothing_is_faster_ar_is_the_best(loaded: Loaded, monkeypatch: pytest.MonkeyPatch) -> None:
    Clock(monkeypatch, lambda config: 1.0 if config.decoder == "ar" else 2.0)
    result = tune(loaded, prompts_for(loaded, 2), grid=SMALL, max_new_tokens=4)
    assert result["best"]["decoder"] == "ar"


def test_settings_take_turns_and_a_killed_search_goes_on(
    loaded: Loaded, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock(monkeypatch, scripted)
    asked: dict[str, Any] = {"grid": SMALL, "how": Search(full=True, repeats=1), "max_new_tokens": 4}
    path = tmp_path / "calls.jsonl"
    whole = tune(loaded, prompts_for(loaded, 3), journal=path, **asked)
    assert len(clock.calls) == 7 + 7 * 3  # one of each is thrown away
    lines = path.read_text().splitlines(keepends=True)
    order = [(json.loads(line)["batch"], json.loads(line)["setting"]) for line in lines[1:]]
    assert [batch for batch, _ in order] == [0] * 7 + [1] * 7 + [2] * 7
    assert [setting for batch, setting in order if batch == 0] != [setting for batch, setting in order if batch == 1]
    assert all(setting == 0 for _, setting in order[::7]), "ar comes first where its answers are not known yet"
    path.write_text("".join(lines[:11]) + '{"half')
    clock.calls.clear()
    again = tune(loaded, prompts_for(loaded, 3), journal=path, **asked)
    assert len(clock.calls) == 7 + 7 * 3 - 10
    assert again == whole


def test_an_adapter_is_tuned_like_any_model(tmp_path: Path) -> None:
    loaded = load_tiny(tmp_path)
    GatedAdapter.attach(loaded.model, rank=2)
    result = tune(loaded, prompts_for(loaded, 2), grid=Grid(("window",), (2, 4)), max_new_tokens=4, batch_size=2)
    assert [one["faults"] for one in result["settings"]] == [0, 0, 0]
    assert all(one["of"] == 2 for one in result["settings"])


@pytest.mark.parametrize(
    ("wrong", "kind"),
    [
        ({"grid": Grid(("ar",))}, ConfigError),
        ({"how": Search(repeats=0)}, ConfigError),
        ({"how": Search(compare=True)}, ConfigError),
        ({"batch_size": 3}, DataError),
    ],
)
def test_wrong_requests_are_refused(loaded: Loaded, wrong: dict[str, Any], kind: type[Exception]) -> None:
    with pytest.raises(kind):
        tune(loaded, prompts_for(loaded, 2), **{"max_new_tokens": 4, **wrong})


# The verb ---------------------------------------------------------------------------------------------------------


def test_the_verb_writes_a_result_a_drawing_and_the_models_settings(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*CALL, "--full", "--compare-short", "-o", "out", "--figure", "tune.svg", "--write"]) == 0
    said = capsys.readouterr()
    report = json.loads(said.out.splitlines()[-1])
    assert_valid(report, "tune")
    assert json.loads(Path("out/tune.json").read_text()) == report
    assert "the short search" in said.out
    assert "</svg>" in Path("tune.svg").read_text()
    saved = json.loads(Path("model/generation_config.json").read_text())["jacobi_forcing"]
    assert saved == report["best"]["settings"]
    model = AutoModelForCausalLM.from_pretrained("model")
    ids = torch.tensor([[5, 6, 7]])
    out = generate(model, ids, max_new_tokens=6, return_dict_in_generate=True, pad_token_id=0)
    expected = generate(
        model, ids, decode=DecodeConfig.from_dict(saved), max_new_tokens=6, return_dict_in_generate=True
    )
    assert out.stats is not None and expected.stats is not None  # type: ignore[union-attr]  # not a tensor
    assert out.stats.rows[0].sweeps == expected.stats.rows[0].sweeps  # type: ignore[union-attr]  # as above


def test_settings_of_an_adapter_are_written_beside_it(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    GatedAdapter.attach(load_tiny(place / "base").model, rank=2).save("adapter", "model")
    before = Path("model/generation_config.json").read_text()
    assert main([*CALL, "--adapter", "adapter", "--write", "-o", "out"]) == 0
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert json.loads(Path("adapter/custom_generate/decode.json").read_text()) == report["best"]["settings"]
    assert Path("model/generation_config.json").read_text() == before
    assert not Path("model/custom_generate").exists()


def test_the_verb_goes_on_and_starts_anew_when_told(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*CALL, "-o", "out", "--json"]) == 0
    first = capsys.readouterr().out
    assert len(first.splitlines()) == 1
    calls = Path("out/calls.jsonl").read_text()
    assert main([*CALL, "-o", "out", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["settings"] == json.loads(first)["settings"]
    assert Path("out/calls.jsonl").read_text() == calls
    assert main([*CALL, "-o", "out", "--max-new-tokens", "5"]) == 2
    assert "another search" in capsys.readouterr().err
    assert main([*CALL, "-o", "out", "--max-new-tokens", "5", "--fresh"]) == 0


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--compare-short"], "add --full"),
        (["-m", "builtin:word-problems", "--write"], "needs a model in a folder"),
        (["-n", "0"], "block_size"),
        (["-p", "nowhere.jsonl"], "Cannot read"),
        (["--figure", "x.bmp"], "ends in .png or .svg"),
    ],
)
def test_the_verb_refuses_what_is_wrong_before_it_loads_a_model(
    place: Path,
    arguments: list[str],
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("the model was loaded")

    monkeypatch.setattr("jacobi_forcing.loading.load", refuse)
    assert main([*CALL, *arguments]) == 2
    assert said in capsys.readouterr().err
