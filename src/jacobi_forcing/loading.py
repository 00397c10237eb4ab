"""From a name to a model and its tokenizer: a folder, a hub name, or the embedded base model."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import HfApi, try_to_load_from_cache
from huggingface_hub.errors import HFValidationError, RepositoryNotFoundError
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from jacobi_forcing import processes
from jacobi_forcing.adapter import GatedAdapter
from jacobi_forcing.config import DecodeConfig, ModelConfig
from jacobi_forcing.embedded import BUILTIN, base_folder
from jacobi_forcing.entry import DECODE, FOLDER
from jacobi_forcing.errors import ModelError
from jacobi_forcing.files import read_json
from jacobi_forcing.packed import pack_weights
from jacobi_forcing.peft_models import base_name, is_peft_folder, load_onto, merged
from jacobi_forcing.quantized import quantization_options

GREEDY: dict[str, Any] = {
    "do_sample": False,
    "num_beams": 1,
    "repetition_penalty": 1.0,
    "no_repeat_ngram_size": 0,
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": 50,
}
"""What the library's `generate` is told so that it decodes greedily whatever a model's generation config asks for."""
_NO_SDPA = "scaled_dot_product_attention"
_GENERATION = "generation_config.json"
_HUB_TIMEOUT = 10.0  # seconds


@dataclasses.dataclass(frozen=True)
class Loaded:
    """A model in eval mode on its device, and the tokenizer that goes with it."""

    config: ModelConfig
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase

    @property
    def vocabulary(self) -> list[int]:
        """Ids that the tokenizer has, ascending; a model's head may have more rows than these."""
        return sorted(set(self.tokenizer.get_vocab().values()))


def load(config: ModelConfig) -> Loaded:
    """Load model and tokenizer; a peft folder is loaded as its base with the adapter in the weights.

    Raises:
        ArtefactError: There is no such adapter, or it cannot be gated.
        ConfigError: The weights cannot be quantised here.
        MissingExtraError: A package for adapters or quantised weights is not installed.
        ModelError: There is no such model, its files are damaged, or the device is not there; the weights are to be
            packed, and are not in float32 on a CPU.
    """
    loaded = _load(config)
    if config.pack_weights:
        pack_weights(loaded.model)
    return loaded


def _load(config: ModelConfig) -> Loaded:
    location = locate(config.name)
    if is_peft_folder(location):
        return _load_adapted(location, config)
    if (Path(location) / _GENERATION).is_file():
        read_json(Path(location) / _GENERATION)  # the library passes over one that is damaged, and what it asks for
    options = {**hub_options(location), "trust_remote_code": config.trust_remote_code}
    model = _load_model(location, config, options)
    if config.adapter == "":
        raise ModelError("The adapter has no name", expected="a folder")
    if config.adapter is not None:
        _attach(model, Path(config.adapter))
    return Loaded(config, model, _load_tokenizer(location, config, options))


def _attach(model: PreTrainedModel, adapter: Path) -> None:
    """Put a gated adapter on its base; the decoding settings that were saved with it stand for the base's."""
    adapter = adapter.expanduser()
    GatedAdapter.load(model, adapter)
    saved = adapter / FOLDER / DECODE
    if saved.is_file() and model.generation_config is not None:
        settings = DecodeConfig.from_dict(read_json(saved), f"{saved}: ").to_dict()
        model.generation_config.jacobi_forcing = settings  # type: ignore[attr-defined]  # it keeps any


def load_tokenizer(config: ModelConfig) -> PreTrainedTokenizerBase:
    """Load the tokenizer alone; padding is set to the left, where generation needs it.

    Raises:
        ModelError: There is no such model, or it has no tokenizer.
    """
    location = locate(config.name)
    if is_peft_folder(location) and not (Path(location) / "tokenizer_config.json").is_file():
        return load_tokenizer(dataclasses.replace(config, name=base_name(location)))
    return _load_tokenizer(location, config, {**hub_options(location), "trust_remote_code": config.trust_remote_code})


def load_config(config: ModelConfig) -> PreTrainedConfig:
    """The config of a model without its weights; of a peft folder, that of its base.

    Raises:
        ModelError: There is no such model, or its config cannot be read.
    """
    location = locate(config.name)
    if is_peft_folder(location):
        return load_config(dataclasses.replace(config, name=base_name(location)))
    options = {**hub_options(location), "trust_remote_code": config.trust_remote_code}
    try:
        found: PreTrainedConfig = AutoConfig.from_pretrained(location, **options)
    except Exception as error:
        raise _cannot_load("config", config.name, error) from error
    return found


def _load_adapted(folder: str, config: ModelConfig) -> Loaded:
    """A peft folder: the base that it names, with the adapter merged in memory."""
    try:
        base = _load(dataclasses.replace(config, name=base_name(folder), adapter=None))
    except ModelError as error:
        remedy = f"that is the base that '{folder}' names; mend the name in its adapter_config.json"
        raise ModelError(str(error), remedy=remedy) from error
    model = merged(load_onto(base.model, folder)).eval()
    if config.adapter is not None:
        _attach(model, Path(config.adapter))
    return Loaded(config, model, load_tokenizer(config))


def locate(name: str) -> str:
    """What `from_pretrained` is to be given: the folder of a local model, or a hub name as it is.

    Raises:
        ModelError: The name is that of a folder which is missing or holds no model.
    """
    if name == BUILTIN:
        folder = base_folder()
        if not (folder / "model.safetensors").is_file():
            raise ModelError(
                "The embedded base model is not part of this installation",
                seen=f"no model.safetensors in {folder}",
                remedy="install the package from a release, or make it with scripts/train_embedded.py",
            )
        return str(folder)
    if name.startswith("builtin:"):
        raise ModelError(f"There is no embedded model '{name}'", expected=BUILTIN)
    path = Path(name).expanduser()
    if name and path.is_dir():
        if not (path / "config.json").is_file() and not is_peft_folder(path):
            raise ModelError(
                f"The folder '{name}' holds no model",
                seen="no config.json and no adapter_config.json",
                remedy="name the folder that save_pretrained wrote",
            )
        return str(path)
    if path.is_file():
        raise ModelError(f"'{name}' is a file", expected="a folder with config.json and safetensors, or a hub name")
    if not name or name.count("/") > 1 or name[0] in "./~":
        raise ModelError(
            f"There is no model '{name}'", seen="no such folder", expected="a folder, a hub name, or " + BUILTIN
        )
    return name


def resolve_device(device: str) -> torch.device:
    """The torch device of a name; `auto` takes a GPU where there is one.

    Raises:
        ModelError: torch does not know the device, or the machine does not have it.
    """
    if device.partition(":")[0] == "meta":
        raise ModelError("The device 'meta' holds no weights", expected="auto, cpu, cuda, cuda:1, mps, …")
    if device == "auto":
        # Several processes on a machine have a GPU each.
        own = f"cuda:{processes.local_rank()}" if processes.count() > 1 else "cuda"
        return torch.device(own if torch.cuda.is_available() else "cpu")
    try:
        found = torch.device(device)
        torch.empty(0, device=found)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise ModelError(
            f"The device '{device}' cannot be used", seen=_first_line(error), expected="auto, cpu, cuda, cuda:1, mps, …"
        ) from error
    return found


def hub_options(location: str, what: str = "model", file: str = "config.json") -> dict[str, Any]:
    """Ask the hub once whether it has a model; the library itself would ask for most of a minute without a network.

    Args:
        location: A folder, which nothing is asked about, or a hub name.
        what: What messages call it.
        file: That was downloaded if it was here before.

    Returns:
        What `from_pretrained` is to be told.

    Raises:
        ModelError: The hub has none, or cannot be reached and the model was never downloaded.
    """
    if Path(location).is_dir():
        return {}
    try:
        HfApi().model_info(location, timeout=_HUB_TIMEOUT)
    except HFValidationError as error:
        raise ModelError(f"'{location}' is neither a folder nor a hub name", seen=_first_line(error)) from error
    except RepositoryNotFoundError as error:
        raise ModelError(
            f"There is no {what} '{location}'",
            seen="no such folder here, and nothing of that name on the hub that this machine may read",
            remedy="check the name, or log in with `hf auth login` if it is private",
        ) from error
    except Exception as error:  # no network, in any of the ways in which that shows
        if isinstance(try_to_load_from_cache(location, file), str):
            return {"local_files_only": True}
        raise ModelError(
            f"There is no {what} '{location}' on this machine, and the hub cannot be reached",
            seen=_first_line(error),
            expected="a folder, a hub name that was downloaded before" + f", or {BUILTIN}" * (what == "model"),
        ) from error
    return {}


def _load_tokenizer(location: str, config: ModelConfig, options: dict[str, Any]) -> PreTrainedTokenizerBase:
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(location, **options)
    except Exception as error:
        raise _cannot_load("tokenizer", config.name, error) from error
    tokenizer.padding_side = "left"
    return tokenizer


def _load_model(location: str, config: ModelConfig, options: dict[str, Any]) -> PreTrainedModel:
    device = resolve_device(config.device)
    options = {**options, "dtype": getattr(torch, config.dtype), **quantization_options(config.quantization, device)}
    try:
        try:
            model = AutoModelForCausalLM.from_pretrained(location, attn_implementation="sdpa", **options)
        except ValueError as error:
            if _NO_SDPA not in str(error):
                raise
            model = AutoModelForCausalLM.from_pretrained(location, attn_implementation="eager", **options)
    except Exception as error:
        raise _cannot_load("model", config.name, error) from error
    # With trust_remote_code the library puts a model's own `custom_generate` in the place of its `generate`. What calls
    # `model.generate` here means the library's: it is what decoders are compared with.
    vars(model).pop("generate", None)
    if config.quantization == "none":  # quantised weights are loaded where they stay
        model.to(device)  # type: ignore[arg-type]  # annotated for strings
    loaded: PreTrainedModel = model.eval()
    return loaded


def _cannot_load(what: str, name: str, error: Exception) -> ModelError:
    """The library raises many kinds of error with texts of many lines; a person needs the first one and a remedy."""
    return ModelError(
        f"Cannot load the {what} of '{name}'",
        seen=_first_line(error),
        remedy="its files may be incomplete or damaged, or of a kind that transformers does not know",
    )


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0].rstrip(".") if lines else type(error).__name__
