"""Options that several verbs share. Help texts are those of the settings, so that they cannot drift apart."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Mapping
from typing import Annotated, Any, TypeVar

import typer

from jacobi_forcing import provenance
from jacobi_forcing.config import (
    CollectConfig,
    DecodeConfig,
    EvaluationConfig,
    ModelConfig,
    PeftSettings,
    PromptsConfig,
    RoundConfig,
)
from jacobi_forcing.schema import Config, dataclasses_help

DEFAULT_BUDGET = 256
"""Longest answer of `jforce generate` where the model's context leaves room, tokens."""


def option(config: type[Config], field: str, *names: str, **details: Any) -> Any:
    """A typer option for one field of a settings class, with its help text."""
    text = dataclasses_help(config, field)
    kind = typing.get_type_hints(config)[field]
    choices = typing.get_args(kind) if typing.get_origin(kind) is typing.Literal else ()
    if not all(choice in text for choice in choices):
        text += f" ({', '.join(choices)})"
    if not text.split()[0].endswith((":", ",")):  # names of choices stay as they are typed
        text = text[0].upper() + text[1:]
    return typer.Option(*(names or (f"--{field.replace('_', '-')}",)), help=text + ".", **details)


def several(field: str) -> Any:
    """A repeatable option for a setting of decoders; where it is not given, the setting's default is measured alone."""
    return option(DecodeConfig, field, show_default=str(getattr(DecodeConfig, field)))


_Kind = TypeVar("_Kind", bound=Config)


def settings(kind: type[_Kind], arguments: Mapping[str, Any], **others: Any) -> _Kind:
    """Build settings from a verb's arguments of the same names; `others` are those that are called differently there.

    Raises:
        ConfigError: A value is wrong.
    """
    values = {field.name: arguments[field.name] for field in dataclasses.fields(kind) if field.name in arguments}
    return kind.from_dict({**values, **others})


def typed(context: typer.Context, kind: type[Config], arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Those arguments, of the same names as the fields of a settings class, that the caller gave."""
    given = {}
    for field in dataclasses.fields(kind):
        source = context.get_parameter_source(field.name)
        if source is not None and source.name != "DEFAULT":
            given[field.name] = arguments[field.name]
    return given


def label(model: ModelConfig) -> str:
    """What tables call a model: its name, and that of its adapter, without what is private to this machine."""
    name = provenance.portable(model.name)
    return name if model.adapter is None else f"{name} + {provenance.portable(model.adapter)}"


Model = Annotated[str, option(ModelConfig, "name", "--model", "-m")]
DType = Annotated[str, option(ModelConfig, "dtype")]
Device = Annotated[str, option(ModelConfig, "device")]
Adapter = Annotated[str | None, option(ModelConfig, "adapter")]
PackWeights = Annotated[bool, option(ModelConfig, "pack_weights")]
Quantization = Annotated[str, option(ModelConfig, "quantization")]
TrustRemoteCode = Annotated[bool, option(ModelConfig, "trust_remote_code")]

Source = Annotated[str, option(PromptsConfig, "source", "--prompts", "-p")]
Subset = Annotated[str | None, option(PromptsConfig, "subset")]
Split = Annotated[str, option(PromptsConfig, "split")]
PromptField = Annotated[str, option(PromptsConfig, "field")]
AnswerField = Annotated[str | None, option(PromptsConfig, "answer_field")]
Template = Annotated[str, option(PromptsConfig, "template")]
Offset = Annotated[int, option(PromptsConfig, "offset")]
Limit = Annotated[int | None, option(PromptsConfig, "limit", show_default="all")]
PromptSeed = Annotated[int, option(PromptsConfig, "seed", "--prompts-seed")]

Decoder = Annotated[str, option(DecodeConfig, "decoder", "--decoder", "-d")]
BlockSize = Annotated[int, option(DecodeConfig, "block_size", "--block-size", "-n")]
DraftInit = Annotated[str, option(DecodeConfig, "draft_init")]
DraftSeed = Annotated[int, option(DecodeConfig, "draft_seed")]
Candidates = Annotated[int, option(DecodeConfig, "candidates")]
NumBlocks = Annotated[int, option(DecodeConfig, "num_blocks")]
SpawnRatio = Annotated[float, option(DecodeConfig, "spawn_ratio")]
PromptNgrams = Annotated[bool, option(DecodeConfig, "prompt_ngrams", "--prompt-ngrams/--no-prompt-ngrams")]
SampleSeed = Annotated[
    int | None, option(DecodeConfig, "sample_seed", show_default="drawn from torch's global generator")
]
StaticShapes = Annotated[bool, option(DecodeConfig, "static_shapes")]

Temperature = Annotated[
    float | None,
    typer.Option(min=0, help="Sample at this temperature instead of decoding greedily; 0 is greedy.", show_default="0"),
]
TopK = Annotated[
    int | None,
    typer.Option(min=1, help="Sample among this many most probable tokens.", show_default="all"),
]
TopP = Annotated[
    float | None,
    typer.Option(
        min=0,
        max=1,
        help="Sample among the most probable tokens that hold this share of probability.",
        show_default="1",
    ),
]

MaxNewTokens = Annotated[int, option(CollectConfig, "max_new_tokens")]
CollectBatch = Annotated[int, option(CollectConfig, "batch_size")]
ShardSize = Annotated[int, option(CollectConfig, "shard_size")]
FirstState = Annotated[str, option(CollectConfig, "draft_init")]
CollectSeed = Annotated[int, option(CollectConfig, "seed")]

Decoders = Annotated[
    list[str] | None,
    option(DecodeConfig, "decoder", "--decoder", "-d", show_default="window; ar is always measured"),
]
BlockSizes = Annotated[list[int] | None, option(DecodeConfig, "block_size", "--block-size", "-n", show_default="16")]
DraftInits = Annotated[list[str] | None, several("draft_init")]
CandidateCounts = Annotated[list[int] | None, several("candidates")]
BlockCounts = Annotated[list[int] | None, several("num_blocks")]
SpawnRatios = Annotated[list[float] | None, several("spawn_ratio")]
SplitOrTest = Annotated[
    str | None, option(PromptsConfig, "split", show_default="heldout of a builtin source, test else")
]
TaskName = Annotated[
    str | None, option(EvaluationConfig, "task", show_default="the one of a builtin source, none else")
]

Attention = Annotated[str, option(RoundConfig, "attention")]
Peft = Annotated[str, option(PeftSettings, "method", "--peft")]
PeftRank = Annotated[int, option(PeftSettings, "rank", "--peft-rank")]
PeftAlpha = Annotated[float | None, option(PeftSettings, "alpha", "--peft-alpha", show_default="2 r")]
PeftTarget = Annotated[
    list[str] | None, option(PeftSettings, "targets", "--peft-target", show_default="all linear layers")
]
PeftMerge = Annotated[bool, option(PeftSettings, "merge", "--peft-merge/--no-peft-merge")]

RoundBlockSize = Annotated[int, option(RoundConfig, "block_size", "--block-size", "-n")]

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object as the last line of standard output.")]
