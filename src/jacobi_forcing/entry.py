"""What makes a folder a `custom_generate` of the library: code that it runs, and what that code needs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from jacobi_forcing.files import write_json, write_text

FOLDER, DECODE = "custom_generate", "decode.json"

_HEAD = '''"""Parallel decoding by jacobi-forcing, {what}."""

try:
    import jacobi_forcing
except ImportError as error:
    raise ImportError("This model decodes in parallel by: pip install jacobi-forcing") from error
'''
_MODEL = '''

def generate(*inputs, model, **settings):
    """What the library's generate takes; `decode` replaces the saved settings."""
    if settings.get("custom_generate") is not None:
        return type(model).generate(model, *inputs, **settings)
    return jacobi_forcing.generate(model, *inputs, **settings)
'''
_ADAPTER = '''

def generate(*inputs, model, **settings):
    """What the library's generate takes, on the base of this adapter; `decode` replaces the saved settings."""
    return jacobi_forcing.generate_with_adapter(model, *inputs, **settings)
'''
_REQUIREMENTS = "jacobi-forcing>=0.1\n"


def write_for_model(folder: Path) -> None:
    """The entry of a whole model, whose settings are in its generation config.

    Raises:
        ArtefactError: The disk refuses.
    """
    _write(folder, _HEAD.format(what="with the settings in generation_config.json") + _MODEL)


def write_for_adapter(folder: Path, decode: dict[str, Any]) -> None:
    """The entry of a gated adapter, and beside the code the settings that it decodes with.

    Raises:
        ArtefactError: The disk refuses.
    """
    _write(folder, _HEAD.format(what="drafted by the adapter beside it, verified by its base") + _ADAPTER)
    write_json(folder / FOLDER / DECODE, decode)


def _write(folder: Path, code: str) -> None:
    write_text(folder / FOLDER / "requirements.txt", _REQUIREMENTS)
    write_text(folder / FOLDER / "generate.py", code)
