"""Who is measured: our decoders, and what the library itself offers, each behind the same timed call."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch

from jacobi_forcing.backbone import Backbone
from jacobi_forcing.bench.cost import synchronise
from jacobi_forcing.blocks import first_eos
from jacobi_forcing.config import DecodeConfig
from jacobi_forcing.decode.engine import ROWS
from jacobi_forcing.decode.generate import GenerateOutput, generate
from jacobi_forcing.decode.stats import RowStats
from jacobi_forcing.errors import ConfigError
from jacobi_forcing.evaluate.quality import budget
from jacobi_forcing.loading import GREEDY, Loaded
from jacobi_forcing.trajectories.prompts import Prompt

LIBRARY = "library"
PROMPT_LOOKUP = "prompt-lookup"
ASSISTED = "assisted"
LOOKUP = "prompt_lookup_num_tokens"
AR: Literal["ar"] = "ar"
LOOKUP_TOKENS = 10
"""Tokens that prompt look-up proposes at a time, as the library's documentation suggests."""


@dataclasses.dataclass(frozen=True)
class Turn:
    """One timed call over a batch.

    Attributes:
        ids: Each row's answer, without the prompt, its end token included.
        limit: Most tokens that each row was allowed.
        seconds: Wall time, prefill included.
        widths: Tokens a row of each forward pass of the model, padding included, prefill first; a forward of a batch
            counts once.
        marks: For each forward pass, the wall time after which its tokens were known: when the next one began, or, for
            the last, `seconds`.
        assistant_forwards: Forward passes of the assistant, if there is one.
        rows: Counts of each row; None for the library's decoders, which keep none.
    """

    ids: list[list[int]]
    limit: int
    seconds: float
    widths: list[int]
    marks: list[float]
    assistant_forwards: int = 0
    rows: list[RowStats] | None = None

    @property
    def tokens(self) -> int:
        """Generated tokens of all rows, end tokens included."""
        return sum(map(len, self.ids))

    @property
    def each(self) -> list[int]:
        """Forward passes of each row: those that a row of its own would have taken.

        The library's batches are greedy, one token a forward and row; its decoders that draft take one row at a time.
        """
        if self.rows is not None:
            return [row.forwards for row in self.rows]
        return [len(self.widths)] if len(self.ids) == 1 else [len(ids) for ids in self.ids]

    @property
    def row_forwards(self) -> int:
        """Forward passes summed over rows."""
        return sum(self.each)


@dataclasses.dataclass(frozen=True)
class Contestant:
    """One way to decode.

    Attributes:
        name: What tables call it: a decoder of ours, or one of the library's.
        decode: Settings of our decoder; None for the library's.
        library: What the library's generate is given beside the greedy settings.
        assistant: The model that drafts, for assisted decoding.
        single: Whether it takes one row at a time only.
    """

    name: str
    decode: DecodeConfig | None = None
    library: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    assistant: Loaded | None = None
    single: bool = False

    @property
    def settings(self) -> dict[str, Any]:
        """Its settings, for JSON."""
        if self.decode is not None:
            return self.decode.to_dict()
        return {**self.library, **({"assistant": self.assistant.config.name} if self.assistant is not None else {})}

    @property
    def label(self) -> str:
        """What tells it from others of its name, in words: settings that are not the defaults. May be empty."""
        if self.decode is not None:
            return label_of(self.decode)
        told = [f"drafts of {self.library[LOOKUP]}"] if LOOKUP in self.library else []
        return ", ".join(told if self.assistant is None else [*told, Path(self.assistant.config.name).name])

    def take(self, loaded: Loaded, backbone: Backbone, batch: Sequence[Prompt], max_new_tokens: int) -> Turn:
        """Decode a batch through the public entry, as a user would, and time it.

        Args:
            loaded: Model and tokenizer.
            backbone: The same model.
            batch: Prompts of any lengths; shorter ones are padded on the left.
            max_new_tokens: Longest answer, tokens; less where the model's context ends before.
        """
        longest = max(len(prompt.ids) for prompt in batch)
        limit = budget(backbone, longest, max_new_tokens)
        ids, mask = padded(batch, longest, loaded.tokenizer.pad_token_id or 0, backbone.device)
        options: dict[str, Any] = {**GREEDY, "attention_mask": mask, "max_new_tokens": limit}
        helper = None if self.assistant is None else self.assistant.model
        with counted(loaded.model) as passes, counted(helper) as helped:
            call = self._ours(loaded) if self.decode is not None else self._theirs(loaded)
            synchronise(backbone.device)
            started = time.perf_counter()
            out = call(ids, return_dict_in_generate=True, **options)
            synchronise(backbone.device)
            seconds = time.perf_counter() - started
        answers = [_cut(row, backbone.eos_ids) for row in out.sequences[:, longest:].tolist()]
        stats = out.stats.rows if isinstance(out, GenerateOutput) and out.stats is not None else None
        marks = [mark - started for mark in passes.starts[1:]] + [seconds]
        return Turn(answers, limit, seconds, passes.widths, marks, len(helped.widths), stats)

    def _ours(self, loaded: Loaded) -> Any:
        vocabulary = loaded.vocabulary if self.decode and self.decode.draft_init == "vocabulary" else None
        return lambda ids, **options: generate(
            loaded.model, ids, decode=self.decode, vocabulary=vocabulary, tokenizer=loaded.tokenizer, **options
        )

    def _theirs(self, loaded: Loaded) -> Any:
        extra = dict(self.library)
        if self.assistant is not None:
            extra["assistant_model"] = self.assistant.model
            heads = [Backbone(one.model).vocab_size for one in (loaded, self.assistant)]
            if heads[0] != heads[1]:
                # One tokenizer, heads padded to unequal sizes: the library then insists on being shown both.
                extra |= {"tokenizer": loaded.tokenizer, "assistant_tokenizer": self.assistant.tokenizer}
        # Not `model.generate`: a model loaded with trust_remote_code=True may have ours there.
        plain = type(loaded.model).generate  # type: ignore[attr-defined]  # a mixin's, unknown to mypy
        return lambda ids, **options: plain(loaded.model, ids, **extra, **options)


def contestants(decode: Sequence[DecodeConfig], rivals: Sequence[Contestant] = ()) -> list[Contestant]:
    """The library's greedy generate, `ar`, the rivals and the decoders, each once.

    Decoders that differ only in settings which they do not use are one.
    """
    asked = dict.fromkeys(used(config) for config in [DecodeConfig(decoder=AR), *decode])
    ar, *ours = (Contestant(config.decoder, config) for config in asked)
    return [Contestant(LIBRARY), ar, *rivals, *ours]


def prompt_lookup(tokens: int = LOOKUP_TOKENS) -> Contestant:
    """The library's prompt look-up decoding: drafts of up to `tokens` tokens that stood behind the same words before.

    Raises:
        ConfigError: `tokens` is below 1.
    """
    if tokens < 1:
        raise ConfigError("'lookup_tokens' is too small", seen=tokens, expected="at least 1")
    return Contestant(PROMPT_LOOKUP, library={LOOKUP: tokens}, single=True)


def assisted(loaded: Loaded, assistant: Loaded) -> Contestant:
    """The library's assisted decoding: a smaller model drafts.

    Raises:
        ConfigError: The assistant has another tokenizer.
    """
    if loaded.tokenizer.get_vocab() != assistant.tokenizer.get_vocab():
        raise ConfigError(
            f"The assistant '{assistant.config.name}' has another tokenizer than '{loaded.config.name}'",
            expected="the same ids for the same text",
            remedy="name a smaller model of the same family",
        )
    return Contestant(ASSISTED, assistant=assistant, single=True)


def used(config: DecodeConfig) -> DecodeConfig:
    """The same decoder with every setting that it does not use at its default."""
    name, fill = config.decoder, config.draft_init
    pooled = ROWS[name].recycles
    unused = {"sample_seed"}
    if name == AR:
        unused |= {"block_size", "draft_init", "draft_seed", "prompt_ngrams"}
    if not pooled:
        unused.add("candidates")
    if name != "multiblock":
        unused |= {"num_blocks", "spawn_ratio"}
    if fill == "last":
        unused.add("draft_seed")
    if not (pooled and config.candidates) and fill != "pool":
        unused.add("prompt_ngrams")
    defaults = DecodeConfig().to_dict()
    return dataclasses.replace(config, **{field: defaults[field] for field in unused})


def label_of(config: DecodeConfig) -> str:
    """What tells two results of one decoder and block size apart: `name=value, …` of all that is not the default."""
    plain = DecodeConfig(decoder=config.decoder, block_size=config.block_size).to_dict()
    return ", ".join(f"{name}={value}" for name, value in config.to_dict().items() if value != plain[name])


def padded(batch: Sequence[Prompt], longest: int, pad: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and attention mask [rows, longest] of prompts padded on the left."""
    missing = [longest - len(prompt.ids) for prompt in batch]
    ids = [[pad] * short + list(prompt.ids) for short, prompt in zip(missing, batch, strict=True)]
    mask = [[0] * short + [1] * (longest - short) for short in missing]
    return torch.tensor(ids, device=device), torch.tensor(mask, device=device)


@dataclasses.dataclass
class Passes:
    """Forward passes that a model has made: the tokens a row of each, and when it began."""

    widths: list[int] = dataclasses.field(default_factory=list)
    starts: list[float] = dataclasses.field(default_factory=list)


@contextlib.contextmanager
def counted(model: torch.nn.Module | None) -> Iterator[Passes]:
    """Count a model's forward passes, whoever asks for them; none where there is no model."""
    passes = Passes()

    def begin(module: torch.nn.Module, args: tuple[Any, ...]) -> None:
        # The host asks for a forward when it knows the tokens of the one before, on a GPU too.
        passes.starts.append(time.perf_counter())

    def count(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        passes.widths.append(kwargs["input_ids"].shape[1])

    handles = (
        [model.register_forward_pre_hook(begin), model.register_forward_hook(count, with_kwargs=True)]
        if model is not None
        else []
    )
    try:
        yield passes
    finally:
        for handle in handles:
            handle.remove()


def _cut(ids: list[int], eos_ids: Sequence[int]) -> list[int]:
    """An answer without what pads it behind its end token."""
    end = first_eos(ids, eos_ids)
    return ids if end is None else ids[: end + 1]
