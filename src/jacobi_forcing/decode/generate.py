"""The public entry: a drop-in `custom_generate` for transformers, also callable directly."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList
from transformers.utils import ModelOutput

from jacobi_forcing.backbone import Backbone
from jacobi_forcing.config import DecodeConfig
from jacobi_forcing.decode.conventions import check_mask, from_caller, in_force, override, refuse, split_prompts
from jacobi_forcing.decode.engine import make_row, run
from jacobi_forcing.decode.rows import Row
from jacobi_forcing.decode.sampling import make_choose
from jacobi_forcing.decode.saved import saved_decode
from jacobi_forcing.decode.stats import DecodeStats
from jacobi_forcing.decode.stopping import Ends, with_stop_strings
from jacobi_forcing.errors import ConfigError


@dataclass
class GenerateOutput(ModelOutput):
    """What `generate` returns with `return_dict_in_generate=True`.

    Attributes:
        sequences: Ids [rows, longest], prompt included, padded on the right.
        stats: Tokens, forwards and tokens per forward, per row too.
    """

    sequences: Tensor | None = None
    stats: DecodeStats | None = None


def generate(
    model: PreTrainedModel,
    input_ids: Tensor | None = None,
    logits_processor: LogitsProcessorList | None = None,
    stopping_criteria: StoppingCriteriaList | None = None,
    generation_config: GenerationConfig | None = None,
    streamer: Any = None,
    decode: DecodeConfig | Mapping[str, Any] | None = None,
    tokenizer: Any = None,
    vocabulary: Sequence[int] | None = None,
    stop_strings: str | list[str] | None = None,
    **kwargs: Any,
) -> Tensor | GenerateOutput:
    """Decode several tokens a forward pass, into the text that the library's `generate` would write one by one.

    Two ways in, with the same result::

        model.generate(**inputs, custom_generate=generate, decode=DecodeConfig(...), max_new_tokens=64)
        generate(model, input_ids, attention_mask=mask, decode=DecodeConfig(...), max_new_tokens=64)

    Args:
        model: A decoder-only model whose cache can roll back.
        input_ids: Prompt ids [rows, length]; a batch is padded on the left, with an `attention_mask`.
        logits_processor: The caller's own; in anything but the plain ones it is refused by name.
        stopping_criteria: The caller's own, asked about each new token of a row: ids [1, length] without padding.
        generation_config: The library's settings, by default the model's own; see `override` for `temperature=0`.
        streamer: The library's streamer protocol, for one row; gets each accepted run of tokens as it is committed, and
            the guesses of every sweep if it has a method `put_draft(ids)`.
        decode: The decoder, or a dict of its settings; where None, `generation_config.jacobi_forcing`, else the
            defaults of `DecodeConfig`.
        tokenizer: For stop strings; its ids are also what `draft_init="vocabulary"` draws from.
        vocabulary: Those ids themselves.
        stop_strings: As the library takes them; those in a generation config need the direct way in.
        **kwargs: What the library's `generate` takes (`attention_mask`, `max_new_tokens`, `do_sample`, …).

    Returns:
        Ids [rows, longest], prompt included, padded on the right; or a `GenerateOutput`.

    Raises:
        CacheError, ModelError: The model cannot verify drafts, or the prompt does not fit its context.
        ConfigError: The call, or the model's own settings, ask for what is not supported.
        DataError: A prompt is empty or padded on the right.
    """
    asked = _Asked(_settings(decode), streamer, tokenizer, vocabulary, stop_strings)
    prepared = hasattr(generation_config, "_eos_token_tensor")
    if prepared and input_ids is not None and stopping_criteria is not None and generation_config is not None:
        asked = asked.completed()
        return _decode(asked, model, input_ids, logits_processor, stopping_criteria, generation_config, **kwargs)
    check_mask(input_ids, kwargs.get("attention_mask"))
    # Where both names are used, the library says so.
    kwargs["input_ids" if kwargs.get("inputs") is not None else "inputs"] = input_ids
    lists = {"logits_processor": logits_processor, "stopping_criteria": stopping_criteria}
    return _through_library(asked, model, generation_config, {**lists, **kwargs})


def _settings(decode: Any) -> DecodeConfig | None:
    if isinstance(decode, Mapping):
        return DecodeConfig.from_dict(decode, "decode.")
    if decode is None or isinstance(decode, DecodeConfig):
        return decode
    seen = type(decode).__name__
    raise ConfigError("'decode' has a wrong value", seen=seen, expected="a DecodeConfig, or a dict of its fields")


@dataclass(frozen=True)
class _Asked:
    """What a caller asked of us, not of the library; see `generate`."""

    decode: DecodeConfig | None
    streamer: Any
    tokenizer: Any
    vocabulary: Sequence[int] | None
    stop_strings: str | list[str] | None
    backbone: Backbone | None = None

    def completed(self) -> _Asked:
        """With what the library, which is calling us, keeps to itself."""
        missing = [name for name in ("streamer", "tokenizer") if getattr(self, name) is None]
        return replace(self, **{name: from_caller(name) for name in missing})

    def ids_for_drafts(self, config: DecodeConfig) -> Sequence[int] | None:
        """The vocabulary, read from the tokenizer where drafts are drawn from it."""
        if self.vocabulary is None and self.tokenizer is not None and config.draft_init == "vocabulary":
            return sorted(set(self.tokenizer.get_vocab().values()))
        return self.vocabulary


def _through_library(
    asked: _Asked,
    model: PreTrainedModel,
    generation_config: GenerationConfig | None,
    kwargs: dict[str, Any],
) -> Tensor | GenerateOutput:
    """Called directly: the library prepares lengths, end tokens and masks, then calls back with all of them."""
    backbone = Backbone(model)  # A model that does not fit is refused before the library runs any part of it.
    decode = asked.decode or saved_decode(generation_config, model.generation_config)
    asked = replace(asked, decode=decode, backbone=backbone)
    if in_force("temperature", model, generation_config, kwargs) == 0:
        generation_config, kwargs = override(model, generation_config, kwargs, do_sample=False, temperature=1.0)
    strings = asked.stop_strings or in_force("stop_strings", model, generation_config, kwargs)
    if strings:
        # Ours to add: the library would ask for the tokenizer, which it takes away from a callable.
        generation_config, kwargs = override(model, generation_config, kwargs, stop_strings=None)
        asked = replace(asked, stop_strings=strings)
    # Not `model.generate`: a model loaded with trust_remote_code=True may have ours there.
    return type(model).generate(  # type: ignore[attr-defined]  # a mixin's, unknown to mypy
        model,
        generation_config=generation_config,
        streamer=asked.streamer,
        custom_generate=functools.partial(_decode, asked),
        **kwargs,
    )


def _decode(
    asked: _Asked,
    model: PreTrainedModel,
    input_ids: Tensor,
    logits_processor: LogitsProcessorList | None,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    **model_kwargs: Any,
) -> Tensor | GenerateOutput:
    """Decode what the library has prepared."""
    config = asked.decode or saved_decode(generation_config)
    if asked.stop_strings:
        stopping_criteria = with_stop_strings(stopping_criteria, asked.stop_strings, asked.tokenizer)
    refuse(generation_config, stopping_criteria, {**model_kwargs, "assistant_model": from_caller("assistant_model")})
    streamer = asked.streamer
    if streamer is not None and len(input_ids) > 1:
        raise ConfigError("A streamer takes one text at a time", seen=f"{len(input_ids)} rows", expected="1 row")
    backbone = asked.backbone or Backbone(model)
    ends = Ends.of(stopping_criteria, input_ids.shape[1], input_ids.device)
    vocabulary, samples = asked.ids_for_drafts(config), generation_config.num_return_sequences or 1
    windowed = any(backbone.windows.values())
    rows = []
    for index, prompt in enumerate(split_prompts(input_ids, model_kwargs.get("attention_mask"), windowed=windowed)):
        row = make_row(backbone, prompt.ids, config, ends.eos_ids, ends.budget, vocabulary, ends.stop)
        row.padding, row.sample = prompt.padding, index % samples
        rows.append(row)
    choose = make_choose(logits_processor, do_sample=bool(generation_config.do_sample), seed=config.sample_seed)
    run(backbone, rows, _streaming(streamer) if streamer is not None else None, choose)
    if streamer is not None:
        streamer.end()
    sequences = _assemble(input_ids, rows, generation_config, ends.eos_ids)
    if generation_config.return_dict_in_generate:
        return GenerateOutput(sequences=sequences, stats=DecodeStats([row.stats for row in rows]))
    return sequences


def _streaming(streamer: Any) -> Any:
    sent = 0

    def on_sweep(rows: Sequence[Row]) -> None:
        nonlocal sent
        (row,) = rows
        streamer.put(torch.tensor(row.text[row.prompt_length + sent :]))
        sent = row.known
        if hasattr(streamer, "put_draft"):
            streamer.put_draft(torch.tensor(row.guesses, dtype=torch.long))

    return on_sweep


def _assemble(
    input_ids: Tensor, rows: Sequence[Row], generation_config: GenerationConfig, eos_ids: Sequence[int]
) -> Tensor:
    longest = max(len(row.generated) for row in rows)
    pad = generation_config._pad_token_tensor
    filler = int(pad) if pad is not None else (eos_ids[0] if eos_ids else 0)
    out = torch.full((len(rows), longest), filler, dtype=input_ids.dtype)
    for index, row in enumerate(rows):
        out[index, : len(row.generated)] = torch.tensor(row.generated, dtype=input_ids.dtype)
    return torch.cat([input_ids, out.to(input_ids.device)], dim=1)
