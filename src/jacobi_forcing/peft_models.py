"""LoRA and DoRA through peft, for training whole models with few weights (`mode: full`).

Unlike a gated adapter (`adapter.py`), what is trained here changes the text. It is saved merged, as a plain model, or
as a plain peft folder that names its base. Such a folder is loaded like a model: base first, then the adapter, merged
in memory, so that decoding costs what the base costs. On a quantised base it stays beside the weights.
"""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers import PreTrainedModel

from jacobi_forcing.adapter_file import SETTINGS, WEIGHTS
from jacobi_forcing.config import PeftSettings
from jacobi_forcing.errors import ArtefactError, ConfigError, MissingExtraError, ModelError
from jacobi_forcing.files import read_json

if TYPE_CHECKING:
    from peft import PeftModel

MARK = "provenance.json"


def needs_peft() -> None:
    """Refuse where peft is not installed.

    Raises:
        MissingExtraError: It is not.
    """
    if importlib.util.find_spec("peft") is None:
        raise MissingExtraError("peft", "train")


def is_peft_folder(path: str | Path) -> bool:
    """Whether a folder holds an adapter and no whole model."""
    folder = Path(path)
    return (folder / SETTINGS).is_file() and not (folder / "config.json").is_file()


def base_name(folder: str | Path) -> str:
    """The base that an adapter's folder names.

    Raises:
        ArtefactError: It names none, or it is a gated adapter, which is no model of its own.
    """
    folder = Path(folder)
    if (folder / MARK).is_file() and "adapter" in read_json(folder / MARK):
        raise ArtefactError(
            f"The adapter in '{folder}' is gated: it drafts for its base and is no model of its own",
            remedy="name the base as the model and this folder as the adapter",
        )
    base = read_json(folder / SETTINGS).get("base_model_name_or_path")
    if not isinstance(base, str) or not base:
        raise ArtefactError(
            f"The adapter in '{folder}' does not name its base",
            seen=f"base_model_name_or_path: {json.dumps(base)}",
            remedy=f"write it into {SETTINGS}",
        )
    return base


def attach(model: PreTrainedModel, settings: PeftSettings, seed: int = 0) -> PeftModel:
    """Put a fresh adapter on a model; the base's weights are frozen, its losses do not change until it is trained.

    Args:
        model: The base; its layers are replaced in place.
        settings: Method, rank, scale and targets.
        seed: Of the random half of the weights.

    Raises:
        ConfigError: No layer has such a name.
        MissingExtraError: peft is not installed.
    """
    needs_peft()
    from peft import LoraConfig, get_peft_model

    name = model.config.name_or_path or None
    config = LoraConfig(
        r=settings.rank,
        lora_alpha=2.0 * settings.rank if settings.alpha is None else settings.alpha,  # type: ignore[arg-type]  # a float does
        target_modules="all-linear" if settings.targets is None else list(settings.targets),
        use_dora=settings.method == "dora",
        fan_in_fan_out=any(type(module).__name__ == "Conv1D" for module in model.modules()),
        base_model_name_or_path=name,
        task_type="CAUSAL_LM",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        try:
            return get_peft_model(model, config)
        except ValueError as error:
            seen = ", ".join(settings.targets or ())
            raise ConfigError("peft finds no layer to put an adapter on", seen=seen or str(error)) from error


def load_onto(model: PreTrainedModel, folder: str | Path, *, trainable: bool = False) -> PeftModel:
    """Put a saved adapter on its base.

    Raises:
        ArtefactError: The folder's files are damaged.
        MissingExtraError: peft is not installed.
        ModelError: It was made for a model of another shape.
    """
    needs_peft()
    from peft import PeftModel

    if not (Path(folder) / WEIGHTS).is_file():
        raise ArtefactError(f"'{folder}' holds no adapter", expected=f"{WEIGHTS} beside {SETTINGS}")
    try:
        adapted = PeftModel.from_pretrained(model, str(folder), is_trainable=trainable)
    except (ValueError, RuntimeError) as error:
        line = str(error).strip().splitlines()[0]
        raise ModelError(f"The adapter in '{folder}' was made for another model", seen=line) from error
    except Exception as error:  # files cut short fail in many ways
        raise ArtefactError(f"The adapter in '{folder}' cannot be read", seen=str(error)) from error
    broken = [n for n, p in adapted.named_parameters() if "lora_" in n and not p.isfinite().all()]
    if broken:
        raise ArtefactError(f"The adapter in '{folder}' has weights that are not finite", seen=broken[0])
    return adapted


def merged(adapted: PeftModel) -> PreTrainedModel:
    """The base with the adapter's weights added in place; on a quantised base they stay beside it."""
    base = plain(adapted)
    if getattr(base, "is_quantized", False):
        return base
    whole: PreTrainedModel = adapted.merge_and_unload()
    return whole


def plain(model: nn.Module) -> PreTrainedModel:
    """The library's model inside peft's, or the model itself; adapter layers stay in their places."""
    inner = getattr(model, "get_base_model", None)
    found: Any = model if inner is None else inner()
    return found


def save(adapted: PeftModel, folder: str | Path, base: str) -> None:
    """Write a plain peft adapter.

    Args:
        adapted: The base with the adapter.
        folder: An existing one.
        base: What its settings call the base: a hub name or a folder.
    """
    folder = Path(folder)
    settings: Any
    for settings in adapted.peft_config.values():
        settings.base_model_name_or_path = base
        # A set would be written in another order every time.
        if isinstance(settings.target_modules, set):
            settings.target_modules = sorted(settings.target_modules)
    # By default peft would ask the hub whether the base's vocabulary has grown; embeddings are never trained here.
    adapted.save_pretrained(str(folder), save_embedding_layers=False)
    (folder / "README.md").unlink(missing_ok=True)  # peft's page for the hub, with nothing in it
