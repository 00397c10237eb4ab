"""lm-evaluation-harness with our decoders: a model class on its own Hugging Face one.

All that touches the harness stands here and in `harness_tasks.py`. `JForceLM` is registered there as the model
`jforce`, so that the harness's other generative tasks can be run with any decoder too.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from jacobi_forcing.backbone import Backbone
from jacobi_forcing.config import DecodeConfig, ModelConfig
from jacobi_forcing.decode.generate import GenerateOutput, generate
from jacobi_forcing.decode.stats import RowStats
from jacobi_forcing.errors import ConfigError, DataError, MissingExtraError
from jacobi_forcing.evaluate.journal import Answer, Journal
from jacobi_forcing.evaluate.quality import budget, loops
from jacobi_forcing.loading import GREEDY, Loaded, load
from jacobi_forcing.trajectories.prompts import encode_prompt

try:
    from lm_eval.api.instance import Instance
    from lm_eval.api.registry import register_model
    from lm_eval.models.huggingface import HFLM
except ImportError as _error:
    raise MissingExtraError("lm-eval", "eval") from _error

logging.getLogger("lm_eval").setLevel(logging.ERROR)
WARM_UP_TOKENS = 16
"""Tokens of the answer that each decoder gives first and that is thrown away."""


@dataclasses.dataclass(frozen=True)
class Contender:
    """A decoder that answers. Its key tells it from every other setting."""

    decode: DecodeConfig

    @property
    def key(self) -> str:
        """Decoder, and 8 digits for its settings and the way they are written in a journal."""
        digest = hashlib.sha256(json.dumps(self.decode.to_dict(), sort_keys=True).encode()).hexdigest()
        return f"{self.decode.decoder}-{digest[:8]}"


@register_model("jforce")
class JForceLM(HFLM):
    """The harness's Hugging Face model, with generation by our decoders.

    Every request is answered by every contender in turn, the order turning with the batches, so that a machine that
    slows down slows all alike; `use` chooses whose answers the harness is given.

    Args:
        pretrained: A loaded model, or the name of one.
        contenders: The decoders; for a model that is named, `decoder`, `block_size`, … say which.
        journal: Where answers are kept.
        batch_size: Answers side by side.
        chat: Whether prompts come through the chat template, which writes its own special tokens; by default
            where there is one.
        on_progress: Told answers done and answers in all.
        **settings: With a name: fields of `ModelConfig` and `DecodeConfig`.
    """

    def __init__(
        self,
        pretrained: Loaded | str,
        contenders: Sequence[Contender] = (),
        journal: Journal | None = None,
        batch_size: int | str = 1,
        chat: bool | None = None,
        on_progress: Callable[[int, int], None] | None = None,
        **settings: Any,
    ) -> None:
        if isinstance(pretrained, str):
            pretrained, contenders = _from_arguments(pretrained, settings)
        self.loaded, self.contenders = pretrained, list(contenders)
        super().__init__(pretrained.model, tokenizer=pretrained.tokenizer, batch_size=int(batch_size))
        self.backbone = Backbone(pretrained.model)
        self.journal = journal or Journal()
        self.chat = bool(getattr(pretrained.tokenizer, "chat_template", None)) if chat is None else chat
        self.on_progress = on_progress
        self.prompts: dict[tuple[str, int], list[int]] = {}
        self._used = self.contenders[0].key
        self._warm: set[tuple[str, int]] = set()
        self._turn = 0

    def use(self, contender: Contender) -> None:
        """Give the harness this decoder's answers."""
        self._used = contender.key

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """The text of a conversation, exactly as prompts that are collected from are written."""
        if not add_generation_prompt:
            return str(super().apply_chat_template(chat_history, add_generation_prompt))
        return encode_prompt(list(chat_history), self.loaded.tokenizer, "chat")[0]

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Answer all requests with all contenders, where the journal does not have the answer; those of one are given.

        Raises:
            ConfigError: A task asks for sampling.
            DataError: A prompt leaves no room for an answer.
        """
        asked = [self._asked(request) for request in requests]
        self.prompts.update((one.name, one.ids) for one in asked)
        total = len(asked) * len(self.contenders)
        left = [one for one in asked if any((*one.name, c.key) not in self.journal.answers for c in self.contenders)]
        done = total - sum((*one.name, c.key) not in self.journal.answers for one in left for c in self.contenders)
        for batch in _batches(left, self.batch_size):
            for contender in self._order():
                missing = [one for one in batch if (*one.name, contender.key) not in self.journal.answers]
                if missing:
                    self.journal.add(self._answers(contender, missing))
                    done += len(missing)
                    if self.on_progress is not None:
                        self.on_progress(done, total)
        return [self.journal.answers[(*one.name, self._used)].text for one in asked]

    def _asked(self, request: Instance) -> _Asked:
        text, wishes = request.args
        if wishes.get("do_sample"):
            raise ConfigError("Tasks that sample are not supported", seen=f"{request.task_name}: do_sample: true")
        ids = [int(token) for token in self.loaded.tokenizer(text, add_special_tokens=not self.chat)["input_ids"]]
        limit = self.backbone.context_length
        if not ids or (limit is not None and len(ids) >= limit):
            raise DataError(
                f"The prompt of item {request.doc_id} of '{request.task_name}' does not fit the model's context",
                seen=f"{len(ids)} tokens",
                expected="at least 1" if not ids else f"at most {limit - 1}" if limit else None,
                remedy="remove it from the data",
            )
        until = wishes.get("until") or ()
        until = (until,) if isinstance(until, str) else tuple(until)
        most = int(wishes.get("max_gen_toks") or self.max_gen_toks)
        return _Asked(request.task_name, request.doc_id, ids, until, budget(self.backbone, len(ids), most))

    def _order(self) -> list[Contender]:
        self._turn += 1
        first = self._turn % len(self.contenders)
        return self.contenders[first:] + self.contenders[:first]

    def _answers(self, contender: Contender, batch: list[_Asked]) -> list[Answer]:
        if (contender.key, len(batch)) not in self._warm:
            self._warm.add((contender.key, len(batch)))
            self._decode(contender, [dataclasses.replace(one, limit=min(one.limit, WARM_UP_TOKENS)) for one in batch])
        found, seconds = self._decode(contender, batch)
        return [
            self._answer(contender, one, ids, stats, seconds, len(batch))
            for one, (ids, stats) in zip(batch, found, strict=True)
        ]

    def _decode(self, contender: Contender, batch: list[_Asked]) -> tuple[list[tuple[list[int], RowStats]], float]:
        """Ids and counts of each row, and the wall time of all."""
        longest, device = max(len(one.ids) for one in batch), self.backbone.device
        pad = self.loaded.tokenizer.pad_token_id or 0
        ids = torch.tensor([[pad] * (longest - len(one.ids)) + one.ids for one in batch], device=device)
        mask = torch.tensor([[0] * (longest - len(one.ids)) + [1] * len(one.ids) for one in batch], device=device)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        started = time.perf_counter()
        out = generate(
            self.loaded.model,
            ids,
            attention_mask=mask,
            decode=contender.decode,
            tokenizer=self.loaded.tokenizer,
            stop_strings=list(batch[0].until) or None,
            max_new_tokens=batch[0].limit,
            return_dict_in_generate=True,
            **GREEDY,
        )
        assert isinstance(out, GenerateOutput) and out.sequences is not None and out.stats is not None
        rows = out.sequences[:, longest:].tolist()  # waits for the device
        seconds = time.perf_counter() - started
        return [(row[: stats.tokens], stats) for row, stats in zip(rows, out.stats.rows, strict=True)], seconds

    def _answer(
        self, contender: Contender, one: _Asked, ids: list[int], stats: RowStats, seconds: float, rows: int
    ) -> Answer:
        eos_ids = self.backbone.eos_ids
        text = str(self.loaded.tokenizer.decode(ids, skip_special_tokens=True))
        cut = min((place for place in map(text.find, one.until) if place >= 0), default=len(text))
        slots: dict[str, int] = {}
        for sweep in stats.sweeps[1:]:
            slots[str(sweep.slots)] = slots.get(str(sweep.slots), 0) + 1
        return Answer(
            *one.name,
            decoder=contender.key,
            prompt=hashlib.sha256(json.dumps(one.ids).encode()).hexdigest()[:16],
            prompt_tokens=len(one.ids),
            limit=one.limit,
            ids=ids,
            text=text[:cut],
            forwards=stats.forwards,
            slots=slots,
            seconds=seconds / rows,
            rows=rows,
            finished=ids[-1] in eos_ids or cut < len(text),
            repeats=loops(ids, eos_ids),
        )


@dataclasses.dataclass(frozen=True)
class _Asked:
    """One request: its task and item, the prompt's ids, what ends the answer, and its longest length in tokens."""

    task: str
    item: int
    ids: list[int]
    until: tuple[str, ...]
    limit: int

    @property
    def name(self) -> tuple[str, int]:
        return self.task, self.item


def _from_arguments(name: str, settings: dict[str, Any]) -> tuple[Loaded, list[Contender]]:
    """A model and a decoder as the harness's own command line names them."""
    settings = {key: value for key, value in settings.items() if key != "max_batch_size" and value is not None}
    kinds: dict[str, dict[str, Any]] = {"model": {}, "decode": {}}
    models = {field.name for field in dataclasses.fields(ModelConfig)}
    for key, value in settings.items():
        kinds["model" if key in models else "decode"][key] = value
    decode = DecodeConfig.from_dict(kinds["decode"])
    return load(ModelConfig.from_dict({**kinds["model"], "name": name})), [Contender(decode)]


def _batches(asked: Sequence[_Asked], size: int) -> Iterator[list[_Asked]]:
    """Requests side by side, in order; only those that stop alike share a batch."""
    waiting: dict[tuple[Any, ...], list[_Asked]] = {}
    for one in asked:
        batch = waiting.setdefault((one.until, one.limit), [])
        batch.append(one)
        if len(batch) == size:
            yield waiting.pop((one.until, one.limit))
    yield from waiting.values()
