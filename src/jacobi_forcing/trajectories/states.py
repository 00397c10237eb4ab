"""Every block of every response swept side by side to its fixed point.

A block of n tokens needs up to n - 1 sweeps, one after the other. But blocks wait for nobody: each stands on the
response before it, which is known already. So one forward pass sweeps them all, each as a line on its own prefix::

    prompt and response, committed once     P0 .. P9 r0 r1 r2 r3 r4 r5 r6 r7
    line of block 0, state r0 x x x         sees P0 .. P9
    line of block 1, state r4 r5 x x        sees P0 .. P9 r0 .. r5    (its first wrong slot is 2, and it starts there)

A line starts at the first wrong slot of its state: what stands before it equals the response, whose KV is committed
and whose next token is known. A block's first line starts one slot earlier, to see whether the model agrees with the
response. Lines end one slot early, because the prediction at the last slot belongs to the next block. See "The Jacobi
trajectory" in section 3 of the paper.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterable, Iterator, Sequence

import torch

from jacobi_forcing.backbone import Backbone
from jacobi_forcing.blocks import common_prefix
from jacobi_forcing.cache import KVCache, RowContent
from jacobi_forcing.schedule import is_settled
from jacobi_forcing.sweep import Line, Lines, sweep_logits

LOGITS_PER_FORWARD = 2**28
"""Bounds the memory of one sweep's logits (rows x slots x vocabulary): 1 GiB in fp32."""
CPU_SLOTS = 1024
"""Slots of one sweep on a CPU: more fill its caches, and take longer each."""
KEEP_ROWS = 0.75
"""Rows whose blocks have all converged leave once no more than this share of the rows is still at work."""


@dataclasses.dataclass
class Block:
    """One block on its way to the fixed point.

    Attributes:
        start: Position of slot 0 in prompt + response, tokens.
        fixed_point: The block of the response.
        states: y(0) and what followed.
        wanted: Noise ratios of which the nearest states are to be seen; None: all states there are.
        gap: How far the response's token lay below the predicted one where they differed, in logits; 0 if never.
        drifted: Whether they differed; it is the block's first sweep that tells.
        right: Leading slots of the newest state that equal the fixed point, at least 1.
    """

    start: int
    fixed_point: list[int]
    states: list[list[int]]
    wanted: Sequence[float] | None = None
    gap: float = 0.0
    drifted: bool = False
    right: int = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        """Look how far the newest state is."""
        self.right = common_prefix(self.states[-1], self.fixed_point)

    @property
    def converged(self) -> bool:
        """Whether the newest state is the fixed point."""
        return self.right == len(self.fixed_point)

    @property
    def finished(self) -> bool:
        """Whether no sweep is left to do."""
        if self.converged or self.wanted is None:
            return self.converged
        return all(is_settled(self.right, len(self.fixed_point), ratio) for ratio in self.wanted)

    @property
    def whole(self) -> list[list[int]]:
        """The states seen, and the fixed point, which is known all along."""
        return self.states if self.converged else [*self.states, list(self.fixed_point)]

    @property
    def first(self) -> int:
        """Slot at which the next line starts."""
        return self.right - (len(self.states) == 1)

    @property
    def width(self) -> int:
        """Slots of the next line; with none the next state follows from what is known."""
        return len(self.fixed_point) - 1 - self.first

    def line(self) -> Line:
        """What the next sweep must compute, see the top of this module."""
        return Line(self.states[-1][self.first : -1], self.start + self.first)

    def advance(self, predictions: Sequence[int]) -> None:
        """Append the state that follows from the predictions at the slots of `line`: slot i predicts slot i + 1.

        What follows the right slots is the response's next token, whatever was predicted: with near ties another may
        come out, or where the response is another model's. Thus each sweep makes one more slot right, at least.
        """
        state = [*self.fixed_point[: self.right + 1], *predictions[self.right - self.first :]]
        self.states.append(state)
        self.right = common_prefix(state, self.fixed_point)


def draw_state(
    fixed_point: Sequence[int], pool: Sequence[int], *, seed: int | str, sample: int, block: int
) -> list[int]:
    """y(0) of a block: slot 0 is right, the others are drawn from `pool`.

    The draw depends on (seed, sample, block) and the pool alone, never on batches or on a restart.
    """
    generator = random.Random(f"{seed}/{sample}/{block}")
    return [fixed_point[0], *generator.choices(pool, k=len(fixed_point) - 1)]


@torch.inference_mode()
def sweep_blocks(
    backbone: Backbone,
    prompts: Sequence[Sequence[int]],
    responses: Sequence[Sequence[int]],
    rows: Sequence[list[Block]],
    contents: Sequence[RowContent] | None = None,
) -> int:
    """Sweep all blocks of some responses, side by side, until each is at its fixed point or has seen what it wants.

    Fills `states` in place.

    Args:
        backbone: The model, in eval mode.
        prompts: Token ids of each row.
        responses: The greedy response of each row.
        rows: The blocks of each response, each with y(0) as its only state.
        contents: Keys and values of each row, the last token's excepted, where they are at hand already.

    Returns:
        Forward passes, those over prompts and responses included.
    """
    # Rows of one length waste nothing on padding; those that need no sweep need no keys and values either.
    order = [row for row, blocks in enumerate(rows) if not all(block.finished for block in blocks)]
    order.sort(key=lambda row: len(responses[row]))
    slots, forwards, budget = 0, 0, _slots(backbone)
    group: list[int] = []
    for row in order:
        width = sum(block.width for block in rows[row])
        if group and slots + width > budget:
            forwards += _sweep_group(backbone, group, prompts, responses, rows, contents)
            group, slots = [], 0
        group.append(row)
        slots += width
    return forwards + (_sweep_group(backbone, group, prompts, responses, rows, contents) if group else 0)


def _slots(backbone: Backbone) -> int:
    """Slots of all rows that one forward should have."""
    return min(LOGITS_PER_FORWARD // backbone.vocab_size, *([CPU_SLOTS] if backbone.device.type == "cpu" else []))


def _sweep_group(
    backbone: Backbone,
    active: list[int],
    prompts: Sequence[Sequence[int]],
    responses: Sequence[Sequence[int]],
    rows: Sequence[list[Block]],
    contents: Sequence[RowContent] | None,
) -> int:
    """`sweep_blocks` for the rows named."""
    if contents is None:
        cache, forwards = _commit_clean(backbone, [[*prompts[row], *responses[row][:-1]] for row in active]), 1
    else:
        cache, forwards = KVCache.of_rows([contents[row] for row in active]), 0
    while True:
        _advance_known(rows[row] for row in active)
        waiting = [[block for block in rows[row] if not block.finished] for row in active]
        places = [place for place, blocks in enumerate(waiting) if blocks]
        if not places:
            return forwards
        if len(places) <= KEEP_ROWS * len(active):
            cache.select_rows(places)
            active, waiting = [active[place] for place in places], [waiting[place] for place in places]
        for page in _pages(waiting, _slots(backbone) // len(active)):
            _sweep_page(backbone, cache, page)
            forwards += 1


def _advance_known(rows: Iterable[list[Block]]) -> None:
    """Where the last slot alone is wrong, the next state is the fixed point: there is nothing to compute."""
    for blocks in rows:
        for block in blocks:
            if not block.finished and not block.width:
                block.advance([])


def _commit_clean(backbone: Backbone, rows: Sequence[list[int]]) -> KVCache:
    """The KV of prompts and responses, committed."""
    cache = backbone.new_cache(len(rows))
    lines = Lines.pack([[Line(ids, 0)] for ids in rows], backbone.device)
    sweep_logits(backbone, cache, lines, keep=torch.tensor([0], device=backbone.device))
    cache.commit([range(len(ids)) for ids in rows])
    return cache


def _pages(rows: Sequence[list[Block]], slots: int) -> Iterator[list[list[Block]]]:
    """Share the blocks out over forward passes of at most `slots` slots per row, or of one block if that is wider."""
    queues = [list(blocks) for blocks in rows]
    while any(queues):
        page: list[list[Block]] = []
        for queue in queues:
            taken, used = 0, 0
            while taken < len(queue) and (taken == 0 or used + queue[taken].width <= slots):
                used += queue[taken].width
                taken += 1
            page.append(queue[:taken])
            del queue[:taken]
        yield page


def _sweep_page(backbone: Backbone, cache: KVCache, page: Sequence[Sequence[Block]]) -> None:
    """One sweep of some blocks of each row; their states grow by one."""
    lines = Lines.pack([[block.line() for block in blocks] for blocks in page], backbone.device)
    logits = sweep_logits(backbone, cache, lines)
    cache.forget()
    for row, predictions in enumerate(logits.argmax(dim=-1).tolist()):
        start = 0
        for block in page[row]:
            end, checked = start + block.width, block.first < block.right
            if checked and predictions[start] != block.fixed_point[block.right]:
                gap = logits[row, start, predictions[start]] - logits[row, start, block.fixed_point[block.right]]
                block.gap, block.drifted = float(gap), True
            block.advance(predictions[start:end])
            start = end
