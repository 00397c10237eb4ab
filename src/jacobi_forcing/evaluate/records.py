"""Rows of a benchmark out of a JSONL file, and the check that its own reference answers are right."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from pathlib import Path

from jacobi_forcing.errors import DataError
from jacobi_forcing.evaluate.benchmarks import Benchmark, Grade, Record
from jacobi_forcing.evaluate.sandbox import Isolation, SandboxLimits
from jacobi_forcing.trajectories.sources import hub_rows, json_lines


def read_records(path: str | Path, benchmark: Benchmark, limit: int | None = None) -> list[Record]:
    """Read the first rows of a file.

    Args:
        path: One JSON object a line.
        benchmark: What they are for; its fields must be there.
        limit: Most rows; None for all.

    Raises:
        DataError: The file cannot be read, is empty, or a line is broken or lacks a field.
    """
    records: list[Record] = []
    for where, record in itertools.islice(json_lines(path), limit):
        benchmark.check(record, where)
        records.append(record)
    if not records:
        raise DataError(f"'{path}' is empty", expected="one JSON object a line")
    return records


def hub_records(benchmark: Benchmark, limit: int | None = None) -> list[Record]:
    """Load the first rows from the hub.

    Raises:
        DataError: They cannot be loaded, or one lacks a field.
        MissingExtraError: `datasets` is not installed.
    """
    rows = hub_rows(
        benchmark.path,
        benchmark.subset,
        benchmark.split,
        extra="eval",
        message=f"Cannot load '{benchmark.path}' from the hub",
        remedy=f"name a file: --data {benchmark.name}=FILE.jsonl",
    )
    records: list[Record] = [dict(row) for row in itertools.islice(rows, limit)]
    for index, record in enumerate(records):
        benchmark.check(record, f"'{benchmark.path}' row {index}")
    return records


@dataclasses.dataclass(frozen=True)
class ReferenceCheck:
    """The grades of a data set's own answers.

    Attributes:
        items: Rows that were graded.
        right: Of them.
        wrong: Place and grade of each other one.
        isolation: The walls around code that was run; None where none was.
    """

    items: int
    right: int
    wrong: list[tuple[int, Grade]]
    isolation: Isolation | None


def check_references(
    benchmark: Benchmark,
    records: Sequence[Record],
    limits: SandboxLimits | None = None,
    on_progress: Callable[[int, int], None] | None = None,
) -> ReferenceCheck:
    """Grade the data set's own answers: a grader that finds them wrong is itself wrong.

    Raises:
        DataError: A row has no reference answer.
    """
    wrong: list[tuple[int, Grade]] = []
    walls: Isolation | None = None
    for index, record in enumerate(records):
        try:
            text = benchmark.reference(record)
        except KeyError as error:
            raise DataError(
                f"Item {index} of '{benchmark.name}' has no reference answer", seen=f"no {error}"
            ) from error
        grade = benchmark.grade(record, text, limits)
        walls = grade.isolation or walls
        if not grade.right:
            wrong.append((index, grade))
        if on_progress is not None:
            on_progress(index + 1, len(records))
    return ReferenceCheck(len(records), len(records) - len(wrong), wrong, walls)
