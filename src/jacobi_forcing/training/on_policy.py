"""Noisy blocks made by the model that trains, while it trains.

Stored trajectories grow stale as the model changes (section 3.1 of the paper regenerates them between rounds). Here a
batch comes with random drafts in the place of noisy blocks, and the model as it stands sweeps them, without gradient,
until each has the noise ratio that the schedule asks for. The responses stay those on disk.

All blocks of all samples of a batch sweep side by side, each on its clean prefix, by the code that collects.
"""

from __future__ import annotations

import dataclasses
import time

import torch
from torch import Tensor

from jacobi_forcing.backbone import Backbone
from jacobi_forcing.schedule import nearest_state, noise_ratios
from jacobi_forcing.tags import Kind, Tags
from jacobi_forcing.trajectories.states import Block, sweep_blocks


@dataclasses.dataclass
class StateCounts:
    """What making states has cost.

    Attributes:
        forwards: Forward passes, those over prompts and responses included.
        sweeps: Sweeps of single blocks.
        blocks: Blocks that were swept.
        drifted: Those of them in which the model, reading a right prefix, would have gone on otherwise than the
            response does: the model has moved away from the texts that it is trained on.
        seconds: Wall time.
    """

    forwards: int = 0
    sweeps: int = 0
    blocks: int = 0
    drifted: int = 0
    seconds: float = 0.0


@dataclasses.dataclass
class _Place:
    """One sample of a batch: its text, its blocks, and the slots of their noisy tokens."""

    row: int
    prompt: list[int]
    response: list[int]
    blocks: list[Block]
    slots: list[slice]


def make_states(backbone: Backbone, batch: dict[str, Tensor]) -> tuple[dict[str, Tensor], StateCounts]:
    """Sweep the drafts of a batch to the noise ratios that are wanted.

    A state depends on its sample's text, draft and wanted ratio, and on the model: in fp32 not on the batch.

    Args:
        backbone: The model; it is in eval mode while it sweeps, and in the mode it was in afterwards.
        batch: From `Collator`: `input_ids` [R, L] with y(0) in the noisy blocks, `tags` [R, 7, L], `wanted` [blocks].

    Returns:
        The batch with the chosen states in `input_ids` and their ratios in `noise_ratios`, and what it cost.
    """
    started = time.perf_counter()
    places = _places(batch)
    training = backbone.model.training
    backbone.model.eval()
    forwards = sweep_blocks(
        backbone, [p.prompt for p in places], [p.response for p in places], [p.blocks for p in places]
    )
    backbone.model.train(training)
    counts = StateCounts(forwards)
    ids, ratios = batch["input_ids"].clone(), []
    for place in places:
        for block, slots in zip(place.blocks, place.slots, strict=True):
            assert block.wanted is not None
            of_block = noise_ratios(block.whole)
            pick = nearest_state(of_block, block.wanted[0])
            ids[place.row, slots] = torch.tensor(block.whole[pick], device=ids.device)
            ratios.append(of_block[pick])
            counts.sweeps += len(block.states) - 1
            counts.blocks += len(block.states) > 1
            counts.drifted += block.drifted
    counts.seconds = time.perf_counter() - started
    return {**batch, "input_ids": ids, "noise_ratios": torch.tensor(ratios)}, counts


def _places(batch: dict[str, Tensor]) -> list[_Place]:
    """The samples of a batch, in the order in which `wanted` counts their blocks."""
    wanted = iter(batch["wanted"].tolist())
    places = []
    for row, (ids, table) in enumerate(zip(batch["input_ids"].cpu(), batch["tags"].cpu(), strict=True)):
        tags = Tags.of(table)
        for sample in range(int(tags.sample.max()) + 1):
            mine = tags.sample == sample
            clean, noisy = mine & (tags.kind == Kind.CLEAN), mine & (tags.kind == Kind.NOISY)
            prompt, response = ids[mine & (tags.kind == Kind.PROMPT)].tolist(), ids[clean].tolist()
            blocks, slots, offset = [], [], 0
            for index in range(int(tags.block[mine].max()) + 1):
                # The tokens of a block lie side by side and in order.
                here = (noisy & (tags.block == index)).nonzero().flatten()
                slots.append(slice(int(here[0]), int(here[-1]) + 1))
                draft = ids[here].tolist()
                fixed_point = response[offset : offset + len(draft)]
                blocks.append(Block(len(prompt) + offset, fixed_point, [draft], wanted=(next(wanted),)))
                offset += len(draft)
            places.append(_Place(row, prompt, response, blocks, slots))
    return places
