"""What a forward pass has to do, and what this device can do at best: the roofline.

A forward reads every weight and the KV of the context, whatever the number of tokens, and computes in proportion to the
tokens. While reading takes the time, further tokens cost little; from where computing takes it, they cost in full.
"""

from __future__ import annotations

import dataclasses
import platform
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from jacobi_forcing.backbone import Backbone
from jacobi_forcing.bench.cost import synchronise
from jacobi_forcing.cache import KVCache
from jacobi_forcing.gated import GatedLinear
from jacobi_forcing.sweep import Line, Lines, sweep

_COLUMNS = 2048  # of the matrix whose reading is timed
_LEAST, _MOST = 1 << 20, 1 << 30  # bytes of that matrix
_SHORTEST, _WIDEST = 0.02, 8192  # a product is timed that takes so many seconds, or is so wide
_TRIES = 12


@dataclasses.dataclass(frozen=True)
class Limits:
    """What the device did at best, measured.

    Attributes:
        bytes_per_second: Rate at which a matrix of `working_set` bytes was read, by a product with a vector or by a
            sum, or at which a forward moved what it has to, whichever was fastest.
        flops_per_second: Rate of a product of two square matrices in the model's dtype, or that of a forward.
        working_set: Bytes; as many as the model's weights, up to 1 GiB, so that a model that fits in a cache is held
            against that cache.
        width: Rows of the square matrices.
    """

    bytes_per_second: float
    flops_per_second: float
    working_set: int
    width: int

    def raised(self, bytes_per_second: float, flops_per_second: float) -> Limits:
        """With other measurements of the same device: at best is the best that was seen."""
        return dataclasses.replace(
            self,
            bytes_per_second=max(self.bytes_per_second, bytes_per_second),
            flops_per_second=max(self.flops_per_second, flops_per_second),
        )


@dataclasses.dataclass(frozen=True)
class Work:
    """What a forward of a model has to read and compute, counted from its shapes.

    Attributes:
        weights: Values in the weights that every forward reads; embeddings that are only looked up are left out. Of a
            mixture of experts all experts are counted: an upper bound.
        matmul: Those of them that are multiplied by each token, the output head included.
        adapter: Values of a gated adapter.
        kv: Values of keys and values per token of context and row.
        attention: Multiplications and additions per query token and key, over all layers and heads.
        vocabulary: Rows of the output head.
        itemsize: Bytes of a value.
    """

    weights: int
    matmul: int
    adapter: int
    kv: int
    attention: int
    vocabulary: int
    itemsize: int

    def bytes(self, tokens: int, context: int, rows: int = 1, gated: bool = False) -> int:
        """Bytes that one forward moves at least: weights once, keys and values read, new ones and logits written.

        Args:
            tokens: Tokens a row.
            context: Committed tokens before them.
            rows: Rows side by side.
            gated: Whether the adapter takes part.
        """
        values = self.weights + (self.adapter if gated else 0)
        values += rows * (self.kv * (context + 2 * tokens) + tokens * self.vocabulary)
        return values * self.itemsize

    def flops(self, tokens: int, context: int, rows: int = 1, gated: bool = False) -> int:
        """Multiplications and additions of one forward; half of the tokens go through the adapter, if it takes part."""
        each = 2 * self.matmul + self.attention * (context + tokens)
        return rows * (tokens * each + (2 * self.adapter * (tokens // 2) if gated else 0))


@torch.inference_mode()
def work_of(backbone: Backbone) -> Work:
    """Count what forwards of a model have to do."""
    model = backbone.model
    looked_up = {id(p) for m in model.modules() if isinstance(m, nn.Embedding) for p in m.parameters(recurse=False)}
    extra = {id(p) for m in model.modules() if isinstance(m, GatedLinear) for p in (m.lora_A, m.lora_B)}
    plain = [p for p in model.parameters() if id(p) not in looked_up | extra]
    head = model.get_output_embeddings()
    if head is not None and id(head.weight) in looked_up:  # tied: the embedding is read as the head
        plain.append(head.weight)
    layers: list[Any] = _one_token(backbone).library.layers  # all are `SlotLayer`
    kv = sum(states.shape[1] * states.shape[3] for layer in layers for states in (layer.keys, layer.values))
    heads = int(backbone.config.num_attention_heads)
    attention = sum(2 * heads * (layer.keys.shape[3] + layer.values.shape[3]) for layer in layers)
    return Work(
        weights=sum(p.numel() for p in plain),
        matmul=sum(p.numel() for p in plain if p.ndim >= 2),
        adapter=sum(p.numel() for p in model.parameters() if id(p) in extra),
        kv=kv,
        attention=attention,
        vocabulary=backbone.vocab_size,
        itemsize=backbone.dtype.itemsize,
    )


def _one_token(backbone: Backbone) -> KVCache:
    cache = backbone.new_cache()
    sweep(backbone, cache, Lines.pack([[Line([0], 0)]], backbone.device))
    return cache


@torch.inference_mode()
def measure_limits(device: torch.device, dtype: torch.dtype, working_set: int) -> Limits:
    """Time reading and computing at their best: the fastest of some tries counts.

    Args:
        device: Where.
        dtype: Of the values.
        working_set: Bytes to read over and over; see `Limits`.
    """
    size = min(max(working_set, _LEAST), _MOST)
    rows = max(1, size // (_COLUMNS * dtype.itemsize))
    matrix = torch.full((rows, _COLUMNS), 0.5, dtype=dtype, device=device)
    vector = torch.full((_COLUMNS,), 0.5, dtype=dtype, device=device)
    read = min(_best(lambda: torch.mv(matrix, vector), device), _best(matrix.sum, device))
    width = 256
    while True:
        square = torch.full((width, width), 0.5, dtype=dtype, device=device)
        took = _best(lambda: torch.mm(square, square), device)  # noqa: B023  # called before the next turn
        if took >= _SHORTEST or width >= _WIDEST:
            break
        width *= 2
    return Limits(matrix.nbytes / read, 2 * width**3 / took, matrix.nbytes, width)


def _best(work: Callable[[], Any], device: torch.device) -> float:
    """Least wall seconds of one call."""
    times = []
    for _ in range(_TRIES):
        synchronise(device)
        started = time.perf_counter()
        work()
        synchronise(device)
        times.append(time.perf_counter() - started)
    return min(times[2:])


def model_form(backbone: Backbone) -> dict[str, Any]:
    """What speeds depend on, beside the machine, as results tell it."""
    device = backbone.device.type
    return {
        "dtype": str(backbone.dtype).removeprefix("torch."),
        "device": device,
        "threads": torch.get_num_threads() if device == "cpu" else None,
        "packed_weights": backbone.packed_weights,
    }


def device_name(device: torch.device) -> str:
    """What the device is called by its maker, as far as the system tells."""
    if device.type == "cuda":
        return str(torch.cuda.get_device_name(device))
    if device.type == "cpu":
        try:
            lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
            return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
        except (OSError, StopIteration):
            return platform.processor() or platform.machine()
    return device.type
