"""What a collection did."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Iterator


@dataclasses.dataclass
class CollectReport:
    """What one call of `collect` did.

    Attributes:
        resumed: Samples that an earlier run had done already; the other figures leave them out.
        responses: Trajectories written.
        tokens: Response tokens in them.
        unfinished: Responses that met the token limit before an end token.
        blocks: Blocks in them.
        sweeps: Sweeps of single blocks; sweeps / blocks is the mean length of a trajectory.
        spared: Sweeps of single blocks that `needed_only` left out, at most: the slots still wrong where it stopped.
        forwards: Forward passes that carried those sweeps.
        near_ties: Blocks in which a sweep and the generation rounded a near tie differently (see `collect`).
        dropped: Samples that gave no trajectory because sweep and generation disagree.
        filtered: Samples that a filter kept out.
        checked: Responses made elsewhere that were compared with the model.
        response_near_ties: Their tokens that differ from the model's by no more than rounding explains.
        fixed_point_seconds: Wall time of the greedy responses, summed over all workers, like the next.
        trajectory_seconds: Wall time of the sweeps.
        write_seconds: Wall time of writing shards.
    """

    resumed: int = 0
    responses: int = 0
    tokens: int = 0
    unfinished: int = 0
    blocks: int = 0
    sweeps: int = 0
    spared: int = 0
    forwards: int = 0
    near_ties: int = 0
    dropped: int = 0
    filtered: int = 0
    checked: int = 0
    response_near_ties: int = 0
    fixed_point_seconds: float = 0.0
    trajectory_seconds: float = 0.0
    write_seconds: float = 0.0

    def to_dict(self) -> dict[str, int | float]:
        """A plain dict for JSON."""
        return dataclasses.asdict(self)

    def add(self, other: CollectReport) -> None:
        """Add the figures of another report."""
        for field in dataclasses.fields(self):
            setattr(self, field.name, getattr(self, field.name) + getattr(other, field.name))

    @contextlib.contextmanager
    def timed(self, field: str) -> Iterator[None]:
        """Add the wall time of a `with` block to one of the figures in seconds."""
        started = time.perf_counter()
        yield
        setattr(self, field, getattr(self, field) + time.perf_counter() - started)
