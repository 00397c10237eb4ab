"""Rows of a benchmark out of a JSONL file, and the check that its own reference answers are right."""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Callable, Sequence
from pathlib import Path

from jacobi_forcing.errors import DataError, MissingExtraError
from jacobi_forcing.evaluate.benchmarks import Benchmark, Grade, Record
from jacobi_forcing.evaluate.sandbox import Isolation, SandboxLimits


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
    try:
        with open(path, encoding="utf-8") as file:
            for number, line in enumerate(file, 1):
                if limit is not None and len(records) >= limit:
                    break
                if not line.strip():
                    continue
                try:
                    record = json.loads(line)
                except ValueError as error:
                    raise DataError(f"'{path}' line {number} is not valid JSON", seen=str(error)) from error
                benchmark.check(record, f"'{path}' line {number}")
                records.append(record)
    except OSError as error:
        raise DataError(f"Cannot read '{path}'", seen=error.strerror, remedy="check the path") from error
    except UnicodeDecodeError as error:
        raise DataError(f"'{path}' is not UTF-8 text", seen=str(error)) from error
    if not records:
        raise DataError(f"'{path}' is empty", expected="one JSON object a line")
    return records


def hub_records(benchmark: Benchmark, limit: int | None = None) -> list[Record]:
    """Load the first rows from the hub.

    Raises:
        DataError: They cannot be loaded, or one lacks a field.
        MissingExtraError: `datasets` is not installed.
    """
    try:
        import datasets
    except ImportError as error:
        raise MissingExtraError("datasets", "eval") from error
    try:
        rows = datasets.load_dataset(benchmark.path, benchmark.subset, split=benchmark.split)
    except Exception as error:  # the library raises dozens of kinds: no such set, split or subset, no network
        raise DataError(
            f"Cannot load '{benchmark.path}' from the hub",
            seen=" ".join(str(error).split())[:300],
            remedy=f"name a file: --data {benchmark.name}=FILE.jsonl",
        ) from error
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
