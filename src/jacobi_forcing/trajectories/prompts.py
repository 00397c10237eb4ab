"""Prompts: from a JSONL file, a hub data set or the embedded problems, as the token ids that a model is given.

A prompt is text, or a conversation so far: a list of {role, content} messages, or of ShareGPT's {from, value} turns,
whose human and gpt are the chat template's user and assistant.
The ids made here are the ones that are generated from and trained on: text is tokenised once and never again.
"""

from __future__ import annotations

import dataclasses
import itertools
import logging
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from jacobi_forcing.config import PromptsConfig, Template
from jacobi_forcing.embedded import BUILTIN, BUILTIN_TASKS
from jacobi_forcing.embedded.problems import problems
from jacobi_forcing.embedded.structured import orders
from jacobi_forcing.errors import DataError
from jacobi_forcing.trajectories.sources import hub_rows, json_lines

logger = logging.getLogger(__name__)

_BUILTIN_SPLITS = ("train", "heldout")
_BUILTIN_LEVELS = ("mixed", "regular")
_SHAREGPT_ROLES = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "system": "system"}


@dataclasses.dataclass(frozen=True)
class Prompt:
    """One prompt.

    Attributes:
        index: Its place in the source, from 0, before `offset` and `limit` are applied.
        text: What the ids stand for, the chat template's marks included.
        ids: What the model is given, tokens.
        answer: The reference answer, where the source has one; never shown to the model.
    """

    index: int
    text: str
    ids: list[int]
    answer: str | None = None


def load_prompts(
    config: PromptsConfig, tokenizer: PreTrainedTokenizerBase, *, context_length: int | None = None
) -> list[Prompt]:
    """Read, format and tokenise prompts.

    Args:
        config: Source, fields, template and range.
        tokenizer: The model's own.
        context_length: Positions the model has, tokens; a prompt must leave room for one more. None: not checked.

    Raises:
        DataError: The source cannot be read, a line is broken, a field is missing, there is nothing in the range, or
            a prompt is empty or too long.
        MissingExtraError: A hub data set is named and `datasets` is not installed.
    """
    # Settled once, so that what is to be said about the template is said once and not for every prompt.
    # The built-in problems are made to be used as they are: about them there is nothing to say.
    quiet = config.source in BUILTIN_TASKS
    template: Template = "chat" if wants_chat(config.template, tokenizer, quiet=quiet) else "raw"
    end = None if config.limit is None else config.offset + config.limit
    prompts = []
    for index, value, answer in itertools.islice(_records(config), config.offset, end):
        where = f"Prompt {index} of '{config.source}'"
        text, ids = encode_prompt(value, tokenizer, template, where=where)
        _check_length(where, ids, context_length)
        prompts.append(Prompt(index, text, ids, answer))
    if not prompts:
        raise _nothing_in_range(config)
    return prompts


def check_source(config: PromptsConfig) -> None:
    """See, before a model is loaded, that there is at least one prompt.

    Raises:
        DataError: See `load_prompts`, as far as the first prompt tells.
        MissingExtraError: A hub data set is named and `datasets` is not installed.
    """
    if next(itertools.islice(_records(config), config.offset, None), None) is None:
        raise _nothing_in_range(config)


def _nothing_in_range(config: PromptsConfig) -> DataError:
    wanted = f"{config.limit or 'any'} prompts from {config.offset}"
    return DataError(f"'{config.source}' holds no prompts in the range", seen="0", expected=wanted)


def encode_prompt(
    text: Any, tokenizer: PreTrainedTokenizerBase, template: Template, *, where: str = "The prompt"
) -> tuple[str, list[int]]:
    """Format and tokenise one prompt, exactly as those that are collected from.

    Args:
        text: A string, or a list of messages or turns, which only a chat template can put into words.
        tokenizer: The model's own.
        template: chat: by the tokenizer's chat template; raw: as it is; auto: chat if there is a template.
        where: What an error calls the prompt.

    Returns:
        The text with the chat template's marks, and its ids.

    Raises:
        DataError: There is no chat template or the prompt does not fit it, or it is neither text nor messages, or
            gives no tokens.
    """
    chat = wants_chat(template, tokenizer)
    formatted = _format(text, tokenizer, chat, where)
    # A chat template writes its own special tokens: adding them again would start the text twice.
    ids = [int(token) for token in tokenizer(formatted, add_special_tokens=not chat)["input_ids"]]
    if not ids:
        raise DataError(f"{where} is empty", expected="at least 1 token", remedy="put text into it or remove it")
    return formatted, ids


def wants_chat(template: Template, tokenizer: PreTrainedTokenizerBase, *, quiet: bool = False) -> bool:
    """Whether prompts are put by the chat template; where there is none, a line says so unless `quiet`.

    Raises:
        DataError: `chat` is asked for, and there is no template.
    """
    has_template = bool(getattr(tokenizer, "chat_template", None))
    if template == "chat" and not has_template:
        raise DataError(
            "The tokenizer has no chat template",
            seen="template: chat",
            remedy="set template to raw, or use a chat model",
        )
    if template == "auto" and not has_template and not quiet:
        logger.info("The tokenizer has no chat template: prompts are used as they are")
    return has_template and template != "raw"


def _format(value: Any, tokenizer: PreTrainedTokenizerBase, chat: bool, where: str) -> str:
    messages = _messages(value, where)
    if not isinstance(value, str) and messages is None:
        kind = type(value).__name__
        expected = "text, or a list of {role, content} messages or {from, value} turns"
        raise DataError(f"{where} is not text", seen=kind, expected=expected)
    if not chat:
        if messages is not None:
            has_template = bool(getattr(tokenizer, "chat_template", None))
            raise DataError(
                f"{where} is a list of messages",
                expected="text for a raw prompt",
                remedy="set template to chat" if has_template else "use a model whose tokenizer has a chat template",
            )
        return str(value)
    if messages is None:
        messages = [{"role": "user", "content": str(value)}]
    try:
        return str(tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False))
    except Exception as error:  # templates are programs: they raise whatever their author chose
        raise DataError(f"{where} does not fit the chat template", seen=" ".join(str(error).split())) from error


def _messages(value: Any, where: str) -> list[dict[str, Any]] | None:
    """The value as messages, or None when it is not a list of them."""
    if not isinstance(value, Sequence) or isinstance(value, str) or not value:
        return None
    if not all(isinstance(item, Mapping) for item in value):
        return None
    if all({"role", "content"} <= item.keys() for item in value):
        return [dict(item) for item in value]
    if all({"from", "value"} <= item.keys() for item in value):
        return [{"role": _role(item["from"], where), "content": item["value"]} for item in value]
    return None


def _role(speaker: Any, where: str) -> str:
    """What a chat template calls a speaker of ShareGPT."""
    if not isinstance(speaker, str) or speaker not in _SHAREGPT_ROLES:
        raise DataError(f"{where} has a turn of an unknown speaker", seen=speaker, expected=", ".join(_SHAREGPT_ROLES))
    return _SHAREGPT_ROLES[speaker]


def _check_length(where: str, ids: Sequence[int], context_length: int | None) -> None:
    if context_length is not None and len(ids) >= context_length:
        raise DataError(
            f"{where} is longer than the model's context",
            seen=f"{len(ids)} tokens",
            expected=f"at most {context_length - 1}",
            remedy="shorten or remove it",
        )


Record = tuple[int, Any, str | None]
"""Index in the source, what the field holds, reference answer."""


def _records(config: PromptsConfig) -> Iterator[Record]:
    if config.source in BUILTIN_TASKS:
        return _builtin_records(config)
    if config.source.startswith("builtin:"):
        raise DataError("Unknown builtin source", seen=config.source, expected=" or ".join(BUILTIN_TASKS))
    if config.source.endswith((".jsonl", ".json")) or Path(config.source).is_file():
        return _jsonl_records(config)
    return _hub_records(config)


def _builtin_records(config: PromptsConfig) -> Iterator[Record]:
    source = config.source
    if config.limit is None:
        raise DataError(f"'{source}' never ends", seen="limit: null", remedy="set limit to the number of prompts")
    if config.split not in _BUILTIN_SPLITS:
        raise DataError(f"'{source}' has no such split", seen=config.split, expected=" or ".join(_BUILTIN_SPLITS))
    levels = _BUILTIN_LEVELS if source == BUILTIN else ()
    if config.subset not in (None, *levels):
        expected = " or ".join(levels) or "null"
        raise DataError(f"'{source}' has no such subset", seen=config.subset, expected=expected)
    split: Any = config.split
    count = config.offset + config.limit
    if source != BUILTIN:
        for index, order in enumerate(orders(split, config.seed, count)):
            yield index, order.prompt, order.answer
        return
    level: Any = config.subset or _BUILTIN_LEVELS[0]
    for index, problem in enumerate(problems(split, config.seed, count, level=level)):
        yield index, problem.prompt, str(problem.result)


def _jsonl_records(config: PromptsConfig) -> Iterator[Record]:
    index = 0
    for where, record in json_lines(config.source):
        yield (index, *_fields(record, config, where))
        index += 1
    if index == 0:
        raise DataError(f"'{config.source}' is empty", expected="one JSON object a line")


def _hub_records(config: PromptsConfig) -> Iterator[Record]:
    rows = hub_rows(
        config.source,
        config.subset,
        config.split,
        extra="train",
        message=f"Cannot load the data set '{config.source}'",
        expected=f"a path that ends in .jsonl, a hub data set with split '{config.split}', "
        f"{' or '.join(BUILTIN_TASKS)}",
    )
    for index, record in enumerate(rows):
        yield (index, *_fields(record, config, f"'{config.source}' row {index}"))


def _fields(record: Any, config: PromptsConfig, where: str) -> tuple[Any, str | None]:
    """(prompt, answer) of one record."""
    if not isinstance(record, Mapping):
        raise DataError(f"{where} is not an object", seen=type(record).__name__, expected='{"key": value, ...}')
    for name, setting in ((config.field, "field"), (config.answer_field, "answer_field")):
        if name is not None and name not in record:
            known = ", ".join(map(str, record)) or "none"
            raise DataError(
                f"{where} lacks '{name}'", expected=f"one of: {known}", remedy=f"set {setting} to one of them"
            )
    answer = None if config.answer_field is None else str(record[config.answer_field])
    return record[config.field], answer
