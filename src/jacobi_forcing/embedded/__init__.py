"""The tiny base model that ships with the package, and the word problems that it was trained on."""

from __future__ import annotations

from pathlib import Path

BUILTIN = "builtin:word-problems"
"""Name of the embedded model as a model, and of its problems as a source of prompts."""


def base_folder() -> Path:
    """Folder of the embedded base model and its tokenizer."""
    return Path(__file__).parent / "base"
