"""A recipe of two rounds that takes seconds, for the tests of what reads or runs one."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import yaml

RECIPE: dict[str, Any] = {
    "model": {"name": "model", "device": "cpu"},
    "prompts": {"source": "prompts.jsonl", "field": "question", "limit": 8},
    "collect": {"max_new_tokens": 16, "batch_size": 2, "shard_size": 1},
    "rounds": [
        {"block_size": 4, "window_size": 2, "steps": 6, "learning_rate": 1e-3, "max_length": 96, "save_steps": 2},
        {"block_size": 8, "window_size": 2, "steps": 2, "learning_rate": 1e-3, "max_length": 96, "prompts_offset": 5},
    ],
    "output": "run",
}
EVALUATION: dict[str, Any] = {
    "prompts": {"answer_field": "answer", "offset": 8, "limit": 3},
    "task": "gsm8k",
    "max_new_tokens": 8,
    "decode": [{"decoder": "window", "block_size": 4}],
    "speed_prompts": 2,
    "probe_steps": 4,
    "probe_prompts": 2,
}


def write(path: Path, values: dict[str, Any]) -> Path:
    """Write a recipe."""
    path.write_text(yaml.safe_dump(copy.deepcopy(values)), encoding="utf-8")
    return path
