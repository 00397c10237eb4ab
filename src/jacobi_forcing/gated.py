"""A linear layer with a low-rank product that is added for some tokens and not for others, y = W x + g B(A x)."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D


class Gate:
    """Which tokens of the forward pass in progress are switched on; shared by all layers of a model.

    Attributes:
        open: Whether any is.
        index: Those tokens, counted through all rows: [G], or a slice where they lie side by side; None for all.
        frozen: Weights of the base that took gradients before the adapter came.
    """

    def __init__(self) -> None:
        self.frozen: list[nn.Parameter] = []
        self.open = False
        self.index: Tensor | slice | None = None


class GatedLinear(nn.Module):
    """A linear layer of the base, which stays as it is, and a low-rank product that is added for gated tokens.

    Args:
        base: The layer, whose weights are frozen.
        rank: r, columns of the product's waist.
        scaling: What the product is multiplied by, alpha / r.
        gate: Shared by all layers.
    """

    def __init__(self, base: nn.Module, rank: int, scaling: float, gate: Gate) -> None:
        super().__init__()
        self.base, self.scaling, self.gate = base, scaling, gate
        width, height = _features(base)
        like: Tensor = base.weight  # type: ignore[assignment]  # a linear layer's weight
        self.lora_A = nn.Parameter(torch.empty(rank, width, dtype=like.dtype, device=like.device))
        self.lora_B = nn.Parameter(torch.zeros(height, rank, dtype=like.dtype, device=like.device))
        nn.init.kaiming_uniform_(self.lora_A, a=math.sqrt(5))

    def forward(self, x: Tensor) -> Tensor:
        """Hidden states [..., in] to [..., out]."""
        y: Tensor = self.base(x)
        gate = self.gate
        if not gate.open:
            return y
        index = gate.index
        if index is None:
            return y + self._product(x)
        # Only gated tokens pay for the product. One row, as in decoding, needs no other shape, and a sweep of a few
        # tokens through a small model notices every further operation.
        if type(index) is slice and x.dim() == 3 and x.shape[0] == 1 and not torch.is_grad_enabled():
            waist = nn.functional.linear(x[0, index], self.lora_A)
            y[0, index].addmm_(waist, self.lora_B.t(), alpha=self.scaling)
            return y
        flat, some = y.flatten(0, -2), x.flatten(0, -2)[index]
        if torch.is_grad_enabled():
            index = torch.arange(len(flat), device=x.device)[index]
            return flat.index_add(0, index, self._product(some)).view_as(y)
        if isinstance(index, slice):
            flat[index].addmm_(nn.functional.linear(some, self.lora_A), self.lora_B.t(), alpha=self.scaling)
        else:
            flat.index_add_(0, index, self._product(some))
        return y

    def _product(self, x: Tensor) -> Tensor:
        return nn.functional.linear(nn.functional.linear(x, self.lora_A), self.lora_B) * self.scaling


def _features(layer: nn.Module) -> tuple[int, int]:
    """Input and output width; GPT-2 keeps its weights the other way round."""
    first, second = layer.weight.shape  # type: ignore[misc]  # a linear layer's weight
    return (int(first), int(second)) if isinstance(layer, Conv1D) else (int(second), int(first))
