"""Where two greedy answers part, and whether rounding alone can explain it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch

from jacobi_forcing.backbone import Backbone
from jacobi_forcing.blocks import common_prefix
from jacobi_forcing.sweep import Line, Lines, sweep_logits
from jacobi_forcing.trajectories.collect import NEAR_TIE
from jacobi_forcing.trajectories.prompts import Prompt


@dataclasses.dataclass(frozen=True)
class Mismatch:
    """The first difference between an answer and its reference.

    Attributes:
        prompt: Index of the prompt in its source.
        position: Index in the answer of the first token that differs.
        gap: Distance between the two tokens' logits, after the tokens that both agree on; None where one answer is a
            prefix of the other.
        near_tie: Whether the gap is one that rounding in this dtype explains.
    """

    prompt: int
    position: int
    gap: float | None
    near_tie: bool

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return dataclasses.asdict(self)


@torch.inference_mode()
def find_mismatch(
    backbone: Backbone, prompt: Prompt, answer: Sequence[int], reference: Sequence[int]
) -> Mismatch | None:
    """The first difference, or None where the answers are the same, token for token."""
    if list(answer) == list(reference):
        return None
    position = common_prefix(answer, reference)
    if position >= min(len(answer), len(reference)):
        return Mismatch(prompt.index, position, None, False)
    text = [*prompt.ids, *answer[:position]]
    keep = torch.tensor([len(text) - 1], device=backbone.device)
    lines = Lines.pack([[Line(text, 0)]], backbone.device)
    logits = sweep_logits(backbone, backbone.new_cache(), lines, keep)[0, 0].float()
    gap = float((logits[answer[position]] - logits[reference[position]]).abs())
    return Mismatch(prompt.index, position, gap, gap <= NEAR_TIE.get(backbone.dtype, max(NEAR_TIE.values())))
