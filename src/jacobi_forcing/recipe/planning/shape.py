"""The sizes of a model, from its config alone: no weight is read or made."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch import nn
from transformers import AutoModelForCausalLM
from transformers.pytorch_utils import Conv1D

from jacobi_forcing.config import ModelConfig
from jacobi_forcing.loading import load_config

BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclasses.dataclass(frozen=True)
class Shape:
    """Sizes of a decoder.

    Attributes:
        parameters: All weights, tied ones once.
        table: Weights of an input embedding that is not the head too; a token reads one row of it.
        matrices: Weights of matrices outside embeddings and head, which Muon would take.
        layers: Decoder layers.
        hidden: Width of the residual stream.
        queries: Width of all query heads together.
        keys: Width of all key heads together.
        inner: Width between the two halves of the feed-forward layer.
        vocab: Rows of the head.
        linear: Name, input and output width of each linear layer but the head.
    """

    parameters: int
    table: int
    matrices: int
    layers: int
    hidden: int
    queries: int
    keys: int
    inner: int
    vocab: int
    linear: tuple[tuple[str, int, int], ...]

    def adapter(self, rank: int, targets: Sequence[str] | None) -> int:
        """Weights of a LoRA adapter on all linear layers, or on those of these names."""
        return sum(
            rank * (width + height)
            for name, width, height in self.linear
            if targets is None or any(name == target or name.endswith("." + target) for target in targets)
        )


def shape_of(model: ModelConfig) -> Shape:
    """Read a model's config and count.

    Raises:
        ModelError: There is no such model, or its config cannot be read.
    """
    whole = load_config(model)
    config = whole.get_text_config(decoder=True)
    with torch.device("meta"):
        skeleton = AutoModelForCausalLM.from_config(whole, trust_remote_code=model.trust_remote_code)
    head, table = skeleton.get_output_embeddings(), skeleton.get_input_embeddings()
    outside = {id(p) for module in (head, table) if module is not None for p in module.parameters()}
    tied = head is not None and head.weight is table.weight
    linear = []
    for name, module in skeleton.named_modules():
        if module is not head and isinstance(module, (nn.Linear, Conv1D)):
            rows, columns = module.weight.shape
            linear.append((name, rows, columns) if isinstance(module, Conv1D) else (name, columns, rows))
    heads = int(config.num_attention_heads)
    width = int(getattr(config, "head_dim", None) or config.hidden_size // heads)
    return Shape(
        parameters=sum(p.numel() for p in skeleton.parameters()),
        table=0 if tied else table.weight.numel(),
        matrices=sum(p.numel() for p in skeleton.parameters() if p.ndim == 2 and id(p) not in outside),
        layers=int(config.num_hidden_layers),
        hidden=int(config.hidden_size),
        queries=heads * width,
        keys=int(getattr(config, "num_key_value_heads", None) or heads) * width,
        inner=int(getattr(config, "intermediate_size", None) or 4 * config.hidden_size),
        vocab=int(config.vocab_size),
        linear=tuple(linear),
    )
