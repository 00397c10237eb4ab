"""What the decoding loop costs beside the model's forwards.

A decoder runs on a real prompt, and the wall time of each of its sweeps is set against the time of the bare forward
that the sweep contains. The bare forward is timed twice over: inside the loop, between hooks on the model, and in a
replay of the run that does nothing but the forwards, with the same ids, positions, masks and cache.
"""

from __future__ import annotations

import dataclasses
import inspect
import statistics
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from jacobi_forcing.backbone import Backbone
from jacobi_forcing.bench.contestants import AR, label_of, used
from jacobi_forcing.bench.cost import synchronise
from jacobi_forcing.cache import KVCache
from jacobi_forcing.config import DecodeConfig
from jacobi_forcing.decode.engine import make_row, sweeps
from jacobi_forcing.decode.rows import Row
from jacobi_forcing.evaluate.quality import budget
from jacobi_forcing.loading import Loaded
from jacobi_forcing.trajectories.prompts import Prompt

REPEATS = 5


@dataclasses.dataclass(frozen=True)
class Overhead:
    """One decoder on one prompt; the prefill is left out of all figures.

    Attributes:
        decode: The decoder.
        sweeps: Forward passes of the run.
        sweep_seconds: Median wall time of a sweep: lines packed, mask built, forward, accepted, cache moved.
        forward_seconds: Median wall time of the bare forward in the replay.
        ratio: Median over sweeps of a sweep's time over that of its own bare forward in the replay.
        ratio_in_loop: The same with the forward timed inside the loop.
    """

    decode: DecodeConfig
    sweeps: int
    sweep_seconds: float
    forward_seconds: float
    ratio: float
    ratio_in_loop: float

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        name = self.decode.decoder
        return {
            "decoder": name,
            "block_size": None if name == AR else self.decode.block_size,
            "settings": self.decode.to_dict(),
            "label": label_of(self.decode),
            **{field: value for field, value in dataclasses.asdict(self).items() if field != "decode"},
        }


@dataclasses.dataclass(frozen=True)
class _Call:
    """One forward of a run: what the loop passed to `Backbone.forward`, and the slots that were kept of it."""

    inputs: dict[str, Any]
    kept: list[Sequence[Sequence[int]]] = dataclasses.field(default_factory=list)


class _Journal(Backbone):
    """Writes down every forward and what was committed of it."""

    calls: list[_Call]
    _nested = False

    def new_cache(self, rows: int = 1, capacity: int | None = None) -> KVCache:
        self.calls, self.capacity = [], capacity
        return _JournalCache(self.calls, rows, capacity)

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        if self._nested:  # the backbone may call itself
            return super().forward(*args, **kwargs)
        inputs = inspect.signature(super().forward).bind(*args, **kwargs).arguments
        del inputs["cache"]
        self.calls.append(_Call({name: _copy(value) for name, value in inputs.items()}))
        self._nested = True
        try:
            return super().forward(*args, **kwargs)
        finally:
            self._nested = False


def _copy(value: Any) -> Any:
    """A copy of a tensor, or of a dict of tensors; the loop may write into its own again."""
    if isinstance(value, dict):
        return {name: _copy(part) for name, part in value.items()}
    return value.clone() if isinstance(value, Tensor) else value


class _JournalCache(KVCache):
    def __init__(self, calls: list[_Call], rows: int, capacity: int | None) -> None:
        super().__init__(rows, capacity)
        self._calls = calls

    def commit(self, kept: Sequence[Sequence[int]]) -> None:
        self._calls[-1].kept.append(kept)
        super().commit(kept)


def overheads(
    loaded: Loaded, prompt: Prompt, decode: Sequence[DecodeConfig], max_new_tokens: int, *, repeats: int = REPEATS
) -> list[Overhead]:
    """Measure each decoder on one prompt, as a batch of one.

    Args:
        loaded: Model and tokenizer.
        prompt: What to answer.
        decode: The decoders.
        max_new_tokens: Longest answer, tokens; less where the model's context ends before.
        repeats: Timed runs of the loop and of the replay, in turns, after one that is thrown away.
    """
    return [_overhead(loaded, prompt, used(config), max_new_tokens, repeats) for config in decode]


@torch.inference_mode()
def _overhead(loaded: Loaded, prompt: Prompt, config: DecodeConfig, max_new_tokens: int, repeats: int) -> Overhead:
    backbone, journal = Backbone(loaded.model), _Journal(loaded.model)
    vocabulary = loaded.vocabulary if config.draft_init == "vocabulary" else None
    limit = budget(backbone, len(prompt.ids), max_new_tokens)

    def fresh() -> Row:
        return make_row(backbone, prompt.ids, config, backbone.eos_ids, limit, vocabulary)

    _loop(journal, fresh())  # the warm-up, too
    loops, inside, within, replays = [], [], [], []
    for _ in range(repeats):
        loops.append(_loop(backbone, fresh()))
        replays.append(_replay(backbone, journal))
        with _Clock(backbone) as clock:
            inside.append(_loop(backbone, fresh()))
        within.append(clock.seconds)
    loop, hooked, forward, bare = (_medians(runs) for runs in (loops, inside, within, replays))
    return Overhead(
        decode=config,
        sweeps=len(journal.calls),
        sweep_seconds=statistics.median(loop),
        forward_seconds=statistics.median(bare),
        ratio=statistics.median(a / b for a, b in zip(loop, bare, strict=True)),
        ratio_in_loop=statistics.median(a / b for a, b in zip(hooked, forward, strict=True)),
    )


def _medians(runs: Sequence[Sequence[float]]) -> list[float]:
    """Each sweep's median over runs, the prefill left out where anything follows it."""
    found = [statistics.median(times) for times in zip(*runs, strict=True)]
    return found[1:] or found


def _loop(backbone: Backbone, row: Row) -> list[float]:
    """Decode a row; the wall seconds of each sweep."""
    seconds = []
    synchronise(backbone.device)
    started = time.perf_counter()
    for _ in sweeps(backbone, [row]):
        synchronise(backbone.device)
        now = time.perf_counter()
        seconds.append(now - started)
        started = now
    return seconds


def _replay(backbone: Backbone, journal: _Journal) -> list[float]:
    """Run a journal's forwards on a cache that grows as it did; the wall seconds of each forward alone."""
    cache, seconds = backbone.new_cache(1, journal.capacity), []
    for call in journal.calls:
        cache.stage(call.inputs["ids"].shape[1], backbone.device)
        synchronise(backbone.device)
        started = time.perf_counter()
        backbone.forward(cache=cache, **call.inputs)
        synchronise(backbone.device)
        seconds.append(time.perf_counter() - started)
        cache.commit(call.kept[0])
    return seconds


class _Clock:
    """Times a model's forwards where they happen."""

    def __init__(self, backbone: Backbone) -> None:
        self._model, self._device = backbone.model, backbone.device
        self._started = 0.0
        self.seconds: list[float] = []

    def __enter__(self) -> _Clock:
        self._handles = [
            self._model.register_forward_pre_hook(self._start),
            self._model.register_forward_hook(self._stop),
        ]
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()

    def _start(self, *_: Any) -> None:
        synchronise(self._device)
        self._started = time.perf_counter()

    def _stop(self, *_: Any) -> None:
        synchronise(self._device)
        self.seconds.append(time.perf_counter() - self._started)
