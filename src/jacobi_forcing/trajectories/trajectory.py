"""A trajectory, and its form in Parquet."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jacobi_forcing.errors import DataError, MissingExtraError


@dataclasses.dataclass(frozen=True)
class Trajectory:
    """One greedy response and the Jacobi trajectory of each of its blocks (section 3 of the paper).

    Attributes:
        sample: Index of the prompt in its source.
        prompt_ids: What the model was given, tokens.
        response_ids: Its greedy response, tokens; the end token is kept where one was reached, nothing follows it.
        finished: Whether the response ended with an end token (False: it met the token limit).
        block_size: n, tokens per block; the last block may be shorter.
        states: Per block, in order, the states y(0)..y(k). y(0) is the random draft as drawn (only slot 0 is right),
            y(k) is the fixed point and equals the block of `response_ids`. No two states share memory. Where only
            responses were collected, the fixed point is the only one.

    Raises:
        DataError: The parts do not fit together.
    """

    sample: int
    prompt_ids: list[int]
    response_ids: list[int]
    finished: bool
    block_size: int
    states: list[list[list[int]]]

    def __post_init__(self) -> None:
        if self.block_size < 1:
            raise self._misfit("has a wrong block size", self.block_size, "at least 1 token")
        if not self.prompt_ids or not self.response_ids:
            raise self._misfit("lacks a prompt or a response", 0, "at least 1 token of each")
        expected = -(-len(self.response_ids) // self.block_size)
        if len(self.states) != expected:
            raise self._misfit("has a wrong number of blocks", len(self.states), expected)
        for index, states in enumerate(self.states):
            fixed_point = self.response_ids[index * self.block_size : (index + 1) * self.block_size]
            if not states or states[-1] != fixed_point:
                seen = states[-1] if states else "no states"
                raise self._misfit(f"does not end at the response in block {index}", seen, fixed_point)
            if any(len(state) != len(fixed_point) for state in states):
                raise self._misfit(
                    f"has states of unequal length in block {index}", list(map(len, states)), len(fixed_point)
                )
            if states[0][0] != fixed_point[0]:
                raise self._misfit(f"has a wrong slot 0 in y(0) of block {index}", states[0][0], fixed_point[0])

    def _misfit(self, message: str, seen: object, expected: object) -> DataError:
        return DataError(
            f"The trajectory of sample {self.sample} {message}", seen=seen, expected=expected, remedy="collect it again"
        )


def require_pyarrow() -> Any:
    """The package pyarrow with its Parquet module; imported here, so that decoding does without it."""
    try:
        import pyarrow.parquet
    except ImportError as error:
        raise MissingExtraError("pyarrow", "train") from error
    return pyarrow


def write_parquet(path: Path, trajectories: Sequence[Trajectory]) -> None:
    """Write trajectories to one file; equal trajectories make equal bytes."""
    pa = require_pyarrow()
    tokens = pa.list_(pa.int32())
    columns = {
        "sample": pa.int64(),
        "prompt_ids": tokens,
        "response_ids": tokens,
        "finished": pa.bool_(),
        "block_size": pa.int32(),
        "states": pa.list_(pa.list_(tokens)),
    }
    table = pa.table({name: pa.array([getattr(t, name) for t in trajectories], kind) for name, kind in columns.items()})
    pa.parquet.write_table(table, path, compression="zstd")


def read_parquet(path: Path) -> list[Trajectory]:
    """Read what `write_parquet` wrote; errors of pyarrow (OSError, ValueError, KeyError) pass through."""
    table = require_pyarrow().parquet.read_table(path)
    names = [field.name for field in dataclasses.fields(Trajectory)]
    columns = [_plain(table[name].combine_chunks()) for name in names]
    return [Trajectory(**dict(zip(names, row, strict=True))) for row in zip(*columns, strict=True)]


def _plain(array: Any) -> list[Any]:
    """Nested lists of an Arrow array; many times faster than `to_pylist`, which boxes every number on its own."""
    if not hasattr(array, "offsets"):
        return list(array.to_numpy(zero_copy_only=False).tolist())
    values, offsets = _plain(array.values), array.offsets.to_numpy().tolist()
    return [values[start:end] for start, end in itertools.pairwise(offsets)]
