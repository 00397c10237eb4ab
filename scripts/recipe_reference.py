"""Write docs/recipes.md: every key of a recipe with its default and meaning, read off the settings themselves.

python scripts/recipe_reference.py
"""

from __future__ import annotations

import dataclasses
import typing
from pathlib import Path

from jacobi_forcing.config import (
    AdapterSettings,
    CollectConfig,
    DecodeConfig,
    EvaluationConfig,
    ModelConfig,
    PeftSettings,
    PromptsConfig,
    RecipeConfig,
    RoundConfig,
)
from jacobi_forcing.schema import Config

PAGE = Path(__file__).resolve().parents[1] / "docs" / "recipes.md"
SECTIONS: tuple[tuple[str, type[Config]], ...] = (
    ("A recipe", RecipeConfig),
    ("`model`", ModelConfig),
    ("`prompts`", PromptsConfig),
    ("`collect`", CollectConfig),
    ("Each of `rounds`", RoundConfig),
    ("`adapter`", AdapterSettings),
    ("`peft`", PeftSettings),
    ("`evaluation`", EvaluationConfig),
    ("Each of `evaluation.decode`", DecodeConfig),
)
HEAD = """# The keys of a recipe

Made from the settings by `scripts/recipe_reference.py`; a test keeps it up to date. A key without a default must be
given. On the command line any of them is replaced by `--set`, such as `--set rounds.0.steps=50`. `evaluation.prompts`
takes from `prompts` what it does not say itself, but not the slice. The shipped recipes in `recipes/` are examples.
"""


def default(field: dataclasses.Field[object]) -> str:
    """The default as one would write it in YAML."""
    if field.default is dataclasses.MISSING:
        return "–"
    value = field.default
    if isinstance(value, Config) or (isinstance(value, tuple) and any(isinstance(item, Config) for item in value)):
        return "its own defaults"
    if value is None or isinstance(value, bool):
        return "null" if value is None else str(value).lower()
    return f"{value:g}" if isinstance(value, float) else str(value)


def page() -> str:
    """The whole page."""
    parts = [HEAD]
    for title, kind in SECTIONS:
        about = (kind.__doc__ or "").strip().splitlines()[0]
        parts.append(f"## {title}\n\n{about}\n\n| key | default | meaning |\n|---|---|---|")
        for field in dataclasses.fields(kind):
            hint = typing.get_type_hints(kind)[field.name]
            text = str(field.metadata["help"])
            if typing.get_origin(hint) is typing.Literal and not all(
                choice in text for choice in typing.get_args(hint)
            ):
                text += f" ({', '.join(typing.get_args(hint))})"
            parts.append(f"| `{field.name}` | {default(field)} | {text} |")
        parts.append("")
    return "\n".join(parts)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
