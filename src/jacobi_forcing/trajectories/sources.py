"""Where rows of text come from: files of JSON lines and data sets of the hub, with errors that say where and why."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from jacobi_forcing.errors import DataError, MissingExtraError


def json_lines(path: str | Path) -> Iterator[tuple[str, Any]]:
    """Read a file of JSON lines as far as it is asked for; empty lines do not count.

    Yields:
        What an error calls the line, and what it holds.

    Raises:
        DataError: The file cannot be read, or a line is broken.
    """
    try:
        with open(path, encoding="utf-8") as file:
            for number, line in enumerate(file, start=1):
                if not line.strip():
                    continue
                where = f"'{path}' line {number}"
                try:
                    record = json.loads(line)
                except ValueError as error:
                    raise DataError(f"{where} is not valid JSON", seen=str(error)) from error
                yield where, record
    except OSError as error:
        raise DataError(f"Cannot read '{path}'", seen=error.strerror, remedy="check the path") from error
    except UnicodeDecodeError as error:
        raise DataError(f"'{path}' is not UTF-8 text", seen=str(error)) from error


def hub_rows(
    name: str,
    subset: str | None,
    split: str,
    *,
    extra: str,
    message: str,
    expected: str | None = None,
    remedy: str | None = None,
) -> Iterable[Any]:
    """Load a split of a hub data set.

    Args:
        name: Of the data set.
        subset: Its configuration; None for the only one.
        split: Which rows.
        extra: The extra of this package that brings `datasets`.
        message: What an error says first.
        expected: What would have been right.
        remedy: What to do instead.

    Raises:
        DataError: It cannot be loaded.
        MissingExtraError: `datasets` is not installed.
    """
    try:
        import datasets
    except ImportError as error:
        raise MissingExtraError("datasets", extra) from error
    try:
        rows: Iterable[Any] = datasets.load_dataset(name, subset, split=split)
    except Exception as error:  # the library raises dozens of kinds: no such set, split or subset, no network
        seen = " ".join(str(error).split())[:300]
        raise DataError(message, seen=seen, expected=expected, remedy=remedy) from error
    return rows
