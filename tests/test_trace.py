from __future__ import annotations

import json
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch

from benching import load_forgetful, load_tiny
from jacobi_forcing.adapter import GatedAdapter
from jacobi_forcing.cli import main
from jacobi_forcing.cli.traced import line
from jacobi_forcing.config import DecodeConfig
from jacobi_forcing.loading import Loaded
from jacobi_forcing.viz.page import fill
from jacobi_forcing.viz.tokens import shown, visible
from jacobi_forcing.viz.trace import STATES, Draft, record, slots_of
from jacobi_forcing.viz.trace_page import page
from result_schemas import assert_valid
from tiny_folder import EOS, byte_tokenizer, save_tiny

DECODERS = {
    "ar": DecodeConfig(decoder="ar"),
    "jacobi": DecodeConfig(decoder="jacobi", block_size=8),
    "window": DecodeConfig(decoder="window", block_size=8),
    "recycle": DecodeConfig(decoder="recycle", block_size=4, candidates=2),
    "multiblock": DecodeConfig(decoder="multiblock", block_size=4, num_blocks=3, candidates=2),
    "vocabulary": DecodeConfig(decoder="window", block_size=4, draft_init="vocabulary"),
}
BECOMES_TEXT = {"accepted", "recycled", "predicted"}
HOSTILE = "</script><b>&amp;<!--"


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> Loaded:
    return load_tiny(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def circles(tmp_path_factory: pytest.TempPathFactory) -> Loaded:
    return load_forgetful(tmp_path_factory.mktemp("forgetful"))


def states(sweep: dict[str, Any], trace: dict[str, Any]) -> list[str]:
    return [trace["states"][state] for _, state in sweep["slots"]]


def named(draft: Draft, text: list[int], accepted: int, line: int = 0, pseudo: tuple = ()) -> list[tuple[int, str]]:
    return [(token, list(STATES)[state]) for token, state in slots_of(draft, text, accepted, line, pseudo)]


TEXT = [10, 11, 12, 13, 14, 15, 16, 17, 18, 19]


def test_a_slot_is_judged_by_its_draft_and_the_final_text() -> None:
    # Two tokens are known; 12 was guessed right, 13 is the prediction, then noise, then a run of three, a run of two.
    draft = Draft(2, [12, 99, 99, 15, 16, 17, 99, 19], 8, [])
    assert named(draft, TEXT, 2) == [
        (12, "accepted"),
        (13, "predicted"),
        (99, "noisy"),
        (15, "converged"),
        (16, "converged"),
        (17, "converged"),
        (99, "noisy"),
        (19, "noisy"),
    ]
    assert [state for _, state in named(Draft(2, [99, 13, 14, 99], 4, []), TEXT, 1)] == ["predicted", *["noisy"] * 3]


def test_a_line_of_the_pool_that_wins_is_told_from_the_draft() -> None:
    draft = Draft(2, [99, 13, 14, 15, 16], 5, [[98], [12, 13, 97]])
    assert named(draft, TEXT, 3, line=2) == [
        (12, "recycled"),
        (13, "recycled"),
        (14, "predicted"),
        (15, "converged"),
        (16, "converged"),
    ]


def test_blocks_that_wait_what_is_not_verified_and_what_lies_behind_the_end_have_states_of_their_own() -> None:
    draft = Draft(6, [99, 99, 18, 19, 20, 21], 6, [])
    assert [state for _, state in named(draft, TEXT, 1, pseudo=((8, 1),))] == [
        "predicted",
        "noisy",
        "pseudo",
        "noisy",
        "beyond",
        "beyond",
    ]
    # An adapter's draft is right to its end, and only its first guess was verified.
    assert [state for _, state in named(Draft(0, [10, 11, 12, 13], 1, []), TEXT, 2)] == [
        "accepted",
        "predicted",
        "waiting",
        "waiting",
    ]


@pytest.mark.parametrize("name", DECODERS)
def test_every_decoder_is_traced_to_the_librarys_text(loaded: Loaded, name: str) -> None:
    ids = loaded.tokenizer("once upon")["input_ids"]
    trace = record(loaded, ids, DECODERS[name], 40)
    assert_valid(trace, "trace")
    expected = loaded.model.generate(torch.tensor([ids]), do_sample=False, max_new_tokens=40)[0, len(ids) :].tolist()
    assert trace["generated"] == expected
    assert trace["forwards"] == len(trace["sweeps"])
    assert trace["tokens"] == sum(sweep["accepted"] for sweep in trace["sweeps"]) == len(expected)
    text: list[int] = []
    for sweep in trace["sweeps"]:
        kinds, accepted = states(sweep, trace), sweep["accepted"]
        assert sweep["known"] == len(text)
        assert set(kinds[:accepted]) <= BECOMES_TEXT
        assert not set(kinds[accepted:]) & BECOMES_TEXT
        text += [token for token, _ in sweep["slots"][:accepted]]
    assert text == expected
    assert all(str(token) in trace["texts"] for sweep in trace["sweeps"] for token, _ in sweep["slots"])


def test_a_text_that_runs_in_circles_shows_recycled_tokens(circles: Loaded) -> None:
    trace = record(circles, circles.tokenizer("abc")["input_ids"], DECODERS["recycle"], 60)
    won = [sweep for sweep in trace["sweeps"] if sweep["line"]]
    assert won
    for sweep in won:
        kinds = states(sweep, trace)[: sweep["accepted"]]
        assert kinds.count("recycled") >= sweep["accepted"] - 1
        assert [token for token, _ in sweep["slots"]][: kinds.count("recycled")] == sweep["candidates"][
            sweep["line"] - 1
        ][: kinds.count("recycled")]
    assert trace["repeats"]


def test_an_adapter_drafts_and_the_bases_text_is_traced(tmp_path: Path) -> None:
    loaded = load_tiny(tmp_path)
    ids = loaded.tokenizer("once upon")["input_ids"]
    expected = loaded.model.generate(torch.tensor([ids]), do_sample=False, max_new_tokens=24)[0, len(ids) :].tolist()
    adapter = GatedAdapter.attach(loaded.model, rank=2)
    for layer in adapter.layers.values():
        torch.nn.init.normal_(layer.lora_B, std=0.5)
    trace = record(loaded, ids, DECODERS["window"], 24)
    assert_valid(trace)
    assert trace["generated"] == expected


# The page -----------------------------------------------------------------------------------------------------------


class Elements(HTMLParser):
    """Names of all elements, their attributes that load something, and the text of script elements."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.names: list[str] = []
        self.loads: list[str] = []
        self.scripts: list[str] = []
        self._in_script = False
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.names.append(tag)
        self.loads += [f"{tag} {name}" for name, _ in attrs if name in ("src", "href", "srcset", "action", "data")]
        self._in_script = tag == "script"
        if self._in_script:
            self.scripts.append("")

    def handle_endtag(self, tag: str) -> None:
        self._in_script = False

    def handle_data(self, data: str) -> None:
        if self._in_script:
            self.scripts[-1] += data


def test_the_page_needs_nothing_else_and_holds_the_whole_trace(loaded: Loaded) -> None:
    trace = record(loaded, loaded.tokenizer("once upon")["input_ids"], DECODERS["window"], 24)
    text = page(trace)
    found = Elements(text)
    assert found.loads == []
    assert "http" not in text and "@import" not in text and "@@" not in text
    assert json.loads(found.scripts[0]) == json.loads(json.dumps(trace))
    assert text.count('<div class="text"><span') == trace["forwards"]
    assert "prefers-color-scheme: dark" in text
    for state in STATES:
        assert f".{state} {{" in text  # a colour for each
    assert f"{trace['tokens']} tokens in {trace['forwards']} forward passes" in text


def test_a_hostile_token_stays_text(loaded: Loaded) -> None:
    trace = record(loaded, loaded.tokenizer("once upon")["input_ids"], DECODERS["recycle"], 12)
    plain = Elements(page(trace)).names
    hostile = {**trace, "texts": dict.fromkeys(trace["texts"], HOSTILE + "@@data@@"), "text": HOSTILE, "model": HOSTILE}
    found = Elements(page(hostile))
    assert found.names == plain
    assert json.loads(found.scripts[0])["texts"] == hostile["texts"]


def test_a_template_is_filled_once_and_wholly() -> None:
    assert fill("@@a@@ @@b@@", a="@@b@@", b="x") == "@@b@@ x"
    with pytest.raises(KeyError, match="no place for c"):
        fill("@@a@@", a="", c="")
    with pytest.raises(KeyError, match="b"):
        fill("@@b@@")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (" a\n", " a⏎"),
        ("\t\r", "⇥␍"),
        ("\x00\x1b", "␀␛"),
        ("\u202e", "⟨U+202E⟩"),
        ("\u200b", "⟨U+200B⟩"),
        ("é 漢 🎉", "é 漢 🎉"),
    ],
)
def test_what_cannot_be_seen_is_shown_by_a_sign(text: str, expected: str) -> None:
    assert visible(text) == expected


def test_tokens_keep_their_spaces_and_special_ones_their_names() -> None:
    tokenizer = byte_tokenizer()
    assert shown(tokenizer, EOS) == "<eos>"
    assert shown(tokenizer, tokenizer(" ")["input_ids"][0]) == " "
    assert shown(tokenizer, tokenizer("\n")["input_ids"][0]) == "⏎"
    part = tokenizer("é")["input_ids"][0]
    assert shown(tokenizer, part) == "⟨Ã⟩"
    assert shown(tokenizer, 10**6) == "⟨1000000⟩"


# The command --------------------------------------------------------------------------------------------------------


def test_the_command_shows_every_sweep_and_writes_page_and_figures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    save_tiny(tmp_path / "model")
    arguments = ["trace", "hi\nyou", "-m", str(tmp_path / "model"), "-n", "4", "--max-new-tokens", "9"]
    assert main([*arguments, "-o", "t.html", "-o", "t.json"]) == 0
    said = capsys.readouterr()
    value = json.loads(Path("t.json").read_text())
    assert_valid(value, "trace")
    assert value["model"] == "model" and str(tmp_path) not in json.dumps(value)
    lines = said.out.splitlines()
    assert lines[0] == "window n=4 on model"
    assert [int(text.split()[0]) for text in lines[1 : 1 + value["forwards"]]] == [*range(1, value["forwards"] + 1)]
    assert f"{value['tokens']} tokens in {value['forwards']} forward passes" in said.out
    assert "The answer ends by itself." in said.out
    assert "<title>window n=4 on model</title>" in Path("t.html").read_text()
    assert main([*arguments, "--json"]) == 0
    said = capsys.readouterr()
    (printed,) = said.out.splitlines()
    assert json.loads(printed)["sweeps"] == value["sweeps"]
    assert main([*arguments, "-o", "t.pdf"]) == 2
    assert "ends in .html or .json" in capsys.readouterr().err


def test_marks_stand_for_colours_where_there_are_none() -> None:
    trace = {"states": list(STATES), "texts": {"1": "a", "2": "b", "3": "c", "4": "d"}}
    order = ["accepted", "predicted", "noisy", "beyond"]
    sweep = {"slots": [[token, list(STATES).index(state)] for token, state in enumerate(order, 1)]}
    assert line(trace, sweep, coloured=False).plain == "[a](b)c~d~"
    assert line(trace, sweep, coloured=True).plain == "abcd"
