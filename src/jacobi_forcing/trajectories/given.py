"""Responses that another engine made: read from JSON lines, and compared with what the model would write.

Trajectories end at the model's own greedy text. An engine that runs the same weights makes it faster; one that samples,
or runs other weights, another dtype or another chat template, does not make it at all. So some responses are checked:
one forward pass over prompt and response tells for every token whether the model would have written it there.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedTokenizerBase

from jacobi_forcing.backbone import Backbone
from jacobi_forcing.blocks import truncate
from jacobi_forcing.config import PromptsConfig
from jacobi_forcing.errors import DataError
from jacobi_forcing.trajectories.prompts import Prompt, encode_prompt
from jacobi_forcing.trajectories.sources import json_lines

_IDS = ("response_ids", "token_ids", "output_token_ids")
_PROMPT_IDS = ("prompt_ids", "prompt_token_ids")
_TEXT = ("response", "completion", "output", "generated_text")
_ENDED = ("finish_reason", "stop_reason")
_CHUNK = 256
"""Positions whose logits exist at the same time."""


@dataclasses.dataclass(frozen=True)
class Given:
    """Responses, each an engine's answer to a prompt.

    Attributes:
        responses: Token ids by index of the prompt; the end token is kept where one was reached, nothing follows it.
        sha256: Of the file.
        show: Turns ids into text for errors.
    """

    responses: dict[int, list[int]]
    sha256: str
    show: Callable[[list[int]], str] = str


@dataclasses.dataclass(frozen=True)
class Check:
    """How some responses compare with the model.

    Attributes:
        checked: How many were compared.
        near_ties: Tokens that differ from the model's by no more than rounding explains.
    """

    checked: int = 0
    near_ties: int = 0


def read_responses(
    path: str | Path,
    prompts: Sequence[Prompt],
    tokenizer: PreTrainedTokenizerBase,
    settings: PromptsConfig,
    eos_ids: Sequence[int],
) -> Given:
    """The response of each prompt.

    A line is an object with the prompt, as the prompts' own source has it, or its ids under `prompt_ids` or
    `prompt_token_ids`; and with `response_ids`, `token_ids` or `output_token_ids`, or else text under `response`,
    `completion`, `output` or `generated_text`. Ids are taken as they are. Text is tokenised, which need not give the
    ids that were generated. Where `finish_reason` (or `stop_reason`) is not "length", an end token is put behind a
    response that lacks it.

    Args:
        path: JSON lines, in any order.
        prompts: Formatted and tokenised.
        tokenizer: The model's own.
        settings: Of the prompts: key and template.
        eos_ids: Ids that end a response.

    Raises:
        DataError: A line is broken, a prompt has no response or two different ones, or the engine was given other
            tokens than the model would be.
    """
    path = Path(path)
    found: dict[tuple[int, ...], list[int]] = {}
    for where, record in _records(path):
        response = _response(record, tokenizer, eos_ids, where)
        if found.setdefault(_prompt_ids(record, tokenizer, settings, where), response) != response:
            raise DataError(f"{where} answers a prompt that another line answers differently")
    missing = [prompt for prompt in prompts if tuple(prompt.ids) not in found]
    if missing:
        raise DataError(
            f"'{path}' has no response for {len(missing)} of {len(prompts)} prompts",
            seen=f"the first of them is prompt {missing[0].index}: {missing[0].text[:60]!r}",
            expected="the prompt as the source has it, or under prompt_token_ids the ids that this model is given",
            remedy="compare chat template and special tokens of the engine (--template), or set limit",
        )
    responses = {prompt.index: found[tuple(prompt.ids)] for prompt in prompts}
    return Given(responses, hashlib.sha256(path.read_bytes()).hexdigest(), lambda ids: str(tokenizer.decode(ids)))


def _records(path: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    for where, record in json_lines(path):
        if not isinstance(record, Mapping):
            raise DataError(f"{where} is not an object", seen=type(record).__name__, expected='{"key": value, ...}')
        yield where, record


def _prompt_ids(
    record: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase, settings: PromptsConfig, where: str
) -> tuple[int, ...]:
    """What the engine was given; ids, where there are any, are what counts."""
    for name in _PROMPT_IDS:
        if record.get(name) is not None:
            return tuple(_ids(record[name], f"{where}, '{name}'"))
    if record.get(settings.field) is None:
        known = ", ".join(map(str, record)) or "none"
        raise DataError(f"{where} lacks '{settings.field}'", expected=f"one of: {known}", remedy="set field to one")
    return tuple(encode_prompt(record[settings.field], tokenizer, settings.template, where=where)[1])


def _response(
    record: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase, eos_ids: Sequence[int], where: str
) -> list[int]:
    name = next((name for name in (*_IDS, *_TEXT) if record.get(name) is not None), None)
    if name is None:
        raise DataError(f"{where} has no response", expected=f"ids under {_IDS[0]}, or text under {_TEXT[0]}")
    if name in _IDS:
        ids = _ids(record[name], f"{where}, '{name}'")
    elif isinstance(record[name], str):
        ids = [int(token) for token in tokenizer(record[name], add_special_tokens=False)["input_ids"]]
    else:
        raise DataError(f"{where}, '{name}' is not text", seen=type(record[name]).__name__)
    ids = truncate(ids, eos_ids, len(ids))
    cut = any(record.get(reason) == "length" for reason in _ENDED)
    if eos_ids and not cut and (not ids or ids[-1] not in eos_ids):
        own = tokenizer.eos_token_id
        ids.append(int(own) if own in eos_ids else eos_ids[0])
    if not ids:
        raise DataError(f"{where} has an empty response")
    return ids


def _ids(value: Any, where: str) -> list[int]:
    if not isinstance(value, list) or not all(isinstance(item, int) and item >= 0 for item in value):
        raise DataError(f"{where} is not a list of token ids", seen=repr(value)[:60])
    return list(value)


@torch.inference_mode()
def check_responses(
    backbone: Backbone,
    prompts: Sequence[Prompt],
    responses: Mapping[int, Sequence[int]],
    *,
    count: int,
    batch_size: int,
    tolerance: float,
    show: Callable[[list[int]], str] = str,
) -> Check:
    """Compare some responses with what the model would write.

    Args:
        backbone: The model, in eval mode.
        prompts: The prompts.
        responses: By index of the prompt, cut to their limits.
        count: How many, spread evenly over the prompts; 0 for all.
        batch_size: Responses per forward pass.
        tolerance: Largest gap between two logits that rounding alone explains.
        show: Turns ids into text for an error.

    Raises:
        DataError: A token is not the model's; says where and by how much.
    """
    chosen = prompts
    if 0 < count < len(prompts):
        chosen = [prompts[place * len(prompts) // count] for place in range(count)]
    _check_vocabulary(backbone, prompts, responses)
    backbone.verify_head()
    near_ties = 0
    for start in range(0, len(chosen), batch_size):
        batch = chosen[start : start + batch_size]
        # No token sees what is behind it, so the padding on the right needs no mask.
        texts = [torch.tensor([*prompt.ids, *responses[prompt.index][:-1]]) for prompt in batch]
        ids = pad_sequence(texts, batch_first=True).to(backbone.device)
        positions = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
        hidden = backbone.hidden(ids, positions, None)
        for row, prompt in enumerate(batch):
            of_row = hidden[row, len(prompt.ids) - 1 : len(texts[row])]
            near_ties += _compare(backbone, of_row, prompt, responses[prompt.index], tolerance, show)
    return Check(len(chosen), near_ties)


def _check_vocabulary(backbone: Backbone, prompts: Sequence[Prompt], responses: Mapping[int, Sequence[int]]) -> None:
    for prompt in prompts:
        if (largest := max(responses[prompt.index])) >= backbone.vocab_size:
            raise DataError(
                f"The response to prompt {prompt.index} has a token id that the model has not",
                seen=largest,
                expected=f"below {backbone.vocab_size}",
            )


def _compare(
    backbone: Backbone,
    hidden: torch.Tensor,
    prompt: Prompt,
    response: Sequence[int],
    tolerance: float,
    show: Callable[[list[int]], str],
) -> int:
    """Near ties of one response; final hidden states [response, H] of the tokens before each of its tokens."""
    near_ties = 0
    for start in range(0, len(response), _CHUNK):
        logits = backbone.logits(hidden[start : start + _CHUNK]).float()
        theirs = torch.tensor(list(response[start : start + _CHUNK]), device=logits.device)
        own = logits.argmax(dim=-1)
        gaps = logits.amax(dim=-1) - logits.gather(1, theirs[:, None])[:, 0]
        wrong = ((own != theirs) & (gaps > tolerance)).nonzero().flatten().tolist()
        if wrong:
            seen, expected = int(theirs[wrong[0]]), int(own[wrong[0]])
            raise DataError(
                f"The response to prompt {prompt.index} is not the model's greedy text: it differs at token "
                f"{start + wrong[0]}",
                seen=f"{seen} ({show([seen])!r}), {float(gaps[wrong[0]]):.3g} logits below",
                expected=f"{expected} ({show([expected])!r})",
                remedy="the engine must run the same weights at temperature 0 with the same chat template, and hand on "
                "ids, not text; where only its dtype differs, load the model in that one (--dtype)",
            )
        near_ties += int((own != theirs).sum())
    return near_ties
