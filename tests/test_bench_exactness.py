from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from benching import JACOBI, MULTIBLOCK, RECYCLE, WINDOW, load_tiny, prompts_for
from decoding import DECODERS, library, prompt
from jacobi_forcing import DecodeConfig, generate
from jacobi_forcing.backbone import Backbone
from jacobi_forcing.bench import bench, notes, rows
from jacobi_forcing.bench.contestants import Contestant, Turn
from jacobi_forcing.bench.exactness import find_mismatch, tolerance
from jacobi_forcing.decode.rows import JacobiRow, WindowRow
from jacobi_forcing.loading import Loaded
from jacobi_forcing.trajectories.prompts import Prompt
from tiny_models import ARCHITECTURES, tiny_model

ASKED = [3, 4, 5]


class Tied:
    """A model that gives tokens `a` and `b` the same logits, and a prompt whose third token is one of them.

    `text` is its greedy text with `a` there, and `other` the one with `b`.
    """

    def __init__(self, a_ends: bool = False) -> None:
        model = tiny_model("llama", vocab_size=64)
        self.start = library(model, ASKED, 3)
        self.a = self.start[2]
        self.b = next(token for token in range(63, 0, -1) if token not in [*ASKED, *self.start])
        with torch.no_grad():
            head = model.get_output_embeddings().weight
            head[self.b] = head[self.a]
        if a_ends:
            model.generation_config.eos_token_id = self.a
        self.backbone = Backbone(model)
        self.prompt = Prompt(7, "", ASKED, None)
        self.text = [*self.start, *([] if a_ends else library(model, [*ASKED, *self.start], 5))]
        start = [*self.start[:2], self.b]
        self.other = [*start, *library(model, [*ASKED, *start], 5)]

    def examine(self, answer: Sequence[int], reference: Sequence[int], **options: Any) -> tuple[int, bool] | None:
        found = find_mismatch(self.backbone, self.prompt, answer, reference, **options)
        assert found is None or found.prompt == 7
        return None if found is None else (found.position, found.near_tie)


@pytest.fixture(scope="module")
def tied() -> Tied:
    return Tied()


def test_answers_that_are_the_same_have_no_mismatch(tied: Tied) -> None:
    assert tied.examine(tied.text, tied.text) is None


def test_two_tokens_on_top_that_no_forward_can_tell_apart_are_a_near_tie(tied: Tied) -> None:
    assert tied.examine(tied.text, tied.other, limit=8) == (2, True)
    assert tied.examine(tied.other, tied.text, limit=8) == (2, True)
    found = find_mismatch(tied.backbone, tied.prompt, tied.other, tied.text)
    assert found is not None and found.gap == 0
    assert found.to_dict() == {"prompt": 7, "position": 2, "gap": 0.0, "near_tie": True}


def test_a_token_below_the_top_is_a_fault_on_either_side(tied: Tied) -> None:
    wrong = [*tied.start[:2], (tied.a + 1) % 60 + 1, *tied.text[3:]]
    assert tied.examine(wrong, tied.text) == (2, False)
    assert tied.examine(tied.text, wrong) == (2, False)


def test_tokens_that_equal_each_other_below_the_top_are_a_fault(tied: Tied) -> None:
    # The tied pair where something else is on top: no gap between them, and neither is the greedy token.
    place = next(index for index, token in enumerate(tied.text) if token not in (tied.a, tied.b))
    first, second = ([*tied.text[:place], token, *tied.text[place + 1 :]] for token in (tied.a, tied.b))
    assert tied.examine(first, second) == (place, False)


def test_a_fault_behind_a_near_tie_is_a_fault(tied: Tied) -> None:
    wrong = [*tied.other[:5], (tied.other[5] + 1) % 60 + 1, *tied.other[6:]]
    assert tied.examine(wrong, tied.text) == (5, False)


def test_a_text_that_ends_too_soon_or_too_late_is_a_fault(tied: Tied) -> None:
    assert tied.examine(tied.text[:4], tied.text) == (4, False)
    assert tied.examine([*tied.text, 1], tied.text) == (8, False)
    # Even where the texts part at a near tie before: with no end token there, the limit must have been met.
    assert tied.examine(tied.other[:4], tied.text, limit=8) == (4, False)


def test_a_tie_between_an_end_token_and_another_is_a_near_tie() -> None:
    tied = Tied(a_ends=True)
    assert tied.text[-1] == tied.a
    assert tied.examine(tied.text, tied.other, limit=8) == (2, True)
    assert tied.examine(tied.other, tied.text, limit=8) == (2, True)
    assert tied.examine([*tied.text, 5], tied.other, limit=8) == (3, False)


def test_the_tolerance_follows_the_dtype() -> None:
    assert tolerance(torch.float32) < tolerance(torch.float16) < tolerance(torch.bfloat16) < 1
    assert tolerance(torch.float64) <= tolerance(torch.bfloat16)


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_in_bfloat16_no_decoder_is_at_fault(arch: str) -> None:
    model = tiny_model(arch).to(torch.bfloat16)
    backbone = Backbone(model)

    def ours(ids: list[int], decoder: str) -> list[int]:
        decode = DecodeConfig(decoder=decoder, block_size=8)
        return generate(model, torch.tensor([ids]), decode=decode, max_new_tokens=32)[0, len(ids) :].tolist()

    for seed in range(2):
        ids = prompt(11, seed)
        ar = ours(ids, "ar")
        for answer in [library(model, ids, 32), *(ours(ids, decoder) for decoder in DECODERS[1:])]:
            found = find_mismatch(backbone, Prompt(seed, "", ids, None), answer, ar, 32)
            assert found is None or found.near_tie, found


# In a run ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> Loaded:
    return load_tiny(tmp_path_factory.mktemp("model"))


def test_a_decoder_that_changes_the_text_is_reported_as_a_fault(
    loaded: Loaded, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = Contestant.take

    def corrupt(self: Contestant, loaded: Loaded, backbone: Backbone, batch: Sequence[Prompt], limit: int) -> Turn:
        turn = real(self, loaded, backbone, batch, limit)
        if self.decode == WINDOW and batch[0].index == 1:
            turn.ids[0][3] = (turn.ids[0][3] + 1) % 256 + 2
        return turn

    monkeypatch.setattr(Contestant, "take", corrupt)
    found = bench(loaded, prompts_for(loaded), decode=[WINDOW, JACOBI], max_new_tokens=6, label="tiny")
    assert (found["window"].exact, found["window"].near_ties, found["window"].faults) == (2, 0, 1)
    assert found["jacobi"].exact == 3
    (mismatch,) = found["window"].mismatches
    assert (mismatch.prompt, mismatch.position, mismatch.near_tie) == (1, 3, False)
    form = found.to_dict()
    said = "1 of 3 answers differ from ar beyond rounding, first at token 3 of prompt 1. This is a fault."
    assert f"tiny, window n=4: {said}" in notes([form])
    assert any("2/3, near ties 0, faults 1" in row for row in rows([form]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("batch", [1, 2])
def test_a_decoder_that_accepts_one_guess_too_many_is_at_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, batch: int
) -> None:
    loaded = load_tiny(tmp_path)
    loaded.model.to(dtype)
    real = WindowRow._best

    def generous(self: WindowRow, *lines: Any) -> tuple[int, int]:
        won, accepted = real(self, *lines)
        return won, min(accepted + 1, len(lines[-1][won]) - 1)

    monkeypatch.setattr(WindowRow, "_best", generous)
    assert JacobiRow._best is not WindowRow._best
    prompts = prompts_for(loaded, 2)
    found = bench(loaded, prompts, decode=[WINDOW, RECYCLE, JACOBI, MULTIBLOCK], max_new_tokens=12, batch_sizes=[batch])
    assert found["window"].faults == found["recycle"].faults == 2
    assert found["library"].faults == found["ar"].faults == found["jacobi"].faults == found["multiblock"].faults == 0
