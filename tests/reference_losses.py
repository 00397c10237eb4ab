"""The losses computed slowly and plainly: one block at a time, by the model's ordinary causal forward.

No packing, no mask, no tags, no chunks. Written from Eq. 8 and 9 alone, and sharing no code with what it is to check.
"""

from __future__ import annotations

import dataclasses
import random

import torch
from torch import Tensor
from torch.distributions import Categorical, kl_divergence
from transformers import PreTrainedModel

from jacobi_forcing.trajectories.store import Trajectory


@dataclasses.dataclass
class Plain:
    """A response as blocks, with one noisy state for each."""

    prompt: list[int]
    noisy: list[list[int]]
    clean: list[list[int]]
    finished: bool


def reference_losses(
    model: PreTrainedModel,
    samples: list[Plain],
    mask: str,
    window_size: int = 1,
    positions: str = "all",
    reduction: str = "block",
    temperature: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """Consistency loss, a mean over blocks or tokens, and AR loss, a mean over response tokens."""
    divergences: list[Tensor] = []
    entropies: list[Tensor] = []
    for sample in samples:
        for index, clean in enumerate(sample.clean):
            window = index // window_size * window_size
            before = {
                "clean_context": sample.clean[:index],
                "noise_conditioned": sample.noisy[:index],
                "noise_conditioned_window": sample.clean[:window] + sample.noisy[window:index],
                "intra_window_clean": sample.noisy[:window] + sample.clean[window:index],
            }[mask]
            student = _logits(model, sample.prompt + _joined(before) + sample.noisy[index])[-len(clean) :]
            with torch.no_grad():
                teacher = _logits(model, sample.prompt + _joined(sample.clean[: index + 1]))[-len(clean) :]
            is_last = index == len(sample.clean) - 1
            slots = len(clean) - 1 if is_last and sample.finished else len(clean)
            first = 0
            if positions == "from_mismatch":
                wrong = [slot for slot, (a, b) in enumerate(zip(sample.noisy[index], clean, strict=True)) if a != b]
                first = wrong[0] if wrong else slots
            if first < slots:
                pair = [Categorical(logits=side[first:slots] / temperature) for side in (teacher, student)]
                of_slots = temperature**2 * kl_divergence(*pair)
                divergences += [of_slots.sum()] if reduction == "block" else list(of_slots)
        text = sample.prompt + _joined(sample.clean)
        logits = _logits(model, text)
        for position in range(len(sample.prompt), len(text)):
            entropies.append(-torch.log_softmax(logits[position - 1], dim=-1)[text[position]])
    return torch.stack(divergences).mean(), torch.stack(entropies).mean()


def _logits(model: PreTrainedModel, ids: list[int]) -> Tensor:
    return model(input_ids=torch.tensor([ids]), use_cache=False).logits[0].float()


def _joined(blocks: list[list[int]]) -> list[int]:
    return [token for block in blocks for token in block]


def random_trajectory(
    sample: int, prompt: int, response: int, block_size: int, *, finished: bool = True, vocab: int = 60
) -> Trajectory:
    """Random ids; slot after slot of each block becomes right; the last token is 60 if finished."""
    rng = random.Random(sample)
    text = [rng.randrange(vocab) for _ in range(response)]
    if finished:
        text[-1] = 60
    states = []
    for start in range(0, response, block_size):
        block = text[start : start + block_size]
        # A wrong token differs from the right one for certain, so the noise ratios are known exactly.
        of_block = [
            block[:right] + [(token + 1 + rng.randrange(vocab - 2)) % vocab for token in block[right:]]
            for right in range(1, len(block))
        ]
        states.append([*of_block, block])
    ids = [rng.randrange(vocab) for _ in range(prompt)]
    return Trajectory(sample, ids, text, finished, block_size, states)
