"""From a recipe file and overrides to checked settings."""

from __future__ import annotations

import dataclasses
import logging
import math
import re
import typing
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from jacobi_forcing.config import (
    AdapterSettings,
    Mode,
    ModelConfig,
    PeftSettings,
    PromptsConfig,
    RecipeConfig,
    RoundConfig,
)
from jacobi_forcing.embedded import BUILTIN_TASKS
from jacobi_forcing.errors import ConfigError
from jacobi_forcing.recipe.checks import check_sources
from jacobi_forcing.schedule import NoiseSchedule
from jacobi_forcing.schema import read_mapping

logger = logging.getLogger(__name__)

_PACKAGE = Path(__file__).resolve().parents[1]
# In a wheel the recipes lie in the package, in a checkout at its top.
SHIPPED = (_PACKAGE / "recipes", _PACKAGE.parents[1] / "recipes")


def find_recipe(name: str | Path) -> Path:
    """The file of a recipe: a path, or the name of one that ships with the package, with or without `.yaml`.

    Raises:
        ConfigError: There is neither.
    """
    path = Path(name)
    if path.is_file():
        return path
    file = path.name if path.suffix in (".yaml", ".yml") else path.name + ".yaml"
    if path.parent in (Path(), Path("recipes")):
        for folder in SHIPPED:
            if (folder / file).is_file():
                return folder / file
    shipped = sorted({found.stem for folder in SHIPPED for found in folder.glob("*.yaml")})
    raise ConfigError(f"There is no recipe '{name}'", expected="a path, or one of " + ", ".join(shipped))


def load_recipe(name: str | Path, overrides: Sequence[str] = (), output: str | Path | None = None) -> RecipeConfig:
    """Read a recipe, apply overrides, check it.

    Args:
        name: See `find_recipe`.
        overrides: `key.path=value` each, the value in YAML: `rounds.0.steps=50`, `model.name=folder`.
        output: Replaces the recipe's output folder.

    Returns:
        The settings. What `evaluation.prompts` leaves out is taken from `prompts`, `offset` and `limit` excepted.

    Raises:
        ConfigError: The file cannot be read, a key is unknown, or a value is wrong.
    """
    values = read_recipe(name)
    for override in overrides:
        override_value(values, override)
    if output is not None:
        values["output"] = str(output)
    return recipe_of(values)


def read_recipe(name: str | Path) -> dict[str, Any]:
    """What stands in a recipe file, unchecked.

    Args:
        name: See `find_recipe`.

    Raises:
        ConfigError: The file cannot be read, or holds no mapping.
    """
    return read_mapping(find_recipe(name), "recipe")


def recipe_of(values: dict[str, Any]) -> RecipeConfig:
    """Settings from what stands in a recipe; see `load_recipe`.

    Raises:
        ConfigError: A key is unknown, or a value is wrong.
    """
    _inherit_prompts(values)
    recipe = RecipeConfig.from_dict(values)
    _check(recipe)
    return recipe


def round_prompts(recipe: RecipeConfig, index: int) -> PromptsConfig:
    """The prompts of one round: a slice of the recipe's own slice.

    Raises:
        ConfigError: The slice is empty.
    """
    whole, settings = recipe.prompts, recipe.rounds[index]
    left = None if whole.limit is None else whole.limit - settings.prompts_offset
    if left is not None and left < 1:
        raise ConfigError(
            f"Round {index + 1} has no prompts: 'prompts_offset' passes 'prompts.limit'",
            seen=settings.prompts_offset,
            expected=f"below {whole.limit}",
        )
    limits = [limit for limit in (left, settings.prompts_limit) if limit is not None]
    return dataclasses.replace(
        whole, offset=whole.offset + settings.prompts_offset, limit=min(limits) if limits else None
    )


def round_noise(settings: RoundConfig) -> NoiseSchedule:
    """The noise schedule of one round."""
    return NoiseSchedule(
        settings.schedule, settings.window_size, settings.t_min, settings.t_max, settings.schedule_phase
    )


def sweeps_blocks(recipe: RecipeConfig, settings: RoundConfig) -> bool:
    """Whether the collecting of a round makes states: what trains on states of its own making needs none."""
    return (recipe.adapter if recipe.mode == "adapter" else settings).states == "stored"


def _inherit_prompts(values: dict[str, Any]) -> None:
    """`evaluation.prompts` takes from `prompts` what it does not say itself, but not the slice."""
    own, evaluation = values.get("prompts"), values.get("evaluation")
    if isinstance(own, dict) and isinstance(evaluation, dict) and isinstance(evaluation.get("prompts"), dict):
        shared = {key: value for key, value in own.items() if key not in ("offset", "limit")}
        evaluation["prompts"] = {**shared, **evaluation["prompts"]}


def _warn_of_overlap(training: PromptsConfig, held_out: PromptsConfig) -> None:
    """Measuring on what was trained on flatters; it may be wanted, so it is only said."""
    if any(getattr(training, name) != getattr(held_out, name) for name in ("source", "subset", "split", "seed")):
        return
    ends = [math.inf if p.limit is None else p.offset + p.limit for p in (training, held_out)]
    if training.offset < ends[1] and held_out.offset < ends[0]:
        logger.warning("Some prompts of the evaluation are trained on too: what it says about quality is flattering")


def _check(recipe: RecipeConfig) -> None:
    """What no single setting can tell."""
    if not recipe.rounds:
        raise ConfigError("'rounds' is empty", expected="one or more rounds")
    check_mode(recipe.mode, recipe.rounds, recipe.adapter)
    check_peft(recipe.peft, recipe.mode, recipe.model, recipe.rounds)
    for index in range(len(recipe.rounds)):
        round_prompts(recipe, index)
        if recipe.rounds[index].warmup_ratio >= 1:
            raise ConfigError(f"'rounds[{index}].warmup_ratio' is too large", expected="a share below 1")
    check_sources(recipe)
    evaluation = recipe.evaluation
    if evaluation is None:
        return
    prompts = evaluation.prompts
    _warn_of_overlap(recipe.prompts, prompts)
    if evaluation.task != "none" and prompts.answer_field is None and prompts.source not in BUILTIN_TASKS:
        raise ConfigError(
            f"The task '{evaluation.task}' needs reference answers",
            seen="evaluation.prompts.answer_field: null",
            remedy="name the key that holds them, or set evaluation.task to none",
        )


_FULL_ONLY = (
    *("window_size", "ar_weight", "schedule", "t_min", "t_max", "schedule_phase", "states", "mask"),
    *("loss_positions", "loss_reduction", "temperature", "gradient_checkpointing", "attention"),
    *("fsdp", "fsdp_config", "deepspeed"),
)


def check_peft(peft: PeftSettings, mode: str, model: ModelConfig, rounds: Sequence[RoundConfig]) -> None:
    """Settings of peft that nothing would read, and quantised weights that nothing could train, are refused.

    Raises:
        ConfigError: There are such.
    """
    if peft.method == "none":
        if peft != PeftSettings():
            raise ConfigError(
                "'peft' is set and 'peft.method' is none", remedy="set it to lora or dora, or remove 'peft'"
            )
        if mode == "full" and model.quantization != "none":
            raise ConfigError(
                "Quantised weights cannot be trained",
                seen=f"model.quantization: {model.quantization}",
                remedy="set peft.method to lora or dora, or model.quantization to none",
            )
        return
    if mode != "full":
        raise ConfigError(
            "'peft' belongs to mode: full", seen=mode, remedy="remove it; 'adapter' describes the gated one"
        )
    for settings in rounds:
        if settings.learning_rate <= RoundConfig.learning_rate:
            rate = settings.learning_rate
            logger.warning("A learning rate of %g is made for whole weights; LoRA needs about 1e-4", rate)


def check_mode(mode: str, rounds: Sequence[RoundConfig], adapter: AdapterSettings) -> None:
    """Settings that the mode does not read are refused, not ignored.

    Raises:
        ConfigError: There is one, or there is no such mode.
    """
    if mode not in typing.get_args(Mode):
        raise ConfigError("There is no such mode", seen=mode, expected="full or adapter")
    if mode == "full":
        if adapter != AdapterSettings():
            raise ConfigError("'adapter' is set and 'mode' is full", remedy="set mode: adapter, or remove it")
        return
    defaults = {field.name: field.default for field in dataclasses.fields(RoundConfig)}
    if any(settings.steps is None for settings in rounds):
        raise ConfigError("'steps' is missing", remedy="with mode: adapter a round is as long as its steps")
    for index, settings in enumerate(rounds):
        if settings.learning_rate <= RoundConfig.learning_rate:
            logger.warning(
                "A learning rate of %g is made for whole weights; an adapter needs about 3e-3", settings.learning_rate
            )
        for name in _FULL_ONLY:
            if getattr(settings, name) != defaults[name]:
                raise ConfigError(
                    f"'rounds[{index}].{name}' has no meaning with mode: adapter",
                    seen=getattr(settings, name),
                    remedy="remove it: the base does not change, and drafts are made as decoding makes them",
                )


def override_value(values: dict[str, Any], override: str) -> None:
    """Apply one `key.path=value` in place; whether the key exists is checked when the settings are built.

    Raises:
        ConfigError: It cannot be read, or leads nowhere.
    """
    path, equals, text = override.partition("=")
    if not equals or not path.strip():
        raise ConfigError("An override cannot be read", seen=override, expected="key.path=value")
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"The value of '{path}' is not YAML", seen=text) from error
    assign(values, path, value)


def assign(values: dict[str, Any], path: str, value: Any) -> None:
    """Put a value in its place, given as `rounds.0.steps` or `rounds[0].steps`.

    Raises:
        ConfigError: There is no such place.
    """
    keys = [key for key in re.split(r"[.\[\]]+", path.strip()) if key]
    if not keys:
        raise ConfigError("A key is empty", seen=repr(path), expected="key.path")
    place: Any = values
    for key in keys[:-1]:
        if isinstance(place, dict):
            if place.get(key) is None:
                place[key] = {}
            place = place[key]
        else:
            place = _item(place, key, path)
    if isinstance(place, dict):
        place[keys[-1]] = value
    else:
        _item(place, keys[-1], path)
        place[int(keys[-1])] = value


def _item(place: Any, key: str, path: str) -> Any:
    if not isinstance(place, list):
        raise ConfigError(f"'{path}' leads into a single value", seen=repr(place), expected="a mapping or a list")
    if not key.isdecimal() or int(key) >= len(place):
        raise ConfigError(f"'{path}' leads to no entry", seen=key, expected=f"a number from 0 to {len(place) - 1}")
    return place[int(key)]
