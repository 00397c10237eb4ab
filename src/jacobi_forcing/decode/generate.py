"""The public entry: a drop-in `custom_generate` for transformers, also callable directly."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria
from transformers.utils import ModelOutput

from jacobi_forcing.backbone import Backbone, as_ids
from jacobi_forcing.config import DecodeConfig
from jacobi_forcing.decode.drafts import Row
from jacobi_forcing.decode.engine import make_row, run
from jacobi_forcing.decode.stats import DecodeStats
from jacobi_forcing.errors import ConfigError, DataError


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
    **kwargs: Any,
) -> Tensor | GenerateOutput:
    """Decode greedily, several tokens per forward pass, with exactly the text of the library's greedy `generate`.

    Two ways in, with the same result::

        model.generate(**inputs, custom_generate=generate, decode=DecodeConfig(...), max_new_tokens=64)
        generate(model, input_ids, attention_mask=mask, decode=DecodeConfig(...), max_new_tokens=64)

    Args:
        model: A decoder-only model whose cache can roll back.
        input_ids: Prompt ids [rows, length]; a batch is padded on the left, with an `attention_mask`.
        logits_processor: Filled in by the library; anything in it is refused by name.
        stopping_criteria: Filled in by the library; end tokens and length are honoured, others refused by name.
        generation_config: The library's settings; ours come from `decode`.
        streamer: The library's streamer protocol; gets each accepted run of tokens as it is committed. A streamer with
            a `put_draft(ids)` method is also shown the guesses of every sweep.
        decode: The decoder and its settings; the defaults of `DecodeConfig` where None.
        tokenizer: Needed for `draft_init="vocabulary"` only.
        **kwargs: What the library's `generate` takes (`attention_mask`, `max_new_tokens`, `eos_token_id`, …).

    Returns:
        Ids [rows, longest], prompt included, padded on the right; or a `GenerateOutput`.

    Raises:
        CacheError, ModelError: The model cannot verify drafts, or the prompt does not fit its context.
        ConfigError: Sampling, beams or a logits processor was asked for.
    """
    if stopping_criteria is None or generation_config is None or not hasattr(generation_config, "_eos_token_tensor"):
        # Called directly: the library prepares lengths, end tokens and masks, then calls back with all of them.
        kwargs.setdefault("do_sample", False)
        for name, value in (
            ("logits_processor", logits_processor),
            ("stopping_criteria", stopping_criteria),
            ("generation_config", generation_config),
            ("streamer", streamer),
            ("tokenizer", tokenizer),
        ):
            if value is not None:
                kwargs[name] = value
        return model.generate(input_ids, custom_generate=generate, decode=decode or DecodeConfig(), **kwargs)
    _refuse(generation_config, logits_processor, stopping_criteria)
    if input_ids is None:
        raise DataError("No prompt was given", expected="input_ids of shape [rows, length]")
    backbone = Backbone(model)
    prompts = _prompts(input_ids, kwargs.get("attention_mask"))
    eos_ids = as_ids(generation_config._eos_token_tensor)
    budget = int(generation_config.max_length) - input_ids.shape[1]
    config = decode or DecodeConfig()
    vocabulary = sorted(set(tokenizer.get_vocab().values())) if tokenizer is not None else None
    rows = [make_row(backbone, prompt, config, eos_ids, budget, vocabulary) for prompt in prompts]
    run(backbone, rows, _streaming(streamer) if streamer is not None else None)
    if streamer is not None:
        streamer.end()
    sequences = _assemble(input_ids, rows, generation_config, eos_ids)
    if generation_config.return_dict_in_generate:
        return GenerateOutput(sequences=sequences, stats=DecodeStats([row.stats for row in rows]))
    return sequences


def _refuse(
    generation_config: GenerationConfig,
    logits_processor: LogitsProcessorList | None,
    stopping_criteria: StoppingCriteriaList,
) -> None:
    """Name what would change the text and is not supported, instead of ignoring it."""
    asked = [type(processor).__name__ for processor in logits_processor or []]
    asked += [
        type(criterion).__name__
        for criterion in stopping_criteria
        if not isinstance(criterion, (MaxLengthCriteria, EosTokenCriteria))
    ]
    asked += [
        f"{name}={getattr(generation_config, name)}"
        for name, plain in (("do_sample", False), ("num_beams", 1), ("num_return_sequences", 1))
        if getattr(generation_config, name, None) not in (None, plain)
    ]
    if asked:
        raise ConfigError(
            "Parallel decoding here is greedy",
            seen=", ".join(asked),
            expected="no sampling, beams, logits processors or extra stopping criteria",
            remedy="switch these off, or use the library's own generate",
        )


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
