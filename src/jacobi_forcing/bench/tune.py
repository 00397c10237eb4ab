"""Which settings are fastest for a model on this device: a grid, searched in few runs or in full.

All settings that are still in the running decode a batch in turn before the next batch begins, `ar` among them, and the
order turns with the batches. A setting's answers are compared with `ar`'s token for token; one that is at fault is out.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from jacobi_forcing.backbone import Backbone
from jacobi_forcing.bench.contestants import AR, Contestant, Turn, used
from jacobi_forcing.bench.exactness import find_mismatch
from jacobi_forcing.bench.halving import Rung, Step, plan, search
from jacobi_forcing.bench.journal import Journal, rate
from jacobi_forcing.bench.verdict import judged
from jacobi_forcing.config import DecodeConfig, Decoder, Task
from jacobi_forcing.errors import ConfigError, DataError
from jacobi_forcing.loading import Loaded
from jacobi_forcing.trajectories.prompts import Prompt

SHORT, FULL = "short", "full"


@dataclasses.dataclass(frozen=True)
class Grid:
    """What is searched: every combination, each once where settings differ only in what a decoder does not use."""

    decoders: Sequence[Decoder] = ("window", "recycle", "multiblock")
    block_sizes: Sequence[int] = (8, 16, 32, 64)
    candidates: Sequence[int] = (0, 1, 2, 4, 8)
    num_blocks: Sequence[int] = (2,)
    spawn_ratios: Sequence[float] = (0.0, 0.85)

    def settings(self) -> list[DecodeConfig]:
        """All of them; `ar` comes first. `recycle` without candidates is `window`."""
        axes = (self.decoders, self.block_sizes, self.candidates, self.num_blocks, self.spawn_ratios)
        found = [
            DecodeConfig(
                decoder="window" if name == "recycle" and lines == 0 else name,
                block_size=size,
                candidates=lines,
                num_blocks=blocks,
                spawn_ratio=ratio,
            )
            for name, size, lines, blocks, ratio in itertools.product(*axes)
        ]
        return list(dict.fromkeys(used(config) for config in [DecodeConfig(decoder=AR), *found]))


@dataclasses.dataclass(frozen=True)
class Search:
    """How it is searched.

    Attributes:
        full: Measure every setting on every batch; otherwise by successive halving.
        compare: With `full`: search by halving as well, with runs of its own, and tell how near to the grid's best it
            comes.
        repeats: Timed runs of a setting on a batch, of which the median counts; by halving of the finalists only.
    """

    full: bool = False
    compare: bool = False
    repeats: int = 3


class _Clock:
    """Times settings on batches, those that the journal does not hold yet."""

    def __init__(
        self,
        loaded: Loaded,
        batches: Sequence[Sequence[Prompt]],
        settings: Sequence[DecodeConfig],
        max_new_tokens: int,
        journal: Journal,
        tell: Callable[[int], None],
    ) -> None:
        self._loaded, self._backbone = loaded, Backbone(loaded.model)
        self._batches, self._limit, self._journal, self._tell = batches, max_new_tokens, journal, tell
        self._contestants = [Contestant(config.decoder, config) for config in settings]
        self._warm: set[int] = set()

    def measure(self, name: str, settings: Sequence[int], batches: int, repeats: int) -> None:
        """Time settings and `ar` on the first batches, in turns; what is there already is not measured again."""
        for repeat, batch in itertools.product(range(repeats), range(batches)):
            others = sorted(settings)
            start = (batch + repeat) % max(1, len(others))
            order = [*others[start:], *others[:start]]
            # `ar` first where its answers are not known yet: the others are compared with them.
            order.insert(0 if self._answers(name, batch) is None else len(order) - start, 0)
            for setting in order:
                if (setting, batch, repeat) not in self._journal.of(name):
                    self._time(name, setting, batch, repeat)
                self._tell(1)

    def _answers(self, name: str, batch: int) -> list[list[int]] | None:
        call = self._journal.of(name).get((0, batch, 0))
        return None if call is None else call["ids"]

    def _time(self, name: str, setting: int, batch: int, repeat: int) -> None:
        contestant, prompts = self._contestants[setting], self._batches[batch]
        if setting not in self._warm:
            contestant.take(self._loaded, self._backbone, self._batches[0], self._limit)
            self._warm.add(setting)
        turn = contestant.take(self._loaded, self._backbone, prompts, self._limit)
        figures: dict[str, Any] = {
            "tokens": turn.tokens,
            "forwards": turn.row_forwards,
            "seconds": turn.seconds,
            **self._compared(turn, prompts, self._answers(name, batch) or turn.ids),
        }
        if (setting, repeat) == (0, 0):
            figures["ids"] = turn.ids
        self._journal.add(name, (setting, batch, repeat), figures)

    def _compared(self, turn: Turn, prompts: Sequence[Prompt], reference: Sequence[list[int]]) -> dict[str, int]:
        found = [
            find_mismatch(self._backbone, prompt, ids, other, turn.limit)
            for prompt, ids, other in zip(prompts, turn.ids, reference, strict=True)
        ]
        wrong = [mismatch for mismatch in found if mismatch is not None]
        ties = sum(mismatch.near_tie for mismatch in wrong)
        return {"of": len(prompts), "near_ties": ties, "faults": len(wrong) - ties}


def tune(
    loaded: Loaded,
    prompts: Sequence[Prompt],
    *,
    grid: Grid | None = None,
    how: Search | None = None,
    max_new_tokens: int,
    batch_size: int = 1,
    task: Task = "none",
    label: str | None = None,
    journal: Path | None = None,
    head: Mapping[str, Any] | None = None,
    on_progress: Callable[[int, int], None] | None = None,
) -> dict[str, Any]:
    """Search a grid of settings for the fastest one.

    Args:
        loaded: Model and tokenizer.
        prompts: What to answer, one batch at least; a last batch that would be smaller is left out.
        grid: What is searched.
        how: In few runs or in full.
        max_new_tokens: Longest answer, tokens; less where the model's context ends before.
        batch_size: Rows decoded side by side.
        task: How answers are graded.
        label: What figures call the model; its name by default.
        journal: File of the calls, in which a search that was killed goes on.
        head: What else the calls depend on, such as the source of the prompts: a journal with another head is refused.
        on_progress: Told runs done and runs expected.

    Returns:
        The result without its schema's name and provenance, see `formats/schemas/tune-1.json`.

    Raises:
        ArtefactError: The journal belongs to another search.
        ConfigError: The grid is empty, or a number is too small.
        DataError: There are too few prompts, or the task needs answers that are not there.
    """
    grid, how = grid or Grid(), how or Search()
    settings = grid.settings()
    batches = [prompts[start : start + batch_size] for start in range(0, len(prompts) - batch_size + 1, batch_size)]
    _check(settings, batches, batch_size, how)
    told = {**(head or {}), "settings": [config.to_dict() for config in settings], "batch_size": batch_size}
    told |= {"max_new_tokens": max_new_tokens, "prompts": [prompt.index for prompt in prompts]}
    book = Journal(journal, told | _speed_of(loaded))
    wanted = _wanted(len(settings) - 1, len(batches), how)
    expected = sum(_runs(len(settings) - 1, rungs) for rungs in wanted.values())
    clock = _Clock(loaded, batches, settings, max_new_tokens, book, _teller(expected, on_progress))
    steps = {name: _searched(name, len(settings), rungs, clock, book) for name, rungs in wanted.items()}
    asked = [prompt for batch in batches for prompt in batch]
    return {
        "label": label or loaded.config.name,
        "model": loaded.config.name,
        "max_new_tokens": max_new_tokens,
        "batch_size": batch_size,
        "task": task,
        "prompts": len(asked),
        "repeats": how.repeats,
        **judged(loaded, asked, settings, steps, book, task),
    }


def _speed_of(loaded: Loaded) -> dict[str, Any]:
    """What times depend on, beside the machine: runs of other settings are not gone on with."""
    packed = {"packed_weights": True} if Backbone(loaded.model).packed_weights else {}
    return {"threads": torch.get_num_threads(), **packed}


def _wanted(settings: int, batches: int, how: Search) -> dict[str, list[Rung]]:
    """The rungs of each search, the one that counts first."""
    short = {SHORT: plan(settings, batches, how.repeats)}
    return {FULL: [Rung(batches, how.repeats, 1)], **(short if how.compare else {})} if how.full else short


def _check(settings: Sequence[DecodeConfig], batches: Sequence[Any], batch_size: int, how: Search) -> None:
    if len(settings) < 2:
        raise ConfigError("There is nothing to search", seen="only ar", expected="at least one other setting")
    for name, value in (("batch_size", batch_size), ("repeats", how.repeats)):
        if value < 1:
            raise ConfigError(f"'{name}' is too small", seen=value, expected="at least 1")
    if how.compare and not how.full:
        raise ConfigError(
            "The short search can be compared with the full grid only", remedy="ask for the full grid too"
        )
    if not batches:
        raise DataError("There are too few prompts to measure", expected=f"at least {batch_size}")


def _searched(name: str, count: int, rungs: Sequence[Rung], clock: _Clock, book: Journal) -> list[Step]:
    def score(setting: int, batches: int, repeats: int) -> float | None:
        calls = book.of(name)
        places = list(itertools.product(range(batches), range(repeats)))
        if any(calls[setting, *place]["faults"] for place in places):
            return None
        return rate(calls, setting, places)

    return search(range(1, count), rungs, lambda *what: clock.measure(name, *what), score)


def _runs(settings: int, rungs: Sequence[Rung]) -> int:
    """Runs that a search takes if no setting is kept for being close, those of `ar` and of earlier rungs included."""
    alive, total = settings, 0
    for rung in rungs:
        total += (alive + 1) * rung.batches * rung.repeats
        alive = min(alive, rung.keep)
    return total


def _teller(expected: int, on_progress: Callable[[int, int], None] | None) -> Callable[[int], None]:
    done = 0

    def tell(count: int) -> None:
        nonlocal done
        done += count
        if on_progress is not None:
            on_progress(done, max(done, expected))

    return tell
