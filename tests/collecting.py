"""What the tests of collecting share: prompts, a collection of them, and the slow and obvious way to its result."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from jacobi_forcing.backbone import Backbone
from jacobi_forcing.config import CollectConfig
from jacobi_forcing.trajectories.collect import collect
from jacobi_forcing.trajectories.prompts import Prompt
from jacobi_forcing.trajectories.report import CollectReport
from jacobi_forcing.trajectories.store import Trajectory, TrajectoryReader
from tiny_models import VOCAB

N = 4


def some_prompts(lengths: Sequence[int], seed: int = 0) -> list[Prompt]:
    generator = random.Random(seed)
    return [Prompt(i, "", [generator.randrange(VOCAB) for _ in range(length)]) for i, length in enumerate(lengths)]


PROMPTS = some_prompts([7, 3, 40, 11, 5])


def run(model: PreTrainedModel, folder: Path, prompts: Sequence[Prompt] = PROMPTS, **changes: Any) -> CollectReport:
    names = (
        "block_size",
        "eos_ids",
        "vocabulary",
        "provenance",
        "on_progress",
        "states",
        "needed",
        "given",
        "filters",
        "make_backbone",
    )
    keywords: dict[str, Any] = {"block_size": N, **{name: changes.pop(name) for name in names if name in changes}}
    settings: dict[str, Any] = {"max_new_tokens": 14, "batch_size": 3, "shard_size": 4, **changes}
    return collect(Backbone(model), prompts, folder=folder, config=CollectConfig(**settings), **keywords)


def collected(model: PreTrainedModel, folder: Path, *args: Any, **changes: Any) -> list[Trajectory]:
    run(model, folder, *args, **changes)
    return list(TrajectoryReader(folder))


def shards(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name != "manifest.json"}


@torch.no_grad()
def next_tokens(model: PreTrainedModel, ids: Sequence[int]) -> list[int]:
    """The greedy next token after every prefix: one plain forward, no cache, no mask, no batch."""
    return model(torch.tensor([list(ids)]), use_cache=False).logits[0].argmax(dim=-1).tolist()


def plain_response(model: PreTrainedModel, prompt: Sequence[int], limit: int, eos_ids: Sequence[int] = ()) -> list[int]:
    text = list(prompt)
    for _ in range(limit):
        text.append(next_tokens(model, text)[-1])
        if text[-1] in eos_ids:
            break
    return text[len(prompt) :]


def plain_states(model: PreTrainedModel, context: Sequence[int], first: Sequence[int]) -> list[list[int]]:
    """One block alone: sweep the whole of it until it no longer changes."""
    states = [list(first)]
    while True:
        predicted = next_tokens(model, [*context, *states[-1]])[len(context) : -1]
        state = [states[-1][0], *predicted]
        if state == states[-1]:
            return states
        states.append(state)


def assert_plain(model: PreTrainedModel, trajectory: Trajectory) -> None:
    for block, states in enumerate(trajectory.states):
        context = [*trajectory.prompt_ids, *trajectory.response_ids[: block * N]]
        assert states == plain_states(model, context, states[0])
