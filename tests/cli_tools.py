"""What the tests of the command line share."""

from __future__ import annotations

import json
from typing import Any

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


def last_json(output: str) -> dict[str, Any]:
    """The object that the last line of an output is."""
    value = json.loads(output.splitlines()[-1])
    assert isinstance(value, dict)
    return value
