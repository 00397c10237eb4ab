"""A gated adapter: LoRA weights that are switched on per token, y = W x + g B(A x).

With g = 0 a token runs through the base model as it is, with g = 1 through the adapted one; one forward pass may hold
both. So the adapter can draft while the base verifies, and the text is the base's own. It cannot be merged: its
weights would then verify too, and the text would be theirs.

On disk it is a plain peft LoRA adapter.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from jacobi_forcing import entry
from jacobi_forcing.adapter_file import PREFIX, SETTINGS, WEIGHTS, read_adapter
from jacobi_forcing.config import DecodeConfig
from jacobi_forcing.errors import ConfigError, MissingExtraError, ModelError
from jacobi_forcing.files import write_file, write_json
from jacobi_forcing.gated import Gate, GatedLinear


class GatedAdapter:
    """The adapter of one model: attached layers, their weights, and the gate.

    Make one with `attach` or `load`; `of` finds the one that a model has.
    """

    def __init__(self, model: PreTrainedModel, layers: dict[str, GatedLinear], gate: Gate, rank: int, alpha: float):
        self.model, self.layers, self._gate = model, layers, gate
        self.rank, self.alpha = rank, alpha

    @classmethod
    def attach(
        cls,
        model: PreTrainedModel,
        rank: int = 16,
        alpha: float | None = None,
        targets: Sequence[str] | None = None,
        seed: int = 0,
    ) -> GatedAdapter:
        """Put a fresh adapter on a model's linear layers; its product is zero until it is trained.

        The base's weights are frozen. What it computes for tokens that are not gated does not change, to the bit.

        Args:
            model: The base.
            rank: r.
            alpha: Scale of the product is alpha / r; by default 2 r.
            targets: Names of layers, last part or whole; by default every linear layer but the output head.
            seed: Of the random half of the weights.

        Raises:
            ConfigError: The rank is below 1, or no layer has such a name.
            ModelError: The model has an adapter already.
        """
        if rank < 1:
            raise ConfigError("The rank of the adapter is too small", seen=rank, expected="at least 1")
        if cls.of(model) is not None:
            raise ModelError("The model has a gated adapter already", remedy="detach it first")
        alpha = 2.0 * rank if alpha is None else float(alpha)
        head = model.get_output_embeddings()
        found = {
            name: module
            for name, module in model.named_modules()
            if isinstance(module, (nn.Linear, Conv1D)) and module is not head and _named(name, targets)
        }
        if not found:
            raise ConfigError(
                "No linear layer has such a name", seen=targets, remedy="leave targets out for all of them"
            )
        gate, layers = Gate(), {}
        _freeze(model, gate)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            for name, module in found.items():
                layers[name] = GatedLinear(module, rank, alpha / rank, gate)
                _replace(model, name, layers[name])
        return cls(model, layers, gate, rank, alpha)

    @classmethod
    def of(cls, model: nn.Module) -> GatedAdapter | None:
        """The adapter that a model has, or None."""
        layers = _gated(model)
        if not layers:
            return None
        first = next(iter(layers.values()))
        rank = first.lora_A.shape[0]
        return cls(model, layers, first.gate, rank, first.scaling * rank)  # type: ignore[arg-type]  # any module

    @classmethod
    def load(cls, model: PreTrainedModel, folder: str | Path) -> GatedAdapter:
        """Put an adapter from disk on a model.

        Raises:
            ArtefactError: The folder holds no LoRA adapter, or one of another kind than can be gated.
            ModelError: It was made for a model of another shape.
        """
        found = read_adapter(folder)
        known = {name for name, module in model.named_modules() if isinstance(module, (nn.Linear, Conv1D))}
        if not found.layers.keys() <= known:
            raise ModelError(
                f"The adapter in '{folder}' was made for another model",
                seen=f"layer {min(found.layers.keys() - known)}, which {type(model).__name__} does not have",
            )
        adapter = cls.attach(model, found.rank, found.alpha, sorted(found.layers))
        try:
            for name, (down, up) in found.layers.items():
                adapter._fill(name, down, up)
        except ModelError as error:
            adapter.detach()
            raise ModelError(f"The adapter in '{folder}' does not fit the model", seen=str(error)) from error
        return adapter

    def _fill(self, name: str, down: Tensor, up: Tensor) -> None:
        """Give a layer its A and B."""
        if name not in self.layers:
            raise ModelError(f"{name} is the output head, which is not gated")
        layer = self.layers[name]
        for part, weight in ((layer.lora_A, down), (layer.lora_B, up)):
            if part.shape != weight.shape:
                raise ModelError(f"{list(weight.shape)} for {name}, which takes {list(part.shape)}")
            with torch.no_grad():
                part.copy_(weight)

    def parameters(self) -> list[nn.Parameter]:
        """The trainable weights."""
        return [part for layer in self.layers.values() for part in (layer.lora_A, layer.lora_B)]

    @contextlib.contextmanager
    def gated(self, index: Tensor | slice | None = None) -> Iterator[None]:
        """Switch tokens on for the forward passes inside the block.

        Args:
            index: The tokens, counted through all rows of the input [G], or a slice of them; None for all.
        """
        self._gate.open, self._gate.index = True, index
        try:
            yield
        finally:
            self._gate.open, self._gate.index = False, None

    def save(
        self,
        folder: str | Path,
        base: str | None = None,
        decode: DecodeConfig | None = None,
        *,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Write a plain peft adapter, which is also a `custom_generate` for its base: see `generate_with_adapter`.

        Args:
            folder: Made if it is missing.
            base: Name of the base model, for people and for peft; by default where the model was loaded from.
            decode: The settings to decode with; the defaults where None.
            dtype: What the weights are rounded to on disk; their own by default. bfloat16 halves the file; drafts may
                then be worse, and the text is still the base's.

        Raises:
            MissingExtraError: peft is not installed.
        """
        try:
            from peft import LoraConfig
        except ImportError as error:
            raise MissingExtraError("peft", "train") from error
        settings: dict[str, Any] = LoraConfig(
            r=self.rank,
            lora_alpha=self.alpha,  # type: ignore[arg-type]  # a float does too
            target_modules=sorted(self.layers),
            task_type="CAUSAL_LM",
            base_model_name_or_path=base or self.model.config.name_or_path or None,
            inference_mode=True,
            fan_in_fan_out=any(isinstance(layer.base, Conv1D) for layer in self.layers.values()),
        ).to_dict()
        plain = {key: sorted(value) if isinstance(value, set) else value for key, value in settings.items()}
        weights = {
            f"{PREFIX}{name}.{part}.weight": getattr(layer, part).detach().to("cpu", dtype).contiguous()
            for name, layer in self.layers.items()
            for part in ("lora_A", "lora_B")
        }
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        write_file(folder / WEIGHTS, lambda path: path.write_bytes(save(weights, {"format": "pt"})))
        write_json(folder / SETTINGS, plain)
        entry.write_for_adapter(folder, (decode or DecodeConfig()).to_dict())

    def detach(self) -> None:
        """Take the adapter off: the model's own layers are back in their places, bit for bit what they were."""
        for name, layer in self.layers.items():
            _replace(self.model, name, layer.base)
        for weight in self._gate.frozen:
            weight.requires_grad_()
        self.layers = {}

    @classmethod
    def reattach(cls, model: PreTrainedModel, layers: dict[str, GatedLinear]) -> GatedAdapter | None:
        """Put the layers of an adapter back that was detached; None if there are none, or the model's own changed."""
        own = dict(model.named_modules())
        if not layers or any(own.get(name) is not layer.base for name, layer in layers.items()):
            return None
        for name, layer in layers.items():
            _replace(model, name, layer)
        adapter = cls.of(model)
        assert adapter is not None
        _freeze(model, adapter._gate)
        return adapter

    def merge(self) -> None:
        """Refuse.

        Raises:
            ModelError: Always.
        """
        raise ModelError(
            "A gated adapter cannot be merged into its base",
            expected="the base's weights beside it: they verify what the adapter drafts",
            remedy="keep both; merged, the text would no longer be the base's",
        )


def _named(name: str, targets: Sequence[str] | None) -> bool:
    return targets is None or any(name == target or name.endswith("." + target) for target in targets)


def _freeze(model: nn.Module, gate: Gate) -> None:
    """No gradient for the base; what took one is remembered."""
    adapters = {id(part) for layer in _gated(model).values() for part in (layer.lora_A, layer.lora_B)}
    gate.frozen = [part for part in model.parameters() if part.requires_grad and id(part) not in adapters]
    for part in gate.frozen:
        part.requires_grad_(False)


def _gated(model: nn.Module) -> dict[str, GatedLinear]:
    return {name: module for name, module in model.named_modules() if isinstance(module, GatedLinear)}


def _replace(model: nn.Module, name: str, module: nn.Module) -> None:
    parent, _, last = name.rpartition(".")
    setattr(model.get_submodule(parent), last, module)
