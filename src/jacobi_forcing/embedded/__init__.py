"""What ships with the package: a tiny base model, its word problems, and sentences to turn into JSON."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

BUILTIN = "builtin:word-problems"
"""Name of the embedded model as a model, and of its problems as a source of prompts."""
BUILTIN_ORDERS = "builtin:orders"
"""Name of the sentences of `structured` as a source of prompts."""
BUILTIN_TASKS: dict[str, Literal["word_problems", "orders"]] = {BUILTIN: "word_problems", BUILTIN_ORDERS: "orders"}
"""How the answers to each of these sources are graded."""


def base_folder() -> Path:
    """Folder of the embedded base model and its tokenizer."""
    return Path(__file__).parent / "base"
