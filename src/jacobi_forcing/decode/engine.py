"""The loop: propose lines, sweep once, keep what was accepted. Rows finish and leave on their own."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch

from jacobi_forcing.backbone import Backbone
from jacobi_forcing.cache import KVCache
from jacobi_forcing.config import DecodeConfig
from jacobi_forcing.decode.drafts import ROWS, DraftFill, Row
from jacobi_forcing.errors import DataError, ModelError
from jacobi_forcing.sweep import Lines, sweep

OnSweep = Callable[[list[Row]], None]


def make_row(
    backbone: Backbone,
    prompt: Sequence[int],
    config: DecodeConfig,
    eos_ids: Sequence[int],
    max_new_tokens: int,
    vocabulary: Sequence[int] | None = None,
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
    fill = DraftFill(config, prompt, vocabulary)
    return ROWS[config.decoder](prompt, config, eos_ids, max_new_tokens, fill)


@torch.inference_mode()
def sweeps(backbone: Backbone, rows: Sequence[Row]) -> Iterator[tuple[list[Row], KVCache]]:
    """Decode all rows to their end, in place, one sweep a step.

    Args:
        backbone: The model.
        rows: Fresh rows; each progresses at its own speed and leaves the batch when it has finished.

    Yields:
        After every sweep the rows that took part and their cache, row for row: it holds the KV of each row's prompt and
        of its generated tokens but the last, and nothing else.
    """
    active, device = list(rows), backbone.device
    cache = backbone.new_cache(len(active))
    while active:
        lines = Lines.pack([[row.propose()] for row in active], device)
        first = min(row.first_needed for row in active)
        keep = torch.arange(first, lines.ids.shape[1], device=device) if first else None
        # The one place where host and device meet.
        predictions = sweep(backbone, cache, lines, keep).tolist()
        cache.commit(
            [row.absorb(told[row.first_needed - first :]) for row, told in zip(active, predictions, strict=True)]
        )
        yield active, cache
        if any(row.finished for row in active):
            staying = [index for index, row in enumerate(active) if not row.finished]
            active = [active[index] for index in staying]
            if active:
                cache.select_rows(staying)


def run(backbone: Backbone, rows: Sequence[Row], on_sweep: OnSweep | None = None) -> None:
    """Decode all rows to their end, in place.

    Args:
        backbone: The model.
        rows: Fresh rows; see `sweeps`.
        on_sweep: Called after every sweep with the rows that took part.
    """
    for active, _ in sweeps(backbone, rows):
        if on_sweep is not None:
            on_sweep(active)
