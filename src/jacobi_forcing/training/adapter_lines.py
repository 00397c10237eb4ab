"""Draft lines of a gated adapter: their states on the fly, and the loss that teaches the adapter to be the base.

The base runs once over prompt and response, gate closed and without gradient: its KV is what every line stands on, its
hidden states are the teacher. Any number of *lines* of n slots shares that forward. A line starts at some position of
the text and sees the clean KV before that position and itself, as a draft line does in decoding::

    clean KV     P0 P1 P2 r0 r1 r2 r3 r4 r5 r6 r7                      gate closed, once
    line at P2            P2 x  x  x                 sees P0 P1         gate open
    line at r3                        r3 x  x  x     sees P0 .. r2      gate open

What fills the slots behind the first is what decoding would have there after some sweeps: random prompt tokens at
first, then the adapter's own predictions, moved on by what the base has accepted. What the base accepts needs no base:
it is where the guesses agree with the response.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import Cache
from transformers.cache_utils import DynamicLayer

from jacobi_forcing.adapter import GatedAdapter
from jacobi_forcing.backbone import Backbone


class State(NamedTuple):
    """K lines of each of R rows, all at their current state.

    Attributes:
        start: Position of slot 0 in its row's text [R, K]; the text's last position once a line has met the end.
        ids: Token ids [R, K, n]; slot 0 is right, the others are guesses.
    """

    start: Tensor
    ids: Tensor

    def first(self, count: int) -> State:
        """The first `count` lines of each row."""
        return State(self.start[:, :count], self.ids[:, :count])


class Texts(NamedTuple):
    """R texts, each a prompt and its greedy response, padded on the right.

    Attributes:
        ids: [R, P].
        last: Position of the last token [R].
        taught: Last position that has something to teach [R]: nothing follows where a finished response ends.
    """

    ids: Tensor
    last: Tensor
    taught: Tensor

    def right(self, state: State) -> Tensor:
        """How many guesses of each line agree with the text before the first that does not [R, K]."""
        positions = _positions(state)[..., 1:]
        agrees = (state.ids[..., 1:] == self.at(positions)) & (positions <= self.last[:, None, None])
        return agrees.long().cumprod(dim=-1).sum(dim=-1)

    def gains(self, state: State) -> Tensor:
        """Tokens that each line's next sweep commits [R, K]: the right guesses and one more, but none past the end."""
        return torch.minimum(self.right(state) + 1, self.last[:, None] - state.start)

    def advance(self, state: State, predictions: Tensor, fill: Tensor) -> State:
        """The lines after one sweep, as the running window moves them.

        The line starts anew at the last token that is known then. The predictions made behind it are the next guesses,
        and new ones come in at the far end.

        Args:
            state: The lines that were swept.
            predictions: The adapter's next token at each slot [R, K, n].
            fill: New guesses [R, K, n]; which of them are used depends on how far the line moves.
        """
        right, slots = self.right(state), state.ids.shape[-1]
        source = right[..., None] + torch.arange(slots, device=right.device)
        kept = predictions.gather(-1, source.clamp(max=slots - 1))
        start = state.start + self.gains(state)
        ids = torch.where(source < slots, kept, fill)
        return State(start, torch.cat([self.at(start)[..., None], ids[..., 1:]], dim=-1))

    def at(self, positions: Tensor) -> Tensor:
        """Tokens at positions [R, ...] of the rows; past the end of the padding, whatever is there."""
        flat = positions.flatten(1).clamp(max=self.ids.shape[1] - 1)
        return self.ids.gather(1, flat).view_as(positions)

    def counts(self, state: State) -> Tensor:
        """Which slots may enter a loss, bool [R, K, n]: none past the end, none of a line that has met it."""
        alive = state.start < self.last[:, None]
        return alive[..., None] & (_positions(state) <= self.taught[:, None, None])


class CleanPass:
    """The base over some texts, once: its KV for any number of forwards of lines, its hidden states as the teacher.

    Args:
        backbone: The base, in eval mode.
        texts: Prompts and responses.
    """

    def __init__(self, backbone: Backbone, texts: Texts) -> None:
        self.backbone = backbone
        ids = texts.ids
        rows, width = ids.shape
        self._columns = torch.arange(width, device=ids.device).expand(rows, -1)
        cache = Cache(layer_class_to_replicate=DynamicLayer)
        with torch.no_grad():
            # No token sees what is behind it, so the padding on the right needs no mask.
            causal = (self._columns[:1, :, None] >= self._columns[:1, None, :]).expand(rows, -1, -1)
            mask = backbone.attention_mask(causal, self._columns, self._columns)
            self.hidden = backbone.hidden(ids, self._columns, mask, cache)
        layers: list[Any] = cache.layers  # the library's annotations allow for layers of other kinds
        self._kv: list[Any] = [(layer.keys, layer.values) for layer in layers]

    def lines(self, adapter: GatedAdapter, state: State) -> Tensor:
        """Final hidden states [R, K, n, H] of the lines, gate open; gradients flow to the adapter."""
        rows, count, slots = state.ids.shape
        width = self._columns.shape[1]
        # Guesses past the end of the longest text are in no loss; they must only have a position that exists.
        positions = _positions(state).clamp(max=width - 1).flatten(1)
        slot = torch.arange(count * slots, device=state.ids.device)
        same = slot[:, None] // slots == slot[None] // slots
        own = (same & (slot[:, None] >= slot[None])).expand(rows, -1, -1)
        before = self._columns[:, None, :] < state.start.repeat_interleave(slots, dim=1)[:, :, None]
        mask = self.backbone.attention_mask(
            torch.cat([before, own], dim=-1), positions, torch.cat([self._columns, positions], dim=-1)
        )
        cache = Cache(layers=[_CleanLayer(keys, values) for keys, values in self._kv])
        with adapter.gated():
            hidden = self.backbone.hidden(state.ids.flatten(1), positions, mask, cache)
        return hidden.view(rows, count, slots, -1)

    def teacher(self, state: State) -> Tensor:
        """Hidden states of the base at the positions of the slots [R, K, n, H]."""
        positions = _positions(state).clamp(max=self._columns.shape[1] - 1)
        rows = torch.arange(len(positions), device=positions.device)[:, None, None]
        return self.hidden[rows, positions]


class _CleanLayer(DynamicLayer):
    """Clean keys and values of a model layer, shown to every forward and changed by none."""

    def __init__(self, keys: Tensor, values: Tensor) -> None:
        super().__init__()
        self.keys, self.values = keys, values
        self.dtype, self.device, self.is_initialized = keys.dtype, keys.device, True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Clean slots first, then those of this forward; a new tensor, so that the clean ones serve again."""
        assert self.keys is not None and self.values is not None
        return torch.cat([self.keys, key_states], dim=2), torch.cat([self.values, value_states], dim=2)


def slot_losses(backbone: Backbone, teacher: Tensor, student: Tensor, chunk_size: int) -> tuple[Tensor, Tensor]:
    """KL(teacher || student) of some slots (Eq. 8), and the student's most likely token.

    The gradient is made in the forward pass, chunk by chunk, where the logits are at hand: the head is frozen, so only
    the hidden states need one. No tensor of [M, vocabulary] ever exists, and no logits are made twice.

    Args:
        backbone: Whose head turns hidden states into logits.
        teacher: Hidden states of the base [M, H].
        student: Hidden states of the lines [M, H].
        chunk_size: Slots whose logits exist at the same time.

    Returns:
        Float32 [M], with gradient to `student`, and ids [M].
    """
    divergence, predictions = _SlotLosses.apply(student, teacher, backbone, chunk_size)
    return divergence, predictions


class _SlotLosses(torch.autograd.Function):
    """See `slot_losses`."""

    @staticmethod
    def forward(ctx: Any, student: Tensor, teacher: Tensor, backbone: Backbone, chunk: int) -> tuple[Tensor, Tensor]:
        divergences, predictions, gradients = [], [], []
        for ours, theirs in zip(student.split(chunk), teacher.split(chunk), strict=True):
            goal = backbone.logits(theirs).float().log_softmax(dim=-1)
            with torch.enable_grad():
                leaf = ours.detach().requires_grad_()
                logits = backbone.logits(leaf).float()
                divergence = (goal.exp() * (goal - logits.log_softmax(dim=-1))).sum(dim=-1)
                if ctx.needs_input_grad[0]:
                    gradients += torch.autograd.grad(divergence.sum(), leaf)
            divergences.append(divergence.detach())
            predictions.append(logits.detach().argmax(dim=-1))
        if gradients:
            ctx.save_for_backward(torch.cat(gradients))
        ids = torch.cat(predictions)
        ctx.mark_non_differentiable(ids)
        return torch.cat(divergences), ids

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        (gradient,) = ctx.saved_tensors
        return grads[0][:, None].to(gradient.dtype) * gradient, None, None, None


@torch.no_grad()
def greedy(backbone: Backbone, hidden: Tensor, chunk_size: int) -> Tensor:
    """The most likely next token [...] of hidden states [..., H], logits a chunk at a time."""
    chunks = hidden.flatten(0, -2).split(chunk_size)
    return torch.cat([backbone.logits(chunk).argmax(dim=-1) for chunk in chunks]).view(hidden.shape[:-1])


def _positions(state: State) -> Tensor:
    """Position of each slot [R, K, n], past the end of the text as well."""
    return state.start[..., None] + torch.arange(state.ids.shape[-1], device=state.ids.device)
