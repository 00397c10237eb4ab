"""Decoders against each other on the same weights, prompts and machine, in one run.

Every prompt is decoded by every decoder in turn, one row at a time, before the next prompt begins, and the order turns
with the prompts: a machine that slows down slows all of them. Each decoder's first answer is thrown away. `ar` is
always among them: it is what speed-ups and exactness are measured against, and it is itself compared with the
library's own greedy `generate`.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch

from jacobi_forcing.backbone import Backbone
from jacobi_forcing.bench.cost import cost_ratios, synchronise
from jacobi_forcing.bench.exactness import Mismatch, find_mismatch
from jacobi_forcing.config import DecodeConfig, Task
from jacobi_forcing.decode.generate import GenerateOutput, generate
from jacobi_forcing.decode.stats import RowStats
from jacobi_forcing.errors import DataError
from jacobi_forcing.evaluate.quality import Quality, budget, quality_of
from jacobi_forcing.loading import GREEDY, Loaded
from jacobi_forcing.trajectories.prompts import Prompt

SCHEMA_VERSION = 1
"""Version of the JSON form of a `ModelResult`; raised whenever a reader of the old form would misread the new one."""
LIBRARY = "library"
AR: Literal["ar"] = "ar"


@dataclasses.dataclass(frozen=True)
class Answer:
    """One timed answer: its ids without the prompt, wall seconds with prefill, and counts (None for the library)."""

    ids: list[int]
    seconds: float
    stats: RowStats | None


@dataclasses.dataclass(frozen=True)
class DecoderResult:
    """One decoder over all prompts.

    Attributes:
        decoder: Its name, `library` for the library's own generate.
        decode: Its settings; None for the library.
        tokens: Generated tokens, end tokens included.
        forwards: Forward passes, prefill included; None for the library, which does not count.
        seconds: Wall seconds, prefill included.
        speedup: Tokens per second / those of `ar` on the same weights in the same run.
        median_speedup: The median of that ratio over prompts.
        mismatches: Where its ids differ from those of `ar` (for `ar`: from the library's).
        quality: Of its own answers.
        accepted: How many forwards added 1, 2, 3, … tokens.
    """

    decoder: str
    decode: DecodeConfig | None
    prompts: int
    tokens: int
    forwards: int | None
    seconds: float
    speedup: float
    median_speedup: float
    mismatches: list[Mismatch]
    quality: Quality
    accepted: dict[int, int]

    @property
    def tokens_per_second(self) -> float:
        """TPS."""
        return self.tokens / self.seconds

    @property
    def tokens_per_forward(self) -> float | None:
        """TPF; None for the library."""
        return None if self.forwards is None else self.tokens / self.forwards

    @property
    def exact(self) -> int:
        """Answers whose ids equal the reference's, token for token."""
        return self.prompts - len(self.mismatches)

    def to_dict(self) -> dict[str, Any]:
        """For JSON: speed, exactness and quality together."""
        return {
            "decoder": self.decoder,
            "block_size": None if self.decode is None or self.decoder == AR else self.decode.block_size,
            "settings": None if self.decode is None else self.decode.to_dict(),
            "tokens": self.tokens,
            "forwards": self.forwards,
            "tokens_per_forward": self.tokens_per_forward,
            "seconds": self.seconds,
            "tokens_per_second": self.tokens_per_second,
            "speedup": self.speedup,
            "median_speedup": self.median_speedup,
            "exact": self.exact,
            "of": self.prompts,
            "exact_against": LIBRARY if self.decoder == AR else AR,
            "mismatches": [mismatch.to_dict() for mismatch in self.mismatches],
            "quality": self.quality.to_dict(),
            "accepted": {str(length): count for length, count in self.accepted.items()},
        }


@dataclasses.dataclass(frozen=True)
class ModelResult:
    """All decoders on one model, and what a sweep costs on this machine."""

    label: str
    model: str
    dtype: str
    device: str
    max_new_tokens: int
    task: Task
    decoders: list[DecoderResult]
    cost: dict[int, dict[str, float]]
    cost_context: int

    def __getitem__(self, decoder: str) -> DecoderResult:
        """The first result of a decoder."""
        return next(result for result in self.decoders if result.decoder == decoder)

    def to_dict(self) -> dict[str, Any]:
        """For JSON, with the schema's version."""
        return {
            "version": SCHEMA_VERSION,
            "label": self.label,
            "model": self.model,
            "dtype": self.dtype,
            "device": self.device,
            "threads": torch.get_num_threads() if self.device == "cpu" else None,
            "max_new_tokens": self.max_new_tokens,
            "task": self.task,
            "prompts": self.decoders[0].prompts,
            "decoders": [result.to_dict() for result in self.decoders],
            "cost": {str(size): entry for size, entry in self.cost.items()},
            "cost_context": self.cost_context,
        }


def bench(
    loaded: Loaded,
    prompts: Sequence[Prompt],
    *,
    decode: Sequence[DecodeConfig],
    max_new_tokens: int,
    task: Task = "none",
    label: str | None = None,
    on_progress: Callable[[int, int], None] | None = None,
) -> ModelResult:
    """Measure decoders on one model, batch of one.

    Args:
        loaded: Model and tokenizer.
        prompts: What to answer, at least one.
        decode: The decoders; `ar` and the library's generate are added.
        max_new_tokens: Longest answer, tokens; less where the model's context ends before.
        task: How answers are graded; none reports looping and finished answers only.
        label: What tables call the model; its name by default.
        on_progress: Told prompts done and prompts in all.

    Raises:
        DataError: There are no prompts, or the task needs answers that are not there.
    """
    if not prompts:
        raise DataError("There is nothing to measure", seen="0 prompts", expected="at least 1")
    backbone = Backbone(loaded.model)
    contestants: list[DecodeConfig | None] = [None, DecodeConfig(decoder=AR)]
    contestants += [config for config in dict.fromkeys(decode) if config.decoder != AR]
    for config in contestants:
        _answer(loaded, backbone, prompts[0], config, max_new_tokens)
    found: list[list[Answer]] = [[] for _ in contestants]
    for index, prompt in enumerate(prompts):
        for turn in range(len(contestants)):
            place = (index + turn) % len(contestants)
            found[place].append(_answer(loaded, backbone, prompt, contestants[place], max_new_tokens))
        if on_progress is not None:
            on_progress(index + 1, len(prompts))
    results = []
    for config, given in zip(contestants, found, strict=True):
        quality = quality_of([a.ids for a in given], prompts, loaded.tokenizer, backbone.eos_ids, task)
        reference = found[0] if config is not None and config.decoder == AR else found[1]
        mismatches = [
            mismatch
            for prompt, answer, other in zip(prompts, given, reference, strict=True)
            if (mismatch := find_mismatch(backbone, prompt, answer.ids, other.ids)) is not None
        ]
        results.append(_result(config, given, found[1], mismatches, quality))
    context = round(statistics.median(len(p.ids) + len(a.ids) / 2 for p, a in zip(prompts, found[1], strict=True)))
    return ModelResult(
        label=label or loaded.config.name,
        model=loaded.config.name,
        dtype=str(backbone.dtype).removeprefix("torch."),
        device=backbone.device.type,
        max_new_tokens=max_new_tokens,
        task=task,
        decoders=results,
        cost=cost_ratios(backbone, [config.block_size for config in contestants[2:] if config], context),
        cost_context=context,
    )


def _answer(
    loaded: Loaded, backbone: Backbone, prompt: Prompt, config: DecodeConfig | None, max_new_tokens: int
) -> Answer:
    """Decode one prompt through the public entry, as a user would, and time it."""
    ids = torch.tensor([prompt.ids], device=backbone.device)
    options: dict[str, Any] = {
        **GREEDY,
        "attention_mask": torch.ones_like(ids),
        "max_new_tokens": budget(backbone, len(prompt.ids), max_new_tokens),
        "return_dict_in_generate": True,
    }
    synchronise(backbone.device)
    started = time.perf_counter()
    if config is None:
        out = loaded.model.generate(ids, **options)  # type: ignore[operator]
    else:
        out = generate(loaded.model, ids, decode=config, tokenizer=loaded.tokenizer, **options)
    synchronise(backbone.device)
    seconds = time.perf_counter() - started
    stats = out.stats.rows[0] if isinstance(out, GenerateOutput) and out.stats is not None else None
    return Answer(out.sequences[0, len(prompt.ids) :].tolist(), seconds, stats)


def _result(
    config: DecodeConfig | None,
    given: Sequence[Answer],
    ar: Sequence[Answer],
    mismatches: list[Mismatch],
    quality: Quality,
) -> DecoderResult:
    tokens, seconds = sum(len(a.ids) for a in given), sum(a.seconds for a in given)
    ar_rate = sum(len(a.ids) for a in ar) / sum(a.seconds for a in ar)
    ratios = [(len(a.ids) / a.seconds) / (len(other.ids) / other.seconds) for a, other in zip(given, ar, strict=True)]
    counts = [a.stats for a in given if a.stats is not None]
    accepted: Counter[int] = Counter()
    for count in counts:
        accepted.update(count.accepted)
    return DecoderResult(
        decoder=LIBRARY if config is None else config.decoder,
        decode=config,
        prompts=len(given),
        tokens=tokens,
        forwards=sum(count.forwards for count in counts) if counts else None,
        seconds=seconds,
        speedup=tokens / seconds / ar_rate,
        median_speedup=statistics.median(ratios),
        mismatches=mismatches,
        quality=quality,
        accepted=dict(sorted(accepted.items())),
    )
