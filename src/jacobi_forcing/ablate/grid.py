"""What a grid is: a base recipe, variants that differ from it in named keys, seeds, and a budget for each run."""

from __future__ import annotations

import copy
import dataclasses
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jacobi_forcing.config import ROUND_LENGTHS, RecipeConfig
from jacobi_forcing.errors import ConfigError
from jacobi_forcing.recipe.settings import SHIPPED, assign, find_recipe, override_value, read_recipe, recipe_of
from jacobi_forcing.schema import Config, option, read_mapping

_NAME = re.compile(r"[A-Za-z0-9][\w.+-]*")


@dataclasses.dataclass(frozen=True)
class GridConfig(Config):
    """A grid of runs: every variant with every seed."""

    recipe: str = option(help="base recipe: a file, looked for beside the grid first, or one that ships")
    variants: dict[str, Any] = option(
        help="name of each variant: the keys of the base that it replaces, key.path: value"
    )
    base: dict[str, Any] = option(help="keys of the base that are replaced for all variants, key.path: value")
    seeds: tuple[int, ...] = option((0, 1, 2), help="seeds of each variant: the order of rows, and what training draws")
    train_tokens: int | None = option(
        None, help="training tokens of each run, over its rounds in the ratio of their steps", at_least=1
    )
    core_seconds: float | None = option(
        None,
        help="seconds x cores of each run, collecting counted, over its rounds in the ratio of their steps",
        above=0,
    )
    tpf_prompts: int = option(50, help="held-out prompts that tokens per forward are counted on", at_least=1)
    output: str = option("runs/ablation", help="folder of the grid, relative to the working folder")

    def recipes(self, values: dict[str, Any], seed: int) -> dict[str, RecipeConfig]:
        """The recipe of each variant.

        Args:
            values: What stands in the base recipe.
            seed: Replaces its seed.

        Raises:
            ConfigError: A key is unknown, a value wrong, or a variant differs in how it is measured.
        """
        return {name: self._recipe(values, name, seed) for name in self.variants}

    def _recipe(self, values: dict[str, Any], name: str, seed: int) -> RecipeConfig:
        own = copy.deepcopy(values)
        for path, value in [*self.base.items(), *self.variants[name].items()]:
            assign(own, path, copy.deepcopy(value))
        own["seed"] = seed
        own["output"] = str(run_folder(Path(self.output), name, seed))
        try:
            self._share(own)
            recipe = recipe_of(own)
        except ConfigError as error:
            raise ConfigError(f"In the variant '{name}': {error}") from error
        return recipe

    def _share(self, own: dict[str, Any]) -> None:
        """Give each round its share of the budget in place of its steps."""
        budgets = {name: value for name in ROUND_LENGTHS if (value := getattr(self, name, None)) is not None}
        if not budgets:
            return
        [(name, budget)] = budgets.items()
        rounds = own.get("rounds") or []
        steps = [settings.get("steps") if isinstance(settings, dict) else None for settings in rounds]
        if not all(isinstance(count, int) and count > 0 for count in steps):
            raise ConfigError(f"A budget of {name} is shared in the ratio of the rounds' steps", seen=f"steps {steps}")
        total = sum(filter(None, steps))
        for settings, count in zip(rounds, steps, strict=True):
            part = budget * count / total
            del settings["steps"]
            settings[name] = round(part) if name == "train_tokens" else part


def run_folder(output: Path, variant: str, seed: int) -> Path:
    """Where one run lies."""
    return output / "runs" / variant / f"seed-{seed}"


def find_grid(name: str | Path) -> Path:
    """The file of a grid: a path, or the name of one that ships with the package, with or without `.yaml`.

    Raises:
        ConfigError: There is neither.
    """
    path = Path(name)
    if path.is_file():
        return path
    file = path.name if path.suffix in (".yaml", ".yml") else path.name + ".yaml"
    folders = [folder / "ablations" for folder in SHIPPED]
    if path.parent in (Path(), Path("ablations"), Path("recipes/ablations")):
        for folder in folders:
            if (folder / file).is_file():
                return folder / file
    shipped = sorted({found.stem for folder in folders for found in folder.glob("*.yaml")} - {"base"})
    raise ConfigError(f"There is no grid '{name}'", expected="a path, or one of " + ", ".join(shipped))


def load_grid(
    name: str | Path, overrides: Sequence[str] = (), output: str | Path | None = None
) -> tuple[GridConfig, dict[str, Any]]:
    """Read a grid and its base recipe, and check every variant.

    Args:
        name: See `find_grid`.
        overrides: `key.path=value` each, for keys of the grid: `train_tokens=100000`, `seeds=[0]`.
        output: Replaces the grid's output folder.

    Returns:
        The grid, and what stands in its base recipe.

    Raises:
        ConfigError: A file cannot be read, or holds wrong settings.
    """
    path = find_grid(name)
    values = read_mapping(path, "grid")
    for override in overrides:
        override_value(values, override)
    if output is not None:
        values["output"] = str(output)
    grid = GridConfig.from_dict({"base": {}, **values})
    beside = path.parent / grid.recipe
    shipped = next((f for folder in SHIPPED if (f := folder / "ablations" / grid.recipe).is_file()), None)
    recipe = read_recipe(beside if beside.is_file() else shipped or find_recipe(grid.recipe))
    _check(grid, recipe)
    return grid, recipe


def _check(grid: GridConfig, recipe: dict[str, Any]) -> None:
    """What no single setting can tell."""
    if grid.train_tokens is not None and grid.core_seconds is not None:
        raise ConfigError(
            "There are two budgets", seen="train_tokens and core_seconds", expected="one of them, or none"
        )
    if not grid.variants or not grid.seeds:
        raise ConfigError("A grid needs variants and seeds", seen=f"{len(grid.variants)} and {len(grid.seeds)}")
    for name, keys in grid.variants.items():
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise ConfigError("A variant's name cannot name a folder", seen=repr(name), expected="letters and digits")
        if not isinstance(keys, dict):
            raise ConfigError(f"The variant '{name}' is not a mapping", seen=repr(keys), expected="key.path: value")
        alike = [path for path in keys if str(path).split(".")[0] in ("evaluation", "seed", "output")]
        if alike:
            raise ConfigError(
                f"The variant '{name}' replaces '{alike[0]}'",
                expected="keys that decide what is trained",
                remedy="put it under base: all variants are measured alike",
            )
    for made in grid.recipes(recipe, grid.seeds[0]).values():
        if made.evaluation is None:
            raise ConfigError("The base recipe has no evaluation", remedy="add one: it names the held-out prompts")
