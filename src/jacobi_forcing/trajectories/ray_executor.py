"""Shards collected by a pool of Ray's actors, on this machine or on the cluster that it belongs to.

Ray Data streams the shards through the pool: an actor holds the model and takes shard after shard. Where an actor dies,
Ray starts another and gives it the shard that was lost; what has been handed on is not done again. Needs the extra
`ray`; whatever is particular to that library is in this file.
"""

from __future__ import annotations

import logging
import os
import pickle
from collections.abc import Iterator
from typing import Any

from jacobi_forcing import errors
from jacobi_forcing.errors import JForceError, MissingExtraError
from jacobi_forcing.trajectories.executors import ShardResult, Shards, ShardWork, Tell

_STORE = 256 * 2**20
"""Memory for results under way where this process starts Ray itself, bytes: a shard takes far less than a MiB."""


class RayExecutor:
    """A pool of actors.

    Args:
        workers: Actors; each has a copy of the model.
        gpus: GPUs of each.
        cpus: CPU cores of each.

    Raises:
        MissingExtraError: Ray is not installed.
    """

    def __init__(self, workers: int, *, gpus: float = 0, cpus: float = 1) -> None:
        require_ray()
        self.workers, self.gpus, self.cpus = workers, gpus, cpus

    def left_over(self, shards: Shards) -> Iterator[ShardResult]:
        """Nothing: each result was handed on at once."""
        yield from ()

    def run(self, work: ShardWork, shards: Shards, tell: Tell) -> Iterator[ShardResult]:
        """See `Executor`.

        Raises:
            JForceError: Whatever the work raises; it is not tried again, for it would fail again.
        """
        if not shards:
            return
        ray = require_ray()
        started = not ray.is_initialized()
        if started:
            self._start(ray)
        try:
            for row in self._results(ray, work, shards):
                result = pickle.loads(row["result"])
                if isinstance(result, _Failure):
                    raise result.error()
                done = len(result.trajectories) + len(result.dropped) + len(result.filtered)
                for stage in ("fixed points", "trajectories"):
                    tell(stage, done)
                yield result
        finally:
            if started:
                ray.shutdown()

    def _start(self, ray: Any) -> None:
        """Join the cluster that RAY_ADDRESS names, or start Ray on this machine."""
        options: dict[str, Any] = {"logging_level": "error", "log_to_driver": False}
        if "RAY_ADDRESS" not in os.environ:
            cores = max(os.cpu_count() or 1, round(self.workers * self.cpus))
            options |= {"num_cpus": cores, "include_dashboard": False, "object_store_memory": _STORE}
        ray.init(**options)

    def _results(self, ray: Any, work: ShardWork, shards: Shards) -> Iterator[dict[str, Any]]:
        context = ray.data.DataContext.get_current()
        # Progress is told by this package, for every executor alike.
        logging.getLogger("ray.data").setLevel(logging.ERROR)
        context.enable_progress_bars = False
        # Ray's own pickling takes functions of the main program along, which plain pickling does not.
        packed = ray.cloudpickle.dumps(work)
        items = [{"shard": shard, "samples": list(samples)} for shard, samples in shards]
        results = ray.data.from_items(items, override_num_blocks=len(items)).map_batches(
            _Actor,
            batch_size=1,
            compute=ray.data.ActorPoolStrategy(size=min(self.workers, len(items)), max_tasks_in_flight_per_actor=1),
            fn_constructor_args=(packed,),
            num_gpus=self.gpus,
            num_cpus=self.cpus,
        )
        yield from results.iter_rows()


class _Actor:
    """Holds the work, and with it the model."""

    def __init__(self, packed: bytes) -> None:
        self.work: ShardWork = require_ray().cloudpickle.loads(packed)

    def __call__(self, batch: dict[str, Any]) -> dict[str, list[bytes]]:
        """Collect the one shard of a batch."""
        (shard,), (samples,) = batch["shard"], batch["samples"]
        try:
            result: Any = self.work(int(shard), [int(sample) for sample in samples])
        except JForceError as error:
            result = _Failure(type(error).__name__, str(error))
        return {"result": [pickle.dumps(result)]}


class _Failure:
    """An error of this package on its way back from an actor."""

    def __init__(self, kind: str, text: str) -> None:
        self.kind, self.text = kind, text

    def error(self) -> JForceError:
        """The error, to be raised again."""
        kind = getattr(errors, self.kind, JForceError)
        return kind(self.text) if kind is not MissingExtraError else JForceError(self.text)


def require_ray() -> Any:
    """The package ray with its data sets; imported here, so that everything else does without it."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        import ray.data
    except ImportError as error:
        raise MissingExtraError("ray", "ray") from error
    return ray
