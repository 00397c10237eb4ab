"""Weights of linear layers laid out beforehand for products of a few tokens on a CPU.

A plain product with M tokens copies the weights into the layout of its kernel each time; for one token that is not
needed, for thousands it does not show, but for the 8 to 64 of a sweep it takes as long as the product itself. Packed
once, a sweep costs what reading and multiplying cost. The price is memory: a second copy of the layers' weights.

What packs is oneDNN, through operators of torch that have no public name; they are called nowhere but here.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from jacobi_forcing.errors import ModelError

_TOKENS = 16
"""What the layout is chosen for; those for 1 to 48 tokens were as fast with it."""
_REMEDY = "leave pack_weights out"
_SAMPLES = 256
"""Entries of a weight that tell whether it was changed behind torch's back."""


@functools.cache
def _steps() -> list[int]:
    """How many steps optimisers have done since this was first asked: fused ones change weights without counting it."""
    count = [0]

    def more(*_: Any) -> None:
        count[0] += 1

    register_optimizer_step_post_hook(more)
    return count


class _Packed(nn.Module):
    """Beside a layer's weight its packed copy, made anew when the weight has changed."""

    _copy: Tensor | None = None
    _copied: tuple[int, int, int] | None = None
    _sample: Tensor | None = None

    def _product(self, x: Tensor, weight: Tensor, bias: Tensor | None, turned: bool = False) -> Tensor | None:
        """[..., in] to [..., out], of a weight [out, in], or the other way round where it is turned.

        None where a gradient, another dtype or another device needs the plain product.
        """
        if torch.is_grad_enabled():
            # A step of training may follow: until then the copy is but memory.
            if weight.requires_grad:
                self.forget()
            return None
        if x.dtype is not torch.float32 or x.dim() < 2 or not x.numel():
            return None
        if not _fits(weight) or torch.is_autocast_enabled("cpu"):
            return None
        # Torch counts changes, those by fused optimisers excepted; they are only of weights that take gradients.
        steps = _steps()[0] if weight.requires_grad else 0
        state = (weight.data_ptr(), 0 if weight.is_inference() else weight._version, steps)
        if state != self._copied:
            rows = weight.detach()
            self._sample = _sample(rows)
            self._copy, self._copied = _packed(rows.t().contiguous() if turned else rows), state
        return _linear(x, self._copy, bias)

    def forget(self) -> None:
        """Make the copy anew when it is next needed."""
        self._copy = self._copied = self._sample = None

    def check(self) -> None:
        """Forget the copy where a sample of the weight is no longer what it was."""
        weight = self.weight
        assert isinstance(weight, Tensor)
        if self._sample is not None and not torch.equal(_sample(weight.detach()), self._sample):
            self.forget()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        """Another device or dtype: the copy goes, since new weights may come to lie where the old ones lay."""
        self.forget()
        return super()._apply(fn, recurse)

    def __getstate__(self) -> dict[str, Any]:
        """The layer without the copy, which can be neither copied nor pickled."""
        return {key: value for key, value in vars(self).items() if key not in ("_copy", "_copied", "_sample")}


class PackedLinear(_Packed, nn.Linear):
    """A linear layer that multiplies with its packed weights wherever no gradient is asked for."""

    def forward(self, x: Tensor) -> Tensor:
        """Hidden states [..., in] to [..., out]."""
        y = self._product(x, self.weight, self.bias)
        return nn.Linear.forward(self, x) if y is None else y


class PackedConv1D(_Packed, Conv1D):
    """The same for GPT-2's layers, which keep their weights the other way round."""

    def forward(self, x: Tensor) -> Tensor:
        """Hidden states [..., in] to [..., out]."""
        y = self._product(x, self.weight, self.bias, turned=True)
        result: Tensor = Conv1D.forward(self, x) if y is None else y
        return result


_KINDS: dict[type[nn.Module], type[nn.Module]] = {nn.Linear: PackedLinear, Conv1D: PackedConv1D}


def pack_weights(model: PreTrainedModel | nn.Module) -> int:
    """Pack the weights of a model's linear layers, output head included, for sweeps of a few tokens on a CPU.

    The layers stay where they are, with their parameters; training goes the plain way. Logits may differ from the plain
    layers' in the last bits, for all decoders alike.

    A weight that changes is packed anew when it is next used: training, loading and every change that torch counts are
    seen at once. One through `weight.data`, as by merging a peft adapter, is seen when the next decoding begins
    (`check_packed`); before a bare forward pass call this function again, which makes all copies anew.

    Args:
        model: In float32 on a CPU; a gated adapter may be on it, before or afterwards.

    Returns:
        How many layers were packed; 0 where they were before.

    Raises:
        ModelError: There is no such layer in float32 on a CPU, or this build of torch cannot pack.
    """
    for module in model.modules():
        if isinstance(module, _Packed):
            module.forget()
    layers = [module for module in model.modules() if type(module) in _KINDS and _fits(module.weight)]  # type: ignore[arg-type]  # of a linear layer
    if not layers and is_packed(model):
        return 0
    if not layers:
        some = next(model.parameters())
        raise ModelError(
            "There are no weights to pack",
            seen=f"{str(some.dtype).removeprefix('torch.')} on {some.device.type}",
            expected="linear layers in float32 on a CPU",
            remedy=_REMEDY,
        )
    try:
        _packed(layers[0].weight.detach())  # type: ignore[operator]  # a linear layer's weight
    except (AttributeError, NotImplementedError, RuntimeError) as error:
        raise ModelError(
            f"torch {torch.__version__} cannot pack weights", seen=str(error).splitlines()[0], remedy=_REMEDY
        ) from error
    for layer in layers:
        layer.__class__ = _KINDS[type(layer)]
    return len(layers)


def is_packed(model: nn.Module) -> bool:
    """Whether `pack_weights` was called for a model."""
    return any(isinstance(module, _Packed) for module in model.modules())


def check_packed(model: nn.Module) -> None:
    """Forget packed copies of weights that were changed in a way that torch does not count, such as `weight.data`.

    It looks at some hundred entries of each weight: enough for whatever changes a matrix as a whole.
    """
    for module in model.modules():
        if isinstance(module, _Packed):
            module.check()


def _sample(weight: Tensor) -> Tensor:
    flat = weight.reshape(-1)
    return flat[:: max(1, len(flat) // _SAMPLES)].clone()


def _fits(weight: Tensor) -> bool:
    return weight.device.type == "cpu" and weight.dtype is torch.float32


def _packed(weight: Tensor) -> Tensor:
    copy: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, _TOKENS)
    return copy


def _linear(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    product: Callable[..., Tensor] = torch.ops.mkldnn._linear_pointwise
    return product(x, weight, bias, "none", [], "")
