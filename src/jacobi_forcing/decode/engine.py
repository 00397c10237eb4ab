"""The loop: propose lines, sweep once, keep the best line. Rows finish and leave on their own."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from jacobi_forcing.backbone import Backbone
from jacobi_forcing.cache import KVCache
from jacobi_forcing.config import DecodeConfig
from jacobi_forcing.decode.drafts import DraftFill
from jacobi_forcing.decode.multiblock import MultiblockRow
from jacobi_forcing.decode.ngrams import NgramPool
from jacobi_forcing.decode.rows import JacobiRow, RecycleRow, Row, Stop, WindowRow
from jacobi_forcing.errors import DataError, ModelError
from jacobi_forcing.sweep import Line, Lines, sweep_logits

ROWS: dict[str, type[Row]] = {
    "ar": Row,
    "jacobi": JacobiRow,
    "window": WindowRow,
    "recycle": RecycleRow,
    "multiblock": MultiblockRow,
}
CAPACITY_STEP = 256
"""Fixed buffers hold a multiple of this many slots, so that calls of similar length share their shapes."""

OnSweep = Callable[[list[Row]], None]


class Chosen(NamedTuple):
    """The next token at every slot.

    Attributes:
        ids: [R, k].
        sure: How clearly each was chosen, float [R, k] from 0 to 1; None where nothing asks for it, because no line is
            gated.
    """

    ids: Tensor
    sure: Tensor | None = None

    @classmethod
    def of(cls, scores: Tensor, lines: Sequence[Sequence[Line]]) -> Chosen:
        """The highest score of each slot [R, k, V] and, of greedy scores, its probability."""
        if not any(line.gated for row in lines for line in row):
            return cls(scores.argmax(dim=-1))
        best = scores.max(dim=-1)
        # Where processors have banned every token there is nothing to be sure of.
        return cls(best.indices, (best.values - scores.logsumexp(dim=-1)).exp().nan_to_num(nan=0.0))


Choose = Callable[[Tensor, Sequence[Row], Sequence[Sequence[Line]], int], Chosen]
"""The next token at every slot, of (logits [R, k, V], rows, their lines, first slot that has logits)."""


def greedy(logits: Tensor, rows: Sequence[Row], lines: Sequence[Sequence[Line]], first: int) -> Chosen:
    """The most probable token at every slot."""
    return Chosen.of(logits, lines)


def make_row(
    backbone: Backbone,
    prompt: Sequence[int],
    config: DecodeConfig,
    eos_ids: Sequence[int],
    max_new_tokens: int,
    vocabulary: Sequence[int] | None = None,
    stop: Stop | None = None,
) -> Row:
    """Check one prompt and build its state machine.

    Raises:
        DataError: The prompt is empty.
        ModelError: Prompt and budget pass the model's context.
    """
    if not prompt:
        raise DataError("The prompt is empty", expected="at least one token")
    limit = backbone.context_length
    if limit is not None and len(prompt) >= limit:
        raise ModelError(
            "The prompt is longer than the model's context",
            seen=f"{len(prompt)} tokens",
            expected=f"fewer than {limit}",
            remedy="shorten it",
        )
    if limit is not None and len(prompt) + max_new_tokens > limit:
        raise ModelError(
            "Prompt and max_new_tokens together pass the model's context",
            seen=f"{len(prompt)} + {max_new_tokens} tokens",
            expected=f"at most {limit}",
            remedy=f"use max_new_tokens={limit - len(prompt)} or less",
        )
    boundary = backbone.rope_boundary
    if boundary is not None and len(prompt) <= boundary < len(prompt) + max_new_tokens:
        raise ModelError(
            "The text would pass the length at which this model's LongRoPE changes",
            seen=f"{len(prompt)} + {max_new_tokens} tokens",
            expected=f"at most {boundary} tokens in all, or a prompt that is longer",
            remedy=f"use max_new_tokens={boundary - len(prompt)} or less" if len(prompt) < boundary else None,
        )
    decoder = ROWS[config.decoder]
    recycles = decoder.recycles and config.candidates > 0
    pool = NgramPool() if recycles or config.draft_init == "pool" else None
    fill = DraftFill(config, prompt, vocabulary, pool)
    row = decoder(prompt, config, eos_ids, max_new_tokens, fill, pool, stop)
    row.drafts_apart = backbone.adapter is not None
    return row


@torch.inference_mode()
def sweeps(backbone: Backbone, rows: Sequence[Row], choose: Choose = greedy) -> Iterator[tuple[list[Row], KVCache]]:
    """Decode all rows to their end, in place, one sweep a step.

    Args:
        backbone: The model.
        rows: Fresh rows with the same settings; each progresses at its own speed and leaves the batch when it has
            finished. With `static_shapes` it stays, empty, until half of the rows have, so that the number of shapes is
            small.
        choose: Makes the next token at every slot out of the logits; it must depend on a slot's own prefix alone.

    Yields:
        After every sweep the rows of the batch and their cache, row for row: it holds the KV of each row's prompt and
        of its generated tokens but the last, and nothing else.
    """
    _refuse_mixed(backbone, rows)
    seats, device = list(rows), backbone.device
    shapes = _Shapes(rows) if rows and rows[0].config.static_shapes else None
    cache = backbone.new_cache(len(seats), shapes.capacity if shapes else None)
    while seats:
        proposed = [[] if row.finished else row.propose() for row in seats]
        slots = max(sum(len(line.ids) for line in lines) for lines in proposed)
        lines = Lines.pack(proposed, device, shapes.slots(slots) if shapes else slots)
        first = min(row.first_needed for row in seats if not row.finished)
        if shapes:
            first, count = shapes.kept(first, slots, lines.ids.shape[1])
        else:
            count = slots - first
        keep = torch.arange(first, first + count, device=device) if count < lines.ids.shape[1] else None
        chosen = choose(sweep_logits(backbone, cache, lines, keep), seats, proposed, first)
        # The one place where host and device meet.
        predictions, sure = _fetched(chosen)
        cache.commit(
            [
                row.absorb(told[row.first_needed - first :], of[row.first_needed - first :]) if not row.finished else ()
                for row, told, of in zip(seats, predictions, sure, strict=True)
            ]
        )
        yield seats, cache
        staying = [index for index, row in enumerate(seats) if not row.finished]
        if len(staying) < len(seats) and (shapes is None or len(staying) <= len(seats) // 2):
            seats = [seats[index] for index in staying]
            if seats:
                cache.select_rows(staying)


def run(backbone: Backbone, rows: Sequence[Row], on_sweep: OnSweep | None = None, choose: Choose = greedy) -> None:
    """Decode all rows to their end, in place.

    Args:
        backbone: The model.
        rows: Fresh rows; see `sweeps`.
        on_sweep: Called after every sweep with the rows of the batch.
        choose: See `sweeps`.
    """
    for seats, _ in sweeps(backbone, rows, choose):
        if on_sweep is not None:
            on_sweep(seats)


def _fetched(chosen: Chosen) -> tuple[list[list[int]], list[list[float]]]:
    """As lists, by one copy: a float64 holds every id."""
    if chosen.sure is None:
        ids = chosen.ids.tolist()
        return ids, [[]] * len(ids)
    both = torch.stack([chosen.ids.double(), chosen.sure.double()]).tolist()
    return [[int(token) for token in row] for row in both[0]], both[1]


def _refuse_mixed(backbone: Backbone, rows: Sequence[Row]) -> None:
    """Rows on both sides of a LongRoPE boundary would be computed alike, and one side wrong."""
    boundary = backbone.rope_boundary
    if boundary is not None and len({row.prompt_length > boundary for row in rows}) > 1:
        raise ModelError(
            "Prompts on both sides of the length at which this model's LongRoPE changes share a batch",
            expected=f"all up to {boundary} tokens, or all longer",
            remedy="decode them in two batches",
        )


class _Shapes:
    """The few sizes that sweeps are padded to when no shape may change from step to step.

    Powers of two, not below what one draft takes; and room for the longest text and the widest sweep behind it.
    """

    def __init__(self, rows: Sequence[Row]) -> None:
        config = rows[0].config
        # No more is ever in flight than the budget allows.
        budget = max(row.max_new_tokens for row in rows)
        draft = 1 if config.decoder == "ar" else min(config.block_size, budget)
        blocks = min(config.num_blocks, -(-budget // draft) + 1) if config.decoder == "multiblock" else 1
        lines = 1 + (config.candidates if rows[0].recycles else 0)
        self._least = _power_of_two(draft)
        apart = (1 + draft * blocks) if rows[0].drafts_apart else 0
        widest = self.slots(draft * blocks + (lines - 1) * (draft + 1) + apart)
        longest = max(row.prompt_length + row.max_new_tokens for row in rows)
        prefill = self.slots(max(row.prompt_length for row in rows) + draft * blocks + apart)
        self.capacity = -(-max(longest + widest, prefill) // CAPACITY_STEP) * CAPACITY_STEP

    def slots(self, needed: int) -> int:
        """The size that a sweep of this many slots is padded to."""
        return max(self._least, _power_of_two(needed))

    def kept(self, first: int, needed: int, slots: int) -> tuple[int, int]:
        """The first column whose logits are made and their number, where those from `first` to `needed` are wanted."""
        if not first:
            return 0, slots
        count = min(_power_of_two(needed - first), slots)
        return min(first, slots - count), count


def _power_of_two(number: int) -> int:
    return 1 << max(number - 1, 0).bit_length()
