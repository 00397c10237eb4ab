"""The public entry: a drop-in `custom_generate` for transformers, also callable directly."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, GenerationMixin, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria
from transformers.utils import ModelOutput

from jacobi_forcing.backbone import Backbone, as_ids
from jacobi_forcing.config import DecodeConfig
from jacobi_forcing.decode.engine import make_row, run
from jacobi_forcing.decode.rows import Row
from jacobi_forcing.decode.stats import DecodeStats
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
    decode: DecodeConfig | None = None,
    tokenizer: Any = None,
    vocabulary: Sequence[int] | None = None,
    **kwargs: Any,
) -> Tensor | GenerateOutput:
    """Decode greedily, several tokens a forward pass, into exactly the text of the library's greedy `generate`.

    Two ways in, with the same result::

        model.generate(**inputs, custom_generate=generate, decode=DecodeConfig(...), max_new_tokens=64)
        generate(model, input_ids, attention_mask=mask, decode=DecodeConfig(...), max_new_tokens=64)

    Args:
        model: A decoder-only model whose cache can roll back.
        input_ids: Prompt ids [rows, length]; a batch is padded on the left, with an `attention_mask`.
        logits_processor: Filled in by the library; anything in it is refused by name.
        stopping_criteria: Filled in by the library; end tokens and length are honoured, others refused by name.
        generation_config: The library's settings, by default the model's own; ours come from `decode`.
        streamer: The library's streamer protocol, for one row; gets each accepted run of tokens as it is committed, and
            the guesses of every sweep if it has a method `put_draft(ids)`.
        decode: The decoder and its settings; the defaults of `DecodeConfig` where None.
        tokenizer: Its ids are what `draft_init="vocabulary"` draws from; the library does not hand it on.
        vocabulary: Those ids themselves, whichever the way in.
        **kwargs: What the library's `generate` takes (`attention_mask`, `max_new_tokens`, `eos_token_id`, …).

    Returns:
        Ids [rows, longest], prompt included, padded on the right; or a `GenerateOutput`.

    Raises:
        CacheError, ModelError: The model cannot verify drafts, or the prompt does not fit its context.
        ConfigError: Sampling, beams or a logits processor was asked for, by the call or by the model's own settings.
    """
    config = decode or DecodeConfig()
    prepared = hasattr(generation_config, "_eos_token_tensor")
    if prepared and input_ids is not None and generation_config is not None and stopping_criteria is not None:
        _refuse(generation_config, logits_processor, stopping_criteria, kwargs)
        return _decode(model, input_ids, kwargs.get("attention_mask"), generation_config, streamer, config, vocabulary)
    # Called directly: the library prepares lengths, end tokens and masks, then calls back with all of them.
    Backbone(model)  # A model that does not fit is refused before the library runs any part of it.
    if vocabulary is None and tokenizer is not None and config.draft_init == "vocabulary":
        vocabulary = sorted(set(tokenizer.get_vocab().values()))
    return model.generate(  # type: ignore[operator]
        input_ids,
        generation_config=generation_config,
        logits_processor=logits_processor,
        stopping_criteria=stopping_criteria,
        streamer=streamer,
        custom_generate=generate,
        decode=config,
        vocabulary=vocabulary,
        tokenizer=tokenizer,
        **kwargs,
    )


def _decode(
    model: PreTrainedModel,
    input_ids: Tensor,
    attention_mask: Tensor | None,
    generation_config: GenerationConfig,
    streamer: Any,
    config: DecodeConfig,
    vocabulary: Sequence[int] | None,
) -> Tensor | GenerateOutput:
    """Decode what the library has prepared."""
    streamer = _streamer_of_library() if streamer is None else streamer
    if streamer is not None and len(input_ids) > 1:
        raise ConfigError("A streamer takes one text at a time", seen=f"{len(input_ids)} rows", expected="1 row")
    backbone = Backbone(model)
    eos_ids = as_ids(generation_config._eos_token_tensor)
    budget = int(generation_config.max_length) - input_ids.shape[1]
    prompts = _prompts(input_ids, attention_mask)
    rows = [make_row(backbone, prompt, config, eos_ids, budget, vocabulary) for prompt in prompts]
    run(backbone, rows, _streaming(streamer) if streamer is not None else None)
    if streamer is not None:
        streamer.end()
    sequences = _assemble(input_ids, rows, generation_config, eos_ids)
    if generation_config.return_dict_in_generate:
        return GenerateOutput(sequences=sequences, stats=DecodeStats([row.stats for row in rows]))
    return sequences


_PLAIN = {
    "do_sample": False,
    "num_beams": 1,
    "num_return_sequences": 1,
    "output_scores": False,
    "output_logits": False,
    "output_attentions": False,
    "output_hidden_states": False,
}
"""Settings of the library, with the only value that is supported here; None means the same."""


def _refuse(
    generation_config: GenerationConfig,
    logits_processor: LogitsProcessorList | None,
    stopping_criteria: StoppingCriteriaList,
    inputs: Mapping[str, Any],
) -> None:
    """Name what would change the text or the output and is not supported, instead of ignoring it."""
    asked = [
        f"{name}={getattr(generation_config, name)}"
        for name, plain in _PLAIN.items()
        if getattr(generation_config, name, None) not in (None, plain)
    ]
    asked += [type(processor).__name__ for processor in logits_processor or []]
    asked += [
        type(criterion).__name__
        for criterion in stopping_criteria
        if not isinstance(criterion, (MaxLengthCriteria, EosTokenCriteria))
    ]
    if inputs.get("inputs_embeds") is not None:
        asked.append("inputs_embeds")
    if getattr(inputs.get("cache"), "_is_user_defined", False):
        asked.append("a cache of the caller")
    if asked:
        raise ConfigError(
            "Parallel decoding here is greedy and from token ids",
            seen=", ".join(asked),
            expected="no sampling, beams, logits processors, cache, or stopping criteria and outputs beyond the usual",
            remedy="switch these off (do_sample=False, repetition_penalty=1.0, …), or use the library's own generate",
        )


def _streamer_of_library() -> Any:
    """The streamer that the library's `generate`, which is calling us, was given.

    The library does not hand `streamer` to a callable `custom_generate`: it has already sent the prompt to it, then
    forgets it, and the stream would stay open without a token. Reading its local variable is the one way to get at it.
    """
    code = inspect.unwrap(GenerationMixin.generate).__code__
    frame = inspect.currentframe()
    while frame is not None and frame.f_code is not code:
        frame = frame.f_back
    return None if frame is None else frame.f_locals.get("streamer")


def _prompts(input_ids: Tensor, attention_mask: Tensor | None) -> list[list[int]]:
    """Each row's ids without its padding."""
    if attention_mask is None:
        return input_ids.tolist()
    return [row[mask.bool()].tolist() for row, mask in zip(input_ids, attention_mask, strict=True)]


def _streaming(streamer: Any) -> Any:
    sent = 0

    def on_sweep(rows: Sequence[Row]) -> None:
        nonlocal sent
        (row,) = rows
        streamer.put(torch.tensor(row.generated[sent:]))
        sent = len(row.generated)
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
