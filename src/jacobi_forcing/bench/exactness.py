"""Where an answer parts from its reference, and whether rounding explains it or the decoder is at fault.

The model itself is asked: one forward over the prompt and the answer, on its own, says at every place how far the
answer's token lies below the top logit. Two texts may part at a *near tie*: both tokens then lie within the dtype's
tolerance of the top. From there on the texts have nothing in common, but the answer must still be the model's own: each
of its later tokens has to be within the tolerance too. Anything else is a fault.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from jacobi_forcing.backbone import Backbone
from jacobi_forcing.blocks import common_prefix, first_eos
from jacobi_forcing.sweep import Line, Lines, sweep_logits
from jacobi_forcing.trajectories.collector import near_tie
from jacobi_forcing.trajectories.prompts import Prompt


@dataclasses.dataclass(frozen=True)
class Mismatch:
    """An answer that is not its reference, token for token.

    Attributes:
        prompt: Index of the prompt in its source.
        position: Index in the answer of the first token that differs; of the first one that the model does not back
            where that comes after a near tie.
        gap: How far below the top logit the lower of the two tokens lies there, or the answer's own token where the
            reference has none in common with it; None where one text ends and the other goes on.
        near_tie: Whether rounding in this dtype explains the difference. If not, it is a fault of the decoder.
    """

    prompt: int
    position: int
    gap: float | None
    near_tie: bool

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return dataclasses.asdict(self)


def tolerance(dtype: torch.dtype) -> float:
    """Largest distance between two logits that rounding alone explains, for weights of this dtype."""
    return near_tie(dtype)


def find_mismatch(
    backbone: Backbone, prompt: Prompt, answer: Sequence[int], reference: Sequence[int], limit: int | None = None
) -> Mismatch | None:
    """Examine an answer; None where it is its reference, token for token.

    An end token is a token like any other: where one text ends with it and the other goes on, the two tokens at that
    place are compared. A text that ends without one, or goes on behind one, is a fault whatever the logits say.

    Args:
        backbone: The model that both texts are greedy texts of.
        prompt: What they answer.
        answer: Ids of the decoder in question, without the prompt, the end token included.
        reference: Ids to compare with.
        limit: Most tokens that both were allowed; a text that has no end token must have as many. None: not checked.
    """
    if list(answer) == list(reference):
        return None
    place = common_prefix(answer, reference)
    if place >= min(len(answer), len(reference)):
        return Mismatch(prompt.index, place, None, False)
    end = _wrong_end(answer, backbone.eos_ids, limit)
    if end is not None:
        return Mismatch(prompt.index, end, None, False)
    below, other = _below_top(backbone, prompt.ids, answer, place, reference[place])
    most = tolerance(backbone.dtype)
    gap = max(below[0], other)
    if gap > most:
        return Mismatch(prompt.index, place, gap, False)
    behind = next((step for step, distance in enumerate(below) if distance > most), None)
    if behind is not None:
        return Mismatch(prompt.index, place + behind, below[behind], False)
    return Mismatch(prompt.index, place, gap, True)


def _wrong_end(answer: Sequence[int], eos_ids: Sequence[int], limit: int | None) -> int | None:
    """Where a text goes on although it has ended, or ends although it had to go on; None where it does neither."""
    end = first_eos(answer, eos_ids)
    if end is not None:
        return end + 1 if end + 1 < len(answer) else None
    return None if limit is None or len(answer) == limit else min(len(answer), limit)


@torch.inference_mode()
def _below_top(
    backbone: Backbone, prompt: Sequence[int], answer: Sequence[int], place: int, other: int
) -> tuple[list[float], float]:
    """How far below the top logit the answer's tokens lie from `place` on, and another token at `place`."""
    text = [*prompt, *answer[:-1]]
    keep = torch.arange(len(prompt) + place - 1, len(text), device=backbone.device)
    lines = Lines.pack([[Line(text, 0)]], backbone.device)
    logits = sweep_logits(backbone, backbone.new_cache(), lines, keep)[0]
    top = logits.amax(dim=-1).float()
    tokens = torch.tensor(answer[place:], device=backbone.device)
    distances: Tensor = top - logits.gather(1, tokens[:, None])[:, 0].float()
    return distances.tolist(), float(top[0] - logits[0, other].float())
