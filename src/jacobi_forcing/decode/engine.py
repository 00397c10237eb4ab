"""The loop: propose lines, sweep once, keep what was accepted. Rows finish and leave on their own."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from jacobi_forcing.backbone import Backbone
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
def run(backbone: Backbone, rows: Sequence[Row], on_sweep: OnSweep | None = None) -> None:
    """Decode all rows to their end, in place.

    Args:
        backbone: The model.
        rows: Fresh rows; each progresses at its own speed and leaves the batch when it has finished.
        on_sweep: Called after every sweep with the rows that took part.
    """
    active = list(rows)
    cache = backbone.new_cache(len(active))
    while active:
        proposals = [row.propose() for row in active]
        lines = Lines.pack([[line] for line in proposals], backbone.device)
        first = min(row.first_needed for row in active)
        width = lines.ids.shape[1]
        keep = torch.arange(first, width, device=backbone.device) if first else None
        predictions = sweep(backbone, cache, lines, keep).tolist()
        kept = []
        for row, predicted in zip(active, predictions, strict=True):
            kept.append(row.absorb(predicted[row.first_needed - first :]))
        if on_sweep is not None:
            on_sweep(active)
        if all(row.finished for row in active):
            break
        cache.commit(kept)
        staying = [index for index, row in enumerate(active) if not row.finished]
        if len(staying) < len(active):
            cache.select_rows(staying)
            active = [active[index] for index in staying]
