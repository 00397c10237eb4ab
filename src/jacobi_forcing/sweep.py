"""ONE sweep: one forward pass over packed draft lines. Decoding and trajectory collection both run this.

A *line* is a run of tokens at consecutive positions that sees a prefix of its row's committed tokens and itself,
causally, and never another line. Several lines of a row and several rows share one forward, and the committed KV is
never copied::

    row 0   committed 0..5 | line 0: positions 6 7 8 | line 1: positions 6 7 | padding
    row 1   committed 0..3 | line 0: positions 4 5 6 | line 1: positions 2 3   (sees committed 0..1 only)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from jacobi_forcing.backbone import Backbone
from jacobi_forcing.cache import KVCache

PADDING = -1


@dataclass(frozen=True)
class Line:
    """Tokens at positions start, start + 1, ...; each sees the committed tokens before position `start`.

    A line that `follows` sees its row's first line up to there, and the committed tokens that the first line sees: it
    is a draft behind a prompt that is not committed yet, or behind guesses that are being verified. `lead` are the
    guesses that it so builds on, between the text and its own first token. `gated` lines run through the model's gated
    adapter, the others through the base alone.
    """

    ids: Sequence[int]
    start: int
    gated: bool = False
    follows: bool = False
    lead: Sequence[int] = ()


@dataclass(frozen=True)
class Lines:
    """Packed lines of R rows, padded to Q slots.

    Attributes:
        ids: [R, Q].
        positions: [R, Q].
        line: [R, Q], index of the line within its row, PADDING in unused slots.
        prefix: [R, Q], committed tokens of the row that the slot sees: those at positions below it.
        follows: [R, Q]; the slot also sees the tokens of line 0 at positions below this; None: nowhere.
        gated: Slots of gated lines, counted through all rows: [G], or a slice where they lie side by side; None where
            there are none.
        start: First position where each row has one line and all lines have the same positions, as in every batch of
            one; None otherwise.
    """

    ids: Tensor
    positions: Tensor
    line: Tensor
    prefix: Tensor
    follows: Tensor | None = None
    start: int | None = None
    gated: Tensor | slice | None = None

    @classmethod
    def pack(
        cls, rows: Sequence[Sequence[Line]], device: torch.device | str = "cpu", slots: int | None = None
    ) -> Lines:
        """Lay each row's lines side by side and pad the rows to `slots`, by default to the longest of them."""
        width = slots or max(sum(len(line.ids) for line in row) for row in rows)
        ids, positions, index, prefix = [], [], [], []
        for row in rows:
            row_ids = [token for line in row for token in line.ids]
            unused = width - len(row_ids)
            ids.append(row_ids + [0] * unused)
            positions.append([p for line in row for p in range(line.start, line.start + len(line.ids))] + [0] * unused)
            index.append([i for i, line in enumerate(row) for _ in line.ids] + [PADDING] * unused)
            before = [row[0].start if line.follows else line.start for line in row]
            prefix.append([b for b, line in zip(before, row, strict=True) for _ in line.ids] + [0] * unused)
        # Padding behind a lone line is masked by causality alone, so it does not count.
        lone = all(len(row) == 1 and len(row[0].ids) == len(rows[0][0].ids) for row in rows)
        abreast = lone and all(row == positions[0] for row in positions)
        start = positions[0][0] if abreast else None
        columns = [ids, positions, index, prefix]
        if any(line.follows for row in rows for line in row):
            columns.append(
                _spread([[(line.start if line.follows else 0, line) for line in row] for row in rows], width)
            )
        # One tensor, so that there is one copy to the device.
        table = torch.tensor(columns, device=device).unbind(0)
        follows = table[4] if len(table) > 4 else None
        gated = _gated_slots(rows, width, device)
        return cls(table[0], table[1], table[2], table[3], follows, start, gated)

    def visible(self, committed: int, columns: int | None = None) -> Tensor:
        """What each slot may see: bool [R, Q, columns], committed slots first, then the lines', then none.

        Args:
            committed: Columns of the committed part.
            columns: Keys in all; committed + Q by default.
        """
        slots = torch.arange(committed, device=self.ids.device)
        before = slots[None, None, :] < self.prefix[:, :, None]
        same_line = self.line[:, :, None] == self.line[:, None, :]
        causal = self.positions[:, :, None] >= self.positions[:, None, :]
        among = same_line & causal
        if self.follows is not None:
            among |= (self.line == 0)[:, None, :] & (self.positions[:, None, :] < self.follows[:, :, None])
        seen = torch.cat([before, among], dim=-1)
        return _padded(seen, columns)

    def kv_positions(self, committed: int, columns: int | None = None) -> Tensor:
        """Position of every key [R, columns]; a committed slot's index is its position. See `visible`."""
        slots = torch.arange(committed, device=self.ids.device).expand(self.ids.shape[0], -1)
        return _padded(torch.cat([slots, self.positions], dim=-1), columns)


def _spread(rows: Sequence[Sequence[tuple[int, Line]]], width: int) -> list[list[int]]:
    """A value of each line at each of its slots, 0 in unused ones [R][Q]."""
    spread = [[int(value) for value, line in row for _ in line.ids] for row in rows]
    return [row + [0] * (width - len(row)) for row in spread]


def _gated_slots(rows: Sequence[Sequence[Line]], width: int, device: torch.device | str) -> Tensor | slice | None:
    if not any(line.gated for row in rows for line in row):
        return None
    flags = _spread([[(line.gated, line) for line in row] for row in rows], width)
    slots = [r * width + q for r, row in enumerate(flags) for q in range(width) if row[q]]
    if slots[-1] - slots[0] == len(slots) - 1:
        return slice(slots[0], slots[-1] + 1)
    return torch.tensor(slots, device=device)


def _padded(values: Tensor, columns: int | None) -> Tensor:
    """Zeros (or False) behind the last column, up to `columns`."""
    missing = 0 if columns is None else columns - values.shape[-1]
    return torch.nn.functional.pad(values, (0, missing)) if missing else values


def sweep_logits(backbone: Backbone, cache: KVCache, lines: Lines, keep: Tensor | None = None) -> Tensor:
    """Run the lines through the model; their KV becomes pending in `cache`.

    Args:
        backbone: The model.
        cache: Committed KV of the rows; must have nothing pending.
        lines: What to sweep; no line may see beyond its row's committed length.
        keep: Columns whose logits are wanted [k]; all by default.

    Returns:
        Logits [R, Q or k, V].
    """
    queries = lines.ids.shape[1]
    if lines.start == cache.width:
        # One line per row, right behind everything that is committed: plain causal attention.
        mask = backbone.causal_mask(queries, cache)
    else:
        columns = cache.columns(queries)
        visible = lines.visible(cache.width, columns)
        mask = backbone.attention_mask(visible, lines.positions, lines.kv_positions(cache.width, columns))
    cache.stage(queries, lines.ids.device)
    return backbone.forward(lines.ids, lines.positions, mask, cache, keep, lines.gated)


def sweep(backbone: Backbone, cache: KVCache, lines: Lines, keep: Tensor | None = None) -> Tensor:
    """One sweep: the greedy next token at every slot, int64 [R, Q or k]. See `sweep_logits`."""
    return sweep_logits(backbone, cache, lines, keep).argmax(dim=-1)
