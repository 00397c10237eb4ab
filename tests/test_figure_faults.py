"""Faults that users met in figures of tools of this kind; ours must not have them.

Code extraction is in test_code_extraction.py, where eight kinds of fence stand around a right and a wrong solution.
"""

from __future__ import annotations

import ast
import itertools
import re
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from jacobi_forcing.backbone import Backbone
from jacobi_forcing.bench import ModelResult, bench, columns, notes, rows
from jacobi_forcing.bench.contestants import Contestant, Turn
from jacobi_forcing.cli.answers import answer, describe
from jacobi_forcing.config import DecodeConfig, ModelConfig
from jacobi_forcing.loading import Loaded, load
from jacobi_forcing.trajectories.prompts import Prompt
from jacobi_forcing.viz.payback import verdict
from jacobi_forcing.viz.trace import record
from tiny_folder import EOS, PAD, byte_tokenizer

ROOT = Path(__file__).resolve().parents[1]
WINDOW = DecodeConfig(decoder="window", block_size=4, draft_init="last")
JACOBI = DecodeConfig(decoder="jacobi", block_size=4, draft_init="last")
SPEED = {"TPS", "speed-up", "speedup", "tokens/s", "TPF"}
QUALITY = {"exact", "solved", "right", "repeats"}


@pytest.fixture(scope="module")
def scripted(tmp_path_factory: pytest.TempPathFactory) -> Loaded:
    """A model whose next token follows from the last one alone: b, c, d, … z, end; and after an a, a for ever.

    Embeddings are unit vectors, the layers add nothing, and the head maps each token's vector to its successor.
    """
    tokenizer = byte_tokenizer()
    size = len(tokenizer)
    config = LlamaConfig(
        **{"vocab_size": size, "hidden_size": 264, "num_attention_heads": 4, "num_hidden_layers": 1},
        **{"intermediate_size": 8, "max_position_embeddings": 256, "tie_word_embeddings": False},
        **{"bos_token_id": None, "eos_token_id": EOS, "pad_token_id": PAD},
    )
    model = LlamaForCausalLM(config).eval()
    ids = {letter: tokenizer(letter)["input_ids"][0] for letter in "abcdefghijklmnopqrstuvwxyz"}
    follows = {ids["a"]: ids["a"], ids["z"]: EOS}
    follows |= {
        ids[one]: ids[other] for one, other in zip("bcdefghijklmnopqrstuvwxy", "cdefghijklmnopqrstuvwxyz", strict=True)
    }
    with torch.no_grad():
        layer = model.model.layers[0]
        for part in (layer.self_attn.o_proj, layer.mlp.down_proj):
            part.weight.zero_()
        model.model.embed_tokens.weight.copy_(torch.eye(size, 264))
        model.lm_head.weight.zero_()
        for token in range(size):
            model.lm_head.weight[follows.get(token, EOS), token] = 1.0
    folder = tmp_path_factory.mktemp("scripted")
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return load(ModelConfig(str(folder), device="cpu"))


def asked(loaded: Loaded, *texts: str) -> list[Prompt]:
    return [Prompt(n, text, loaded.tokenizer(text)["input_ids"], "#### 1") for n, text in enumerate(texts)]


def measured(loaded: Loaded, *texts: str, limit: int = 64, **options: Any) -> ModelResult:
    return bench(
        loaded, asked(loaded, *texts), decode=[WINDOW, JACOBI], max_new_tokens=limit, label="scripted", **options
    )


# Counts off by one ---------------------------------------------------------------------------------------------------


def test_of_a_scripted_text_every_token_and_every_forward_is_counted_the_prefill_too(scripted: Loaded) -> None:
    # "xb" goes on with c to z and the end: 25 tokens. One comes with the prompt's forward, 24 with one more each.
    result = measured(scripted, "xb")
    for name in ("library", "ar"):
        assert (result[name].tokens, result[name].forwards, result[name].tokens_per_forward) == (25, 25, 1.0)
    # The drafts repeat the last token, which never comes twice: no guess is right, and no forward is saved or lost.
    for name in ("window", "jacobi"):
        assert (result[name].tokens, result[name].forwards, result[name].tokens_per_forward) == (25, 25, 1.0)
        assert result[name].to_dict()["accepted"] == {"1": 25}


def test_of_a_text_whose_guesses_are_all_right_the_counts_are_known_beforehand(scripted: Loaded) -> None:
    # "a" goes on with a; 13 tokens are allowed. The prompt's forward carries 4 guesses: they are accepted, and the
    # prediction behind them. Then 3 guesses a forward, and the prediction: 5 + 4 + 4 tokens in 3 forwards.
    result = measured(scripted, "a", limit=13)
    for name in ("window", "jacobi"):
        entry = result[name].to_dict()
        assert (entry["tokens"], entry["forwards"], entry["model_forwards"]) == (13, 3, 3)
        assert entry["tokens_per_forward"] == pytest.approx(13 / 3)
        assert entry["accepted"] == {"4": 2, "5": 1}
    assert (result["ar"].tokens, result["ar"].forwards) == (13, 13)
    cells = {row[1]: row for row in rows([result.to_dict()])}
    assert "4.33" in cells["window"] and "1.00" in cells["ar"]
    trace = record(scripted, asked(scripted, "a")[0].ids, WINDOW, 13)
    assert [sweep["accepted"] for sweep in trace["sweeps"]] == [5, 4, 4]
    assert (trace["tokens"], trace["forwards"]) == (13, 3)


def test_in_a_batch_each_rows_own_forwards_are_counted(scripted: Loaded) -> None:
    # 25 tokens of "b" one by one; 25 of "a" in 5 + 4 + 4 + 4 + 4 + 4, which are 6 forwards. The model ran 25 times.
    result = measured(scripted, "b", "a", limit=25, batch_sizes=[2])
    window = result["window"].to_dict()
    assert (window["tokens"], window["forwards"], window["model_forwards"]) == (50, 31, 25)
    assert (result["ar"].tokens, result["ar"].forwards) == (50, 50)


@pytest.mark.parametrize("limit", [1, 3, 4, 5, 9])
def test_a_budget_is_met_to_the_token_whatever_the_block(scripted: Loaded, limit: int) -> None:
    result = measured(scripted, "a", limit=limit)
    forwards = 1 + max(0, -(-(limit - 5) // 4))
    assert {(entry.decoder, entry.tokens) for entry in result.decoders} == {
        (name, limit) for name in ("library", "ar", "window", "jacobi")
    }
    assert result["window"].forwards == result["jacobi"].forwards == forwards


# Fewer steps, slower clock -------------------------------------------------------------------------------------------


@pytest.fixture
def slots_cost(scripted: Loaded) -> Iterator[None]:
    """Every token of a forward takes 2 ms longer."""

    def wait(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        time.sleep(0.002 * kwargs["input_ids"].numel())

    handle = scripted.model.register_forward_pre_hook(wait, with_kwargs=True)
    yield
    handle.remove()


@pytest.mark.usefixtures("slots_cost")
def test_where_a_forward_costs_more_than_it_brings_tables_and_reports_say_so_and_why(scripted: Loaded) -> None:
    form = measured(scripted, "b", limit=12).to_dict()
    (window,) = [entry for entry in form["decoders"] if entry["decoder"] == "window"]
    assert window["cost_ratio"] > window["tokens_per_forward"] == 1.0
    assert window["speedup"] < 1
    said = next(note for note in notes([form]) if note.startswith("scripted, window n=4"))
    for text in (said, verdict(form)):
        assert "no speed-up is to be expected" in text
        assert re.search(r"a forward of [24] tokens costs \d\.\d\d times one of 1", text)
        assert "1.00 tokens" in text


# Fast nonsense -------------------------------------------------------------------------------------------------------


def test_a_model_that_repeats_itself_is_shown_as_such_beside_every_speed(scripted: Loaded) -> None:
    form = measured(scripted, "a", limit=40).to_dict()
    fast = next(row for row in rows([form]) if row[1] == "window")
    assert float(fast[rows_head("TPF", form)]) > 3
    assert fast[rows_head("repeats", form)] == "100.0 %"
    assert "100.0 % end in a loop" in verdict(form)
    said = describe(answer(scripted, asked(scripted, "a")[0].ids, WINDOW, 40, show_sweeps=False))
    assert "tokens/s" in said and "ends in a loop" in said


def rows_head(name: str, form: dict[str, Any]) -> int:
    return columns([form]).index(name)


def heads_in(code: str) -> list[tuple[int, set[str]]]:
    """Every tuple or list of texts in a source, with its line: heads of tables are among them."""
    found = []
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, (ast.Tuple, ast.List)):
            texts = {part.value for part in node.elts if isinstance(part, ast.Constant) and isinstance(part.value, str)}
            found.append((node.lineno, texts))
    return found


def test_no_table_of_the_source_has_a_speed_without_quality_or_exactness() -> None:
    faults, seen = [], 0
    for file in sorted((ROOT / "src").rglob("*.py")):
        for line, texts in heads_in(file.read_text(encoding="utf-8")):
            if {"TPS", "TPF"} <= texts:
                seen += 1
                if not texts & QUALITY:
                    faults.append(f"{file.name}:{line}")
    assert seen >= 3  # the bench's, the evaluation's, the comparison's
    assert not faults, faults


def test_no_table_of_the_documentation_has_a_speed_without_quality_or_exactness() -> None:
    faults, seen = [], 0
    for file in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]:
        lines = file.read_text(encoding="utf-8").splitlines()
        for number, (line, below) in enumerate(itertools.pairwise(lines), 1):
            heads = {cell.strip() for cell in line.strip("| ").split("|")}
            if re.fullmatch(r"\|[-| :]+\|", below) and any(set(head.split()) & SPEED for head in heads):
                seen += 1
                if not heads & QUALITY:
                    faults.append(f"{file.name}:{number}: {line}")
    assert seen >= 5
    assert not faults, faults


# Warm-up in the timing -----------------------------------------------------------------------------------------------


def test_the_first_answer_of_every_decoder_alike_is_in_no_figure(
    scripted: Loaded, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    slow = 0.2
    real = Contestant.take

    def take(self: Contestant, loaded: Loaded, backbone: Backbone, batch: Sequence[Prompt], limit: int) -> Turn:
        calls.append(self.name)
        return real(self, loaded, backbone, batch, limit)

    def wait(module: torch.nn.Module, args: tuple[Any, ...]) -> None:
        # What compiling, allocating and reading in take: the first call of a contestant only, and inside its clock.
        if calls and calls.count(calls[-1]) == 1:
            time.sleep(slow)

    monkeypatch.setattr(Contestant, "take", take)
    handle = scripted.model.register_forward_pre_hook(wait)
    try:
        result = measured(scripted, "a", "xa", limit=3)
    finally:
        handle.remove()
    assert len(calls) == 3 * len(result.decoders)
    for entry in result.decoders:
        assert len(entry.turns) == 2
        assert max(turn.seconds for turn in entry.turns) < slow, entry.decoder
