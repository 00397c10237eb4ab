"""Settings that travel with a model: in its generation config, and as a `custom_generate` folder beside its weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from transformers import GenerationConfig

from jacobi_forcing import entry
from jacobi_forcing.config import DecodeConfig
from jacobi_forcing.errors import ModelError
from jacobi_forcing.files import read_json, write_json

ATTRIBUTE = "jacobi_forcing"
"""Of a generation config: the settings as `DecodeConfig.to_dict` gives them."""


def saved_decode(*configs: GenerationConfig | None) -> DecodeConfig:
    """The settings in the first generation config that holds any, or the defaults.

    Raises:
        ConfigError: They are wrong.
    """
    return _checked(next((found for config in configs if (found := getattr(config, ATTRIBUTE, None)) is not None), {}))


def _checked(values: Any) -> DecodeConfig:
    return (
        values
        if isinstance(values, DecodeConfig)
        else DecodeConfig.from_dict(values, f"generation_config.{ATTRIBUTE}.")
    )


def save_custom_generate(folder: str | Path, decode: DecodeConfig | None = None) -> None:
    """Make a saved model decode in parallel wherever it is loaded from.

    Beside the model's own files it writes `generate.py` and `requirements.txt` in `custom_generate/`, and adds the
    settings to `generation_config.json`. Then::

        model = AutoModelForCausalLM.from_pretrained(folder)
        model.generate(**inputs, custom_generate=str(folder), trust_remote_code=True, max_new_tokens=64)

    Plain `generate` is what it was, unless the model itself is loaded with `trust_remote_code=True`: then the library
    makes ours its `generate`.

    Args:
        folder: Where `save_pretrained` wrote the model.
        decode: The settings; where None, those already there, else the defaults.

    Raises:
        ConfigError: Settings already there are wrong.
        ModelError: The folder holds no model.
        ArtefactError: Its generation config is damaged, or the disk refuses.
    """
    place = Path(folder)
    if not (place / "config.json").is_file():
        raise ModelError(
            f"The folder '{folder}' holds no model",
            seen="no config.json",
            remedy="name the folder that save_pretrained wrote",
        )
    settings = _generation_settings(place)
    decode = decode or _checked(settings.get(ATTRIBUTE) or {})
    entry.write_for_model(place)
    write_json(place / "generation_config.json", {**settings, ATTRIBUTE: decode.to_dict()})


def _generation_settings(place: Path) -> dict[str, Any]:
    """What `generation_config.json` holds; of a model without one, what the library would make up for it."""
    if (place / "generation_config.json").is_file():
        settings = read_json(place / "generation_config.json")
    else:
        made_up = GenerationConfig.from_pretrained(place, config_file_name="config.json", _from_model_config=True)
        settings = json.loads(made_up.to_json_string())
    # With this mark the library drops all settings that it does not know when it loads them.
    settings.pop("_from_model_config", None)
    return settings
