"""Settings as frozen dataclasses: units in each field's metadata, unknown keys refused, YAML there and back."""

from __future__ import annotations

import dataclasses
import difflib
import math
import types
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, Self

import yaml

from jacobi_forcing.errors import ConfigError

Decoder = Literal["ar", "jacobi", "window"]
DraftInit = Literal["prompt", "vocabulary"]
Schedule = Literal["progressive"]
SchedulePhase = Literal["fixed", "random"]
Mask = Literal["noise_conditioned", "noise_conditioned_window", "clean_context"]
Template = Literal["auto", "chat", "raw"]
Task = Literal["none", "word_problems", "gsm8k"]
Optimizer = Literal["adamw", "muon"]
Misfits = Literal["error", "skip"]


def _option(
    default: Any = dataclasses.MISSING, *, help: str, at_least: float | None = None, above: float | None = None
) -> Any:
    """A dataclass field with its help text, unit and range."""
    metadata = {"help": help, "at_least": at_least, "above": above}
    if isinstance(default, (list, tuple)):
        return dataclasses.field(default=tuple(default), metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def _matches(value: Any, kind: Any) -> bool:
    origin = typing.get_origin(kind)
    if origin is Literal:
        return value in typing.get_args(kind)
    if origin in (types.UnionType, typing.Union):
        return any(_matches(value, arm) for arm in typing.get_args(kind))
    if origin is tuple:
        inner = typing.get_args(kind)[0]
        return isinstance(value, tuple) and all(_matches(item, inner) for item in value)
    if kind is float:
        return isinstance(value, (int, float)) and not isinstance(value, bool)
    if kind is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return isinstance(value, kind)


def _describe(kind: Any) -> str:
    origin = typing.get_origin(kind)
    if origin is Literal:
        return "one of " + ", ".join(map(str, typing.get_args(kind)))
    if origin in (types.UnionType, typing.Union):
        return " or ".join(_describe(arm) for arm in typing.get_args(kind))
    if origin is tuple:
        return f"a list of {_describe(typing.get_args(kind)[0])}"
    return {type(None): "null", str: "text", int: "a whole number", float: "a number", bool: "true or false"}.get(
        kind, getattr(kind, "__name__", str(kind))
    )


@dataclasses.dataclass(frozen=True)
class Config:
    """What every settings class shares: checks on construction, dict and YAML round trip."""

    def __post_init__(self) -> None:
        hints = typing.get_type_hints(type(self))
        for field in dataclasses.fields(self):
            value, kind = getattr(self, field.name), hints[field.name]
            if not _matches(value, kind):
                raise ConfigError(f"'{field.name}' has a wrong value", seen=repr(value), expected=_describe(kind))
            if value == ():
                raise ConfigError(f"'{field.name}' is empty", expected="one or more")
            values = value if isinstance(value, tuple) else (value,)
            low, above = field.metadata.get("at_least"), field.metadata.get("above")
            for item in values:
                if isinstance(item, float) and not math.isfinite(item):
                    raise ConfigError(f"'{field.name}' has a wrong value", seen=item, expected="a finite number")
                if low is not None and item is not None and item < low:
                    raise ConfigError(f"'{field.name}' is too small", seen=item, expected=f"at least {low}")
                if above is not None and item is not None and item <= above:
                    raise ConfigError(f"'{field.name}' is too small", seen=item, expected=f"more than {above}")

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], where: str = "") -> Self:
        """Build from a mapping; nested mappings become nested settings.

        Raises:
            ConfigError: A key is unknown (the nearest known one is named), missing, or its value is wrong.
        """
        if not isinstance(values, Mapping):
            raise ConfigError(
                f"'{where.rstrip('.') or cls.__name__}' is not a mapping",
                seen=repr(values),
                expected="key: value lines",
            )
        hints = typing.get_type_hints(cls)
        known = [field.name for field in dataclasses.fields(cls)]
        for key in values:
            if key not in known:
                near = difflib.get_close_matches(str(key), known, n=1)
                hint = f"did you mean '{near[0]}'?" if near else "remove it"
                raise ConfigError(f"Unknown key '{where}{key}'", expected="one of " + ", ".join(known), remedy=hint)
        arguments = {key: _build(hints[key], value, f"{where}{key}") for key, value in values.items()}
        missing = [
            f.name
            for f in dataclasses.fields(cls)
            if f.name not in arguments and f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING
        ]
        if missing:
            raise ConfigError(f"'{where}{missing[0]}' is missing", expected=dataclasses_help(cls, missing[0]))
        try:
            return cls(**arguments)
        except ConfigError as error:
            if not where:
                raise
            raise ConfigError(f"In '{where.rstrip('.')}': {error}") from error

    def to_dict(self) -> dict[str, Any]:
        """A plain dict (tuples become lists) that `from_dict` turns back into an equal object."""
        return {field.name: _plain(getattr(self, field.name)) for field in dataclasses.fields(self)}

    @classmethod
    def load_yaml(cls, path: str | Path) -> Self:
        """Read a YAML file.

        Raises:
            ConfigError: The file is missing, is not YAML, or holds wrong settings.
        """
        try:
            values = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
        except OSError as error:
            raise ConfigError(f"Cannot read '{path}'", seen=error.strerror, remedy="check the path") from error
        except yaml.YAMLError as error:
            raise ConfigError(f"'{path}' is not valid YAML", seen=" ".join(str(error).split())) from error
        return cls.from_dict(values if values is not None else {})

    def to_yaml(self) -> str:
        """The settings as YAML text."""
        return yaml.safe_dump(self.to_dict(), sort_keys=False)


def dataclasses_help(cls: type[Config], name: str) -> str:
    """The help text of one field."""
    return next(str(f.metadata.get("help", "a value")) for f in dataclasses.fields(cls) if f.name == name)


def _build(kind: Any, value: Any, where: str) -> Any:
    origin = typing.get_origin(kind)
    if isinstance(kind, type) and issubclass(kind, Config):
        return value if isinstance(value, kind) else kind.from_dict(value, where + ".")
    if origin in (types.UnionType, typing.Union):
        if value is None:
            return None
        return _build(next(arm for arm in typing.get_args(kind) if arm is not type(None)), value, where)
    if origin is tuple and isinstance(value, (list, tuple)):
        inner = typing.get_args(kind)[0]
        return tuple(_build(inner, item, f"{where}[{index}]") for index, item in enumerate(value))
    if kind is float and isinstance(value, str):
        # YAML 1.1 reads "1e-6" as text; a person means the number.
        try:
            return float(value)
        except ValueError:
            return value
    return value


def _plain(value: Any) -> Any:
    if isinstance(value, Config):
        return value.to_dict()
    if isinstance(value, (tuple, list)):
        return [_plain(item) for item in value]
    return value


@dataclasses.dataclass(frozen=True)
class DecodeConfig(Config):
    """How to decode: `generate(..., decode=DecodeConfig(...))`."""

    decoder: Decoder = _option(
        "window", help="ar: one token a forward; jacobi: block after block; window: a running window of drafts"
    )
    block_size: int = _option(16, help="draft tokens in flight, tokens", at_least=1)
    draft_init: DraftInit = _option("prompt", help="what fills new draft slots: prompt or vocabulary tokens")
    draft_seed: int = _option(0, help="seed of the fill; it never changes the text", at_least=0)


@dataclasses.dataclass(frozen=True)
class ModelConfig(Config):
    """Which model, and how it is loaded."""

    name: str = _option(help="hub name, folder, or builtin:word-problems")
    dtype: Literal["float32", "bfloat16", "float16"] = _option("float32", help="dtype of the weights")
    device: str = _option("auto", help="torch device; auto takes a GPU where there is one")
    trust_remote_code: bool = _option(False, help="run modelling code that comes with the model")


@dataclasses.dataclass(frozen=True)
class PromptsConfig(Config):
    """Where prompts come from and how they are put to the model."""

    source: str = _option(help="path of a .jsonl file, hub data set name, or builtin:word-problems")
    subset: str | None = _option(None, help="configuration of a hub data set, or mixed/regular of the builtin one")
    split: str = _option("train", help="split of a hub data set, or train/heldout of the builtin one")
    field: str = _option("prompt", help="key that holds the prompt")
    answer_field: str | None = _option(None, help="key that holds the reference answer, for evaluation only")
    template: Template = _option("auto", help="chat: by the chat template; raw: as it is; auto: chat if there is one")
    offset: int = _option(0, help="prompts to skip", at_least=0)
    limit: int | None = _option(None, help="prompts to use; null for all", at_least=1)
    seed: int = _option(0, help="seed of the builtin source", at_least=0)


@dataclasses.dataclass(frozen=True)
class CollectConfig(Config):
    """How trajectories are collected."""

    max_new_tokens: int = _option(512, help="longest response, tokens", at_least=1)
    batch_size: int = _option(8, help="responses generated or swept side by side", at_least=1)
    shard_size: int = _option(64, help="responses per Parquet shard; what a kill can lose", at_least=1)
    draft_init: DraftInit = _option("prompt", help="what the first state of a block is drawn from")
    seed: int = _option(0, help="seed of the first states", at_least=0)


@dataclasses.dataclass(frozen=True)
class RoundConfig(Config):
    """One round: collect with the current model, then train."""

    block_size: int = _option(help="n, tokens per block", at_least=1)
    window_size: int = _option(help="w of Eq. 7, blocks per noise cycle", at_least=1)
    steps: int = _option(help="optimiser steps", at_least=1)
    learning_rate: float = _option(1e-6, help="peak learning rate", above=0)
    batch_size: int = _option(4, help="packed rows per step and device", at_least=1)
    gradient_accumulation_steps: int = _option(1, help="batches per optimiser step", at_least=1)
    max_length: int = _option(2048, help="longest packed row, tokens (noisy and clean counted)", at_least=8)
    ar_weight: float = _option(1.0, help="w of Eq. 9, weight of the AR loss", at_least=0)
    schedule: Schedule = _option("progressive", help="noise ratio over blocks (Eq. 7)")
    schedule_phase: SchedulePhase = _option("fixed", help="where a response starts the cycle: fixed (at 0) or random")
    mask: Mask = _option(
        "noise_conditioned",
        help="noisy blocks see noisy blocks (noise_conditioned, Fig. 2b), those of their window "
        "(noise_conditioned_window), or clean ones (clean_context, the CLLM baseline)",
    )
    optimizer: Optimizer = _option("adamw", help="adamw (the paper), or muon for the layers' matrices")
    lr_scheduler: str = _option("cosine", help="learning-rate schedule of transformers")
    warmup_ratio: float = _option(0.03, help="share of the steps that warms up", at_least=0)
    prompts_offset: int = _option(0, help="prompts to skip in this round", at_least=0)
    prompts_limit: int | None = _option(None, help="prompts to collect in this round; null for all", at_least=1)
    misfits: Misfits = _option("error", help="a sample that does not fit in a row: error, or skip it and count it")
    gradient_checkpointing: bool = _option(False, help="compute activations twice instead of keeping them in memory")
    save_steps: int = _option(100, help="steps between checkpoints; what a kill can lose", at_least=1)


@dataclasses.dataclass(frozen=True)
class EvaluationConfig(Config):
    """What is measured at the end, for the base and the trained model."""

    prompts: PromptsConfig = _option(help="prompts that were not trained on")
    task: Task = _option("none", help="how answers are graded; none reports speed and exactness only")
    decode: tuple[DecodeConfig, ...] = _option((DecodeConfig(),), help="decoders to compare with ar")
    speed_prompts: int | None = _option(None, help="prompts that are timed one by one; null for all", at_least=1)
    max_new_tokens: int = _option(512, help="longest answer, tokens", at_least=1)
    batch_size: int = _option(16, help="answers generated side by side for grading", at_least=1)
    probe_steps: int | None = _option(
        None, help="training steps between probes of TPF and quality; null: none", at_least=1
    )
    probe_prompts: int = _option(16, help="prompts per probe", at_least=1)
    every_round: bool = _option(False, help="measure the model of each round, not of the last one only")


@dataclasses.dataclass(frozen=True)
class RecipeConfig(Config):
    """A whole run: model, prompts, rounds, evaluation."""

    model: ModelConfig = _option(help="the model to start from")
    prompts: PromptsConfig = _option(help="prompts to train on")
    rounds: tuple[RoundConfig, ...] = _option(help="one or more rounds")
    evaluation: EvaluationConfig | None = _option(None, help="what to measure; null for nothing")
    collect: CollectConfig = _option(CollectConfig(), help="how trajectories are collected")
    output: str = _option("runs/run", help="folder of the run, relative to the working folder")
    seed: int = _option(0, help="seed of everything random", at_least=0)
