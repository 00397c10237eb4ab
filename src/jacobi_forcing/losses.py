"""The progressive consistency loss and the AR loss of packed rows (paper, Eq. 8 and 9).

Both are read off one forward pass. A clean token's logits serve twice: as the teacher of its noisy twin (without
gradient), and as the prediction of the next token (with gradient). Logits are made for the loss positions only, a
chunk at a time, and made again in the backward pass: no tensor of [length, vocabulary] ever exists.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint

from jacobi_forcing.backbone import Backbone
from jacobi_forcing.config import LossPositions, LossReduction
from jacobi_forcing.errors import ConfigError
from jacobi_forcing.tags import Kind, Tags

NO_TARGET = -100


class LossItems(NamedTuple):
    """The M loss positions of packed rows [R, L]; slots are counted through all rows, row * L + column.

    Attributes:
        query: Slots of clean tokens, and of the last token of each prompt [M].
        student: The slot of the noisy twin; the query's own where it has none [M].
        target: Id of the response token that follows, or NO_TARGET [M].
        has_student: Whether the position counts in the consistency loss [M].
        blocks: Number of blocks with such a position, or of such positions where the loss is a mean over tokens [].
        targets: Number of positions that count in the AR loss [].
    """

    query: Tensor
    student: Tensor
    target: Tensor
    has_student: Tensor
    blocks: Tensor
    targets: Tensor


class Losses(NamedTuple):
    """Scalars: `total` = `consistency` + weight * `ar` (Eq. 9)."""

    total: Tensor
    consistency: Tensor
    ar: Tensor


def loss_items(
    ids: Tensor, tags: Tags, positions: LossPositions = "all", reduction: LossReduction = "block"
) -> LossItems:
    """Find the loss positions, from the tags alone.

    Where a finished response ends there is nothing to predict, so that slot is in neither loss. The last slot of any
    other block is in: it predicts the first token of the next block. In an unfinished or cut response the last slot
    has a teacher, but no target.

    Args:
        ids: Token ids [R, L].
        tags: Their tags, each [R, L].
        positions: Which slots of a noisy block count in the consistency loss: all, or those from its first wrong token
            on (as in the authors' release); then a block without one teaches nothing.
        reduction: What the consistency loss is averaged over: blocks (Eq. 8) or tokens.

    Returns:
        The positions, in the order of the rows.
    """
    rows = torch.arange(len(ids), device=ids.device)[:, None]
    # One number per (row, sample, position); a step further is the next position, and never another sample's.
    samples, stride = tags.sample.max() + 1, tags.position.max() + 2
    key = ((rows * samples + tags.sample) * stride + tags.position).flatten()
    kind, ends, flat_ids = tags.kind.flatten(), tags.ends.flatten(), ids.flatten()
    clean, noisy = (kind == Kind.CLEAN).nonzero().flatten(), (kind == Kind.NOISY).nonzero().flatten()
    query = ((kind == Kind.CLEAN) | (kind == Kind.PROMPT)).nonzero().flatten()
    twin = _find(key, noisy, key[query])
    following = _find(key, clean, key[query] + 1)
    if positions == "from_mismatch":
        twin = torch.where(_has_gone_wrong(flat_ids, tags, query, twin), twin, -1)
    has_student = (twin >= 0) & (ends[query] == 0)
    has_target = following >= 0
    kept = has_student | has_target
    return LossItems(
        query=query[kept],
        student=torch.where(has_student, twin, query)[kept],
        target=torch.where(has_target, flat_ids[following], NO_TARGET)[kept],
        has_student=has_student[kept],
        blocks=has_student.sum() if reduction == "token" else _blocks(tags, rows, query[has_student]),
        targets=has_target.sum(),
    )


def _blocks(tags: Tags, rows: Tensor, slots: Tensor) -> Tensor:
    """How many different blocks some slots lie in []."""
    columns = (rows.expand_as(tags.sample), tags.sample, tags.block)
    different = torch.stack([column.flatten()[slots] for column in columns]).unique(dim=1)
    return torch.tensor(different.shape[1], device=slots.device)


def _has_gone_wrong(ids: Tensor, tags: Tags, query: Tensor, twin: Tensor) -> Tensor:
    """Whether the noisy block of each query's twin has a wrong token up to there."""
    # Clean tokens of a block lie side by side and in order, so wrong ones can be counted along them.
    wrong = ((twin >= 0) & (ids[twin] != ids[query])).long().cumsum(0)
    offset = tags.offset.flatten()[query].clamp(min=0)
    place = torch.arange(len(query), device=query.device)
    before = place - offset - 1
    return wrong - torch.where(before >= 0, wrong[before.clamp(min=0)], 0) > 0


def _find(key: Tensor, slots: Tensor, wanted: Tensor) -> Tensor:
    """For each wanted key, the slot among `slots` that has it, or -1."""
    if not len(slots):
        return torch.full_like(wanted, -1)
    sorted_keys, order = key[slots].sort()
    place = torch.searchsorted(sorted_keys, wanted).clamp(max=len(slots) - 1)
    return torch.where(sorted_keys[place] == wanted, slots[order[place]], -1)


def position_losses(
    backbone: Backbone, hidden: Tensor, items: LossItems, chunk_size: int = 512, temperature: float = 1.0
) -> tuple[Tensor, Tensor]:
    """What each loss position adds to the two losses.

    Args:
        backbone: The model whose head turns hidden states into logits.
        hidden: Final hidden states [R, L, H] of the packed rows.
        items: From `loss_items`.
        chunk_size: Positions whose logits exist at the same time; 2 * chunk_size * V values.
        temperature: T. Teacher and student are compared at logits / T, and the result is multiplied by T squared, so
            that gradients keep their size (Hinton et al. 2015); the paper's is 1.

    Returns:
        KL(teacher || student) and the cross-entropy of the next token, each [M], float32, 0 where a position does not
        count.

    Raises:
        ConfigError: The chunk size is below 1, or the temperature not above 0.
    """
    if temperature <= 0:
        raise ConfigError("The temperature of the loss is too small", seen=temperature, expected="more than 0")
    if chunk_size < 1:
        raise ConfigError("The chunk of logits is too small", seen=chunk_size, expected="at least 1 position")

    def of_chunk(teacher: Tensor, student: Tensor, target: Tensor, has_student: Tensor) -> tuple[Tensor, Tensor]:
        clean = backbone.logits(teacher).float()
        noisy = (backbone.logits(student).float() / temperature).log_softmax(dim=-1)
        goal = (clean.detach() / temperature).log_softmax(dim=-1)
        divergence = temperature**2 * (goal.exp() * (goal - noisy)).sum(dim=-1)
        return divergence * has_student, cross_entropy(clean, target, ignore_index=NO_TARGET, reduction="none")

    flat = hidden.flatten(0, 1)
    # Gathered before the split: a gather per chunk would have the backward pass fill [R * L, H] once per chunk.
    columns = (flat[items.query], flat[items.student], items.target, items.has_student)
    parts = []
    for chunk in zip(*(column.split(chunk_size) for column in columns), strict=True):
        if torch.is_grad_enabled():
            parts.append(checkpoint(of_chunk, *chunk, use_reentrant=False, preserve_rng_state=False))
        else:
            parts.append(of_chunk(*chunk))
    if not parts:
        nothing = hidden.new_zeros(0, dtype=torch.float32)
        return nothing, nothing
    divergences, entropies = zip(*parts, strict=True)
    return torch.cat(divergences), torch.cat(entropies)


def reduce_losses(
    divergence: Tensor, entropy: Tensor, *, blocks: Tensor | int, targets: Tensor | int, ar_weight: float
) -> Losses:
    """The one place where values of positions become a loss.

    KL is summed over positions and divided by the number of blocks (Eq. 8) or of positions, cross-entropy is averaged
    over target tokens. The counts may be those of a larger batch that these positions are a part of: losses of the
    parts then add up to the loss of the whole, and so do their gradients.

    Args:
        divergence: From `position_losses` [M].
        entropy: From `position_losses` [M].
        blocks: Blocks, or positions, to average over.
        targets: Target tokens to average over.
        ar_weight: w of Eq. 9.
    """
    consistency = divergence.sum() / max(int(blocks), 1)
    ar = entropy.sum() / max(int(targets), 1)
    return Losses(consistency + ar_weight * ar, consistency, ar)
