"""One sweep: how lines are packed, who sees whom, and that packing changes nothing."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from decoding import prompt, reference
from jacobi_forcing.backbone import Backbone
from jacobi_forcing.cache import KVCache
from jacobi_forcing.sweep import PADDING, Line, Lines, sweep, sweep_logits
from tiny_models import ARCHITECTURES, shared_model

each_architecture = pytest.mark.parametrize("arch", ARCHITECTURES)

# The example of the module: row 0 has 6 committed tokens and two lines, row 1 has 4 and a line that sees 2 of them.
ROWS = [
    [Line([40, 41, 42], 6), Line([43, 44], 6)],
    [Line([50, 51, 52], 4), Line([53, 54], 2)],
]


def committed(backbone: Backbone, texts: list[list[int]]) -> KVCache:
    cache = backbone.new_cache(len(texts))
    sweep_logits(backbone, cache, Lines.pack([[Line(text, 0)] for text in texts]))
    cache.commit([range(len(text)) for text in texts])
    return cache


def test_lines_stand_side_by_side_and_rows_are_padded() -> None:
    lines = Lines.pack([ROWS[0], [Line([50, 51], 4)]])
    assert lines.ids.tolist() == [[40, 41, 42, 43, 44], [50, 51, 0, 0, 0]]
    assert lines.positions.tolist() == [[6, 7, 8, 6, 7], [4, 5, 0, 0, 0]]
    assert lines.line.tolist() == [[0, 0, 0, 1, 1], [0, 0, PADDING, PADDING, PADDING]]
    assert lines.prefix.tolist() == [[6, 6, 6, 6, 6], [4, 4, 0, 0, 0]]
    assert lines.start is None


def test_a_slot_sees_its_prefix_and_its_own_line() -> None:
    visible = Lines.pack(ROWS).visible(committed=6).int().tolist()
    #     committed         line 0   line 1
    assert visible[0] == [
        [1, 1, 1, 1, 1, 1, 1, 0, 0, 0, 0],
        [1, 1, 1, 1, 1, 1, 1, 1, 0, 0, 0],
        [1, 1, 1, 1, 1, 1, 1, 1, 1, 0, 0],
        [1, 1, 1, 1, 1, 1, 0, 0, 0, 1, 0],
        [1, 1, 1, 1, 1, 1, 0, 0, 0, 1, 1],
    ]
    assert visible[1] == [
        [1, 1, 1, 1, 0, 0, 1, 0, 0, 0, 0],
        [1, 1, 1, 1, 0, 0, 1, 1, 0, 0, 0],
        [1, 1, 1, 1, 0, 0, 1, 1, 1, 0, 0],
        [1, 1, 0, 0, 0, 0, 0, 0, 0, 1, 0],
        [1, 1, 0, 0, 0, 0, 0, 0, 0, 1, 1],
    ]


def test_a_line_that_follows_sees_what_the_first_line_sees_and_the_first_line_up_to_itself() -> None:
    rows = [
        [Line([40, 41, 42], 3), Line([42, 43], 5, gated=True, follows=True, lead=[41])],
        # Shorter than the other row: behind its one committed token the cache has dead space, which nothing may see.
        [Line([50, 51, 52], 1), Line([51, 52], 2, gated=True, follows=True)],
    ]
    visible = Lines.pack(rows).visible(committed=3).int().tolist()
    assert visible[0][3:] == [
        [1, 1, 1, 1, 1, 0, 1, 0],
        [1, 1, 1, 1, 1, 0, 1, 1],
    ]
    assert visible[1] == [
        [1, 0, 0, 1, 0, 0, 0, 0],
        [1, 0, 0, 1, 1, 0, 0, 0],
        [1, 0, 0, 1, 1, 1, 0, 0],
        [1, 0, 0, 1, 0, 0, 1, 0],
        [1, 0, 0, 1, 0, 0, 1, 1],
    ]


def test_a_committed_slot_stands_at_its_own_position() -> None:
    assert Lines.pack(ROWS).kv_positions(6).tolist() == [
        [0, 1, 2, 3, 4, 5, 6, 7, 8, 6, 7],
        [0, 1, 2, 3, 4, 5, 4, 5, 6, 2, 3],
    ]


@pytest.mark.parametrize(
    ("rows", "start"),
    [
        ([[Line([1, 2], 5)]], 5),
        ([[Line([1, 2], 0)]], 0),
        ([[Line([1, 2], 5)], [Line([3, 4], 5)]], 5),
        ([[Line([1, 2], 5)], [Line([3, 4], 6)]], None),
        ([[Line([1, 2], 5)], [Line([3], 5)]], None),
        ([[Line([1, 2], 5), Line([3], 7)]], None),
        ([[Line([1], 5)], [Line([3], 5), Line([4], 5)]], None),
    ],
)
def test_lines_that_stand_abreast_are_told_apart(rows: list[list[Line]], start: int | None) -> None:
    assert Lines.pack(rows).start == start


@each_architecture
def test_lines_in_one_forward_equal_lines_on_their_own(arch: str) -> None:
    backbone = Backbone(shared_model(arch))
    texts = [prompt(6), prompt(4)]
    with torch.no_grad():
        cache = committed(backbone, texts)
        together = sweep_logits(backbone, cache, Lines.pack(ROWS))
        assert cache.pending == 5
        for row, text in enumerate(texts):
            slot = 0
            for line in ROWS[row]:
                whole = [*text[: line.start], *line.ids]
                alone = backbone.forward(torch.tensor([whole]), torch.arange(len(whole))[None], None)
                width = len(line.ids)
                torch.testing.assert_close(together[row, slot : slot + width], alone[0, -width:], atol=1e-4, rtol=1e-4)
                slot += width


@each_architecture
@pytest.mark.parametrize("width", [1, 5])
def test_the_short_way_for_lines_abreast_equals_the_general_one(arch: str, width: int) -> None:
    backbone = Backbone(shared_model(arch))
    lines = Lines.pack([[Line(prompt(width, seed=row), 9)] for row in range(2)])
    assert lines.start == 9
    with torch.no_grad():
        short, general = (
            sweep_logits(backbone, committed(backbone, [prompt(9), prompt(9, 1)]), way)
            for way in (lines, dataclasses.replace(lines, start=None))
        )
    torch.testing.assert_close(short, general, atol=1e-4, rtol=1e-4)


def test_a_line_that_sees_only_part_of_what_is_committed_takes_the_general_way() -> None:
    backbone = Backbone(shared_model("llama"))
    text = prompt(9)
    with torch.no_grad():
        cache = committed(backbone, [text])
        found = sweep(backbone, cache, Lines.pack([[Line(text[4:6], 4)]]))
        expected = sweep(backbone, backbone.new_cache(), Lines.pack([[Line(text[:6], 0)]]))
    assert found.tolist() == [expected[0, 4:].tolist()]


@each_architecture
def test_predictions_are_the_greedy_next_tokens(arch: str) -> None:
    backbone, text = Backbone(shared_model(arch)), reference(arch)
    with torch.no_grad():
        cache = committed(backbone, [prompt()])
        found = sweep(backbone, cache, Lines.pack([[Line(text[:8], 11)]]))
    assert found.dtype == torch.long
    assert found.tolist() == [text[1:9]]


@each_architecture
def test_only_the_wanted_columns_come_back(arch: str) -> None:
    backbone = Backbone(shared_model(arch))
    lines = Lines.pack([[Line(prompt(8), 0)]])
    with torch.no_grad():
        everything = sweep_logits(backbone, backbone.new_cache(), lines)
        wanted = sweep_logits(backbone, backbone.new_cache(), lines, keep=torch.tensor([2, 7]))
    torch.testing.assert_close(wanted, everything[:, [2, 7]], atol=1e-5, rtol=1e-5)
