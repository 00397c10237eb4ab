"""Who collects the shards: this process, all that torchrun started, or a pool of Ray's actors.

An executor is given the shards that are still to be done and yields the result of each once, in any order. The caller
alone writes them into the folder, so whatever an executor does, the shards come out the same. What it yields is kept
at once: a worker that dies costs the shard it was at, and no more.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

from jacobi_forcing import processes
from jacobi_forcing.errors import ArtefactError
from jacobi_forcing.files import remove, write_file, write_json
from jacobi_forcing.trajectories.report import CollectReport
from jacobi_forcing.trajectories.trajectory import Trajectory, read_parquet, write_parquet

logger = logging.getLogger(__name__)

Shards = Sequence[tuple[int, list[int]]]
"""(number of the shard, its samples)."""
Tell = Callable[[str, int], None]
"""Told a stage ("fixed points" or "trajectories") and how many responses have newly gone through it."""

_POLL = 0.2
"""Seconds between looks at what the other processes have finished."""


@dataclasses.dataclass(frozen=True)
class ShardResult:
    """What came of one shard.

    Attributes:
        shard: Its number.
        trajectories: In ascending order of sample.
        dropped: Samples that gave none, and why.
        filtered: Samples that a filter kept out, and which.
        report: Counts and times of this shard alone.
    """

    shard: int
    trajectories: list[Trajectory]
    dropped: dict[int, str]
    filtered: dict[int, str]
    report: CollectReport


class ShardWork(Protocol):
    """What is to be done for one shard; can be pickled where it is to go to other processes."""

    def __call__(self, shard: int, samples: Sequence[int], tell: Tell | None = None) -> ShardResult:
        """Collect one shard."""


class Executor(Protocol):
    """Has shards done, somewhere."""

    def left_over(self, shards: Shards) -> Iterator[ShardResult]:
        """What a run that was killed had finished and not handed on."""

    def run(self, work: ShardWork, shards: Shards, tell: Tell) -> Iterator[ShardResult]:
        """The result of every shard, each as soon as it is there."""


class LocalExecutor:
    """One shard after the other, in this process."""

    def left_over(self, shards: Shards) -> Iterator[ShardResult]:
        """Nothing: each result was handed on at once."""
        yield from ()

    def run(self, work: ShardWork, shards: Shards, tell: Tell) -> Iterator[ShardResult]:
        """See `Executor`."""
        for shard, samples in shards:
            yield work(shard, samples, tell)


class TorchrunExecutor:
    """Every process of torchrun does every P-th shard; the main one hands on what the others leave in the folder.

    To be called in all of them; only the main one is given shards, and only there something is yielded. A process that
    dies ends the run, and `torchrun --max-restarts` starts it anew: then what was finished is not done again.

    Args:
        folder: Of the collection; all processes see it.
        key: What the results belong to; left-over ones of another run are thrown away.
    """

    def __init__(self, folder: str | Path, key: str) -> None:
        self.folder, self.key = Path(folder), key

    def left_over(self, shards: Shards) -> Iterator[ShardResult]:
        """What other processes had finished when the run was killed."""
        pending = {shard for shard, _ in shards}
        for path in sorted(self.folder.glob("part-*.json")):
            result = self._take(path)
            if result is not None and result.shard in pending:
                yield result
        for path in self.folder.glob("part-*"):
            remove(path)

    def run(self, work: ShardWork, shards: Shards, tell: Tell) -> Iterator[ShardResult]:
        """See `Executor`."""
        shards, self.key = processes.from_main((shards, self.key))
        mine = shards[processes.rank() :: processes.count()]
        if not processes.is_main():
            for shard, samples in mine:
                self._leave(work(shard, samples))
            return
        others = {shard: len(samples) for shard, samples in shards if (shard, samples) not in mine}
        for shard, samples in mine:
            yield work(shard, samples, tell)
            yield from self._arrived(others, tell)
        while others:
            yield from self._arrived(others, tell)
            time.sleep(_POLL)

    def _arrived(self, others: dict[int, int], tell: Tell) -> Iterator[ShardResult]:
        for path in sorted(self.folder.glob("part-*.json")):
            result = self._take(path)
            if result is None or result.shard not in others:
                continue
            for stage in ("fixed points", "trajectories"):
                tell(stage, others[result.shard])
            del others[result.shard]
            yield result
            remove(path.with_suffix(".parquet"))
            remove(path)

    def _leave(self, result: ShardResult) -> None:
        """Put a result where the main process finds it; the JSON last, for it tells that the rest is there."""
        path = self.folder / f"part-{result.shard:05d}.parquet"
        write_file(path, lambda temporary: write_parquet(temporary, result.trajectories))
        record = {
            "key": self.key,
            "shard": result.shard,
            "dropped": list(result.dropped.items()),
            "filtered": list(result.filtered.items()),
            "report": result.report.to_dict(),
        }
        write_json(path.with_suffix(".json"), record)

    def _take(self, path: Path) -> ShardResult | None:
        try:
            record: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
            trajectories = read_parquet(path.with_suffix(".parquet"))
        except (OSError, ValueError, KeyError):
            return None
        if record["key"] != self.key:
            return None
        dropped, filtered = dict(record["dropped"]), dict(record["filtered"])
        return ShardResult(record["shard"], trajectories, dropped, filtered, CollectReport(**record["report"]))


def each_once(results: Iterator[ShardResult], shards: Shards) -> Iterator[ShardResult]:
    """Pass results on, and see to it that every shard comes, and comes once.

    Raises:
        ArtefactError: One came twice, was not asked for, or has not come.
    """
    waiting = {shard for shard, _ in shards}
    for result in results:
        if result.shard not in waiting:
            raise ArtefactError(f"Shard {result.shard} was collected twice, or nobody asked for it")
        waiting.remove(result.shard)
        yield result
    if waiting:
        raise ArtefactError("Some shards have not been collected", seen=sorted(waiting))
