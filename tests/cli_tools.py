"""What the tests of the command line share."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tiny_folder import save_prompts, save_tiny

GENERATE_KEYS = {
    "text",
    "tokens",
    "forwards",
    "tokens_per_forward",
    "seconds",
    "tokens_per_second",
    "decoder",
    "block_size",
    "model",
}


def fill(folder: Path) -> None:
    """A model and prompts to work on."""
    save_tiny(folder / "model")
    save_prompts(folder / "prompts.jsonl", 6)


def last_json(output: str) -> dict[str, Any]:
    """The object that the last line of an output is."""
    value = json.loads(output.splitlines()[-1])
    assert isinstance(value, dict)
    return value
