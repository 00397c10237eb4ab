"""Greedy responses of many prompts at once: the fixed points of the trajectories.

Rows of unequal length generate side by side, each token in a forward pass of its own. While the same rows are at
work, generated tokens stay pending in the cache behind the longest prompt, so that no step moves what is there::

    slot     0 1 2 3 4 5 | 6 7 8
    row 0    a b c d e f | g h i      positions 0..8
    row 1    a b c d . . | e f g      positions 0..6; '.' is hidden by the mask

When enough rows have ended they leave, and what is pending is committed.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from jacobi_forcing.backbone import Backbone
from jacobi_forcing.cache import KVCache, RowContent
from jacobi_forcing.sweep import Line, Lines, sweep

KEEP_ROWS = 0.75
"""Rows that have ended leave the batch once no more than this share of it is still at work."""


def greedy_responses(
    backbone: Backbone,
    prompts: Sequence[Sequence[int]],
    limits: Sequence[int],
    eos_ids: Sequence[int],
    contents: list[RowContent] | None = None,
) -> list[list[int]]:
    """The greedy response of each prompt.

    Args:
        backbone: The model.
        prompts: Token ids, at least one each.
        limits: Most tokens of each response, at least 1; prompt and limit together fit the model's context.
        eos_ids: Ids that end a response. Empty: every response is as long as its limit.
        contents: Is given the keys and values of each prompt and its response, the last token's excepted: they are at
            hand when a row is done, and what is swept next stands on them.

    Returns:
        Token ids; the first end token is kept and nothing follows it.
    """
    cache = backbone.new_cache(len(prompts))
    responses: list[list[int]] = [[] for _ in prompts]
    found: dict[int, RowContent] = {}
    live = list(range(len(prompts)))
    newest = _prefill(backbone, cache, prompts)
    rows, stretch = live, _Stretch(backbone, cache, limits)
    while True:
        for row, token in zip(rows, newest.tolist(), strict=True):
            if row in live:
                responses[row].append(token)
        live = [row for row in live if len(responses[row]) < limits[row] and responses[row][-1] not in eos_ids]
        if not live or len(live) <= KEEP_ROWS * len(rows):
            if contents is not None:
                stretch.commit()
                for row in set(rows) - set(live):
                    found[row] = _content(cache, rows.index(row), len(prompts[row]) + len(responses[row]) - 1)
            if not live:
                break
            newest = stretch.close([rows.index(row) for row in live], newest)
            rows, stretch = live, _Stretch(backbone, cache, [limits[row] - len(responses[row]) for row in live])
        newest = stretch.step(newest)
    if contents is not None:
        contents += [found[row] for row in range(len(prompts))]
    return responses


def _content(cache: KVCache, place: int, length: int) -> RowContent:
    """What a row has committed, up to a length, in memory of its own."""
    return [(keys[:, :length].clone(), values[:, :length].clone()) for keys, values in cache.content(place)]


def _prefill(backbone: Backbone, cache: KVCache, prompts: Sequence[Sequence[int]]) -> Tensor:
    """Commit the prompts and predict the first token of each response, [R]."""
    lengths = [len(prompt) for prompt in prompts]
    ends = sorted({length - 1 for length in lengths})
    lines = Lines.pack([[Line(prompt, 0)] for prompt in prompts], backbone.device)
    predictions = sweep(backbone, cache, lines, torch.tensor(ends, device=backbone.device))
    cache.commit([range(length) for length in lengths])
    columns = torch.tensor([ends.index(length - 1) for length in lengths], device=backbone.device)
    return predictions.gather(1, columns[:, None])[:, 0]


class _Stretch:
    """Steps during which the same rows are at work; their tokens stay pending in the cache.

    Args:
        backbone: The model.
        cache: The rows' committed tokens, nothing pending.
        remaining: Tokens that each row may still generate, the one about to be fed included.
    """

    def __init__(self, backbone: Backbone, cache: KVCache, remaining: Sequence[int]) -> None:
        self.backbone, self.cache, self.steps = backbone, cache, 0
        lengths = torch.tensor(cache.lengths, device=backbone.device)[:, None]
        slots = torch.arange(cache.width + max(remaining), device=backbone.device)[None]
        behind = slots - cache.width
        # A row that has ended is fed on until it leaves; it must not run past the model's last position.
        last = lengths + torch.tensor(remaining, device=backbone.device)[:, None] - 1
        self._visible = (slots < lengths) | (behind >= 0)
        self._positions = torch.where(behind < 0, slots, lengths + behind).minimum(last)

    def step(self, tokens: Tensor) -> Tensor:
        """Feed one token of each row [R]; returns the next ones [R]."""
        end = self.cache.width + self.steps + 1
        here = self._positions[:, end - 1 : end]
        mask = self.backbone.attention_mask(self._visible[:, None, :end], here, self._positions[:, :end])
        self.steps += 1
        return self.backbone.forward(tokens[:, None], here, mask, self.cache)[:, -1].argmax(dim=-1)

    def commit(self) -> None:
        """Commit what is pending; no step may follow."""
        if self.cache.pending:
            self.cache.commit([range(self.steps)] * self.cache.rows)

    def close(self, places: Sequence[int], tokens: Tensor) -> Tensor:
        """Commit what is pending, keep only the rows at `places`; returns their tokens."""
        self.commit()
        self.cache.select_rows(places)
        return tokens[torch.tensor(places, device=tokens.device)]
