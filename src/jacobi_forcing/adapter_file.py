"""An adapter on disk: read whole, and checked for what it is before a model is touched."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from jacobi_forcing.errors import ArtefactError

WEIGHTS, SETTINGS = "adapter_model.safetensors", "adapter_config.json"
PREFIX = "base_model.model."
"""What peft puts before the name of a layer."""
_NAME = re.compile(re.escape(PREFIX) + r"(.+)\.lora_([AB])\.weight")
_OTHER_KINDS = ("use_dora", "lora_bias", "rank_pattern", "alpha_pattern", "modules_to_save")
_LARGEST = torch.finfo(torch.float32).max


@dataclass(frozen=True)
class AdapterFile:
    """A plain LoRA adapter.

    Attributes:
        rank: r.
        alpha: Scale of the product is alpha / r.
        layers: By the name of its layer in the base, A [r, in] and B [out, r].
    """

    rank: int
    alpha: float
    layers: Mapping[str, tuple[Tensor, Tensor]]


def read_adapter(folder: str | Path) -> AdapterFile:
    """Read a folder that peft, or `GatedAdapter.save`, has written.

    Raises:
        ArtefactError: It holds no adapter, a damaged one, or one of another kind than can be gated.
    """
    folder = Path(folder).expanduser()
    settings, weights = _files(folder)
    if not isinstance(settings, dict) or not weights:
        raise _damaged(folder, seen=f"{SETTINGS} or {WEIGHTS} is empty", expected="settings, and weights beside them")
    unfit = [f"{key}: {settings[key]}" for key in _OTHER_KINDS if settings.get(key)]
    if settings.get("bias", "none") != "none":
        unfit.append(f"bias: {settings['bias']}")
    if settings.get("peft_type") != "LORA" or unfit:
        seen = ", ".join([f"peft_type {settings.get('peft_type')}", *unfit])
        raise ArtefactError(f"The adapter in '{folder}' cannot be gated", seen=seen, expected="plain LoRA")
    layers = _pairs(folder, weights)
    rank, alpha = _scale(folder, settings, layers)
    return AdapterFile(rank, alpha, layers)


def _files(folder: Path) -> tuple[Any, dict[str, Tensor]]:
    missing = [name for name in (SETTINGS, WEIGHTS) if not (folder / name).is_file()]
    if missing:
        # The folder of a run, or one that holds several adapters, is named easily.
        inside = sorted(path.parent for path in folder.glob(f"*/{SETTINGS}")) if folder.is_dir() else []
        raise ArtefactError(
            f"'{folder}' holds no adapter",
            seen=f"no {' and no '.join(missing)}" if folder.is_dir() else "no such folder",
            expected=f"a folder with {SETTINGS} and {WEIGHTS}",
            remedy="name " + " or ".join(f"'{path}'" for path in inside[:3]) if inside else None,
        )
    try:
        settings = json.loads((folder / SETTINGS).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise _damaged(folder, seen=f"{SETTINGS}: {error}") from error
    try:
        return settings, load_file(folder / WEIGHTS)
    except (OSError, ValueError, SafetensorError) as error:
        raise _damaged(folder, seen=f"{WEIGHTS}: {error}") from error


def _pairs(folder: Path, weights: Mapping[str, Tensor]) -> dict[str, tuple[Tensor, Tensor]]:
    """The weights by layer, each A with its B."""
    halves: dict[str, dict[str, Tensor]] = {}
    for key, weight in weights.items():
        match = _NAME.fullmatch(key)
        if match is None:
            raise _damaged(folder, seen=f"a weight '{key}'", expected=f"{PREFIX}LAYER.lora_A.weight, or lora_B")
        if weight.dim() != 2 or not weight.is_floating_point():
            shown = f"{key}: {str(weight.dtype).removeprefix('torch.')} {list(weight.shape)}"
            raise _damaged(folder, seen=shown, expected="a matrix of floating point numbers")
        if not weight.isfinite().all():
            raise ArtefactError(f"The adapter in '{folder}' has weights that are not finite", seen=key)
        halves.setdefault(match[1], {})[match[2]] = weight
    for name, pair in halves.items():
        for part in "AB":
            if part not in pair:
                raise _damaged(folder, seen=f"no {PREFIX}{name}.lora_{part}.weight", expected="an A and a B a layer")
    return {name: (pair["A"], pair["B"]) for name, pair in halves.items()}


def _scale(folder: Path, settings: Mapping[str, Any], layers: Mapping[str, tuple[Tensor, Tensor]]) -> tuple[int, float]:
    """Rank and alpha, checked against the weights before anything of that size is made."""
    rank, alpha = settings.get("r"), settings.get("lora_alpha")
    made = {size for a, b in layers.values() for size in (a.shape[0], b.shape[1])}
    number = isinstance(alpha, (int, float)) and not isinstance(alpha, bool) and abs(alpha) <= _LARGEST
    if made != {rank} or not number:
        raise _damaged(
            folder,
            seen=f"r {rank!r}, lora_alpha {alpha!r}",
            expected=f"r {' or '.join(map(str, sorted(made)))}, as its weights have, and a number",
        )
    (size,) = made
    assert isinstance(alpha, (int, float))
    return size, float(alpha) * (math.sqrt(size) if settings.get("use_rslora") else 1.0)


def _damaged(folder: Path, *, seen: str, expected: str | None = None) -> ArtefactError:
    return ArtefactError(f"The adapter in '{folder}' is damaged", seen=seen, expected=expected)
