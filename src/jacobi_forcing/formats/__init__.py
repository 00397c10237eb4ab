"""What result files look like: one JSON schema (draft 2020-12) for each kind and version, and who reads which.

Every result that this package writes begins with `"schema": "jforce.<kind>/<version>"`; a line of a `.jsonl` file does
too. The schemas are the files `schemas/<kind>-<version>.json` beside this one, and nothing else lists them. Reading
makes a light check only (known kind, known version, required keys); the tests hold whole results against their schemas.

To add a kind, or a version of one:

1. Write `schemas/<kind>-<version>.json` with `"$id": "urn:jforce:<kind>:<version>"` and `schema` as a required key.
   What several kinds share stands in `schemas/common.json`, named as `{"$ref": "urn:jforce:common#/$defs/quality"}`.
2. Where the result is made: `value = stamped("<kind>", {...})`, which takes the highest version that there is.
3. In its test: `from result_schemas import assert_valid` and `assert_valid(value)`.
4. Where it is read: `read_result(path, "<kind>")`, or `read_lines` for a `.jsonl` file.

A new key that old readers may overlook needs no new version: add it to the schema. A version is raised whenever a
reader of the old form would misread the new one.
"""

from __future__ import annotations

import functools
import importlib.resources
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jacobi_forcing.errors import ArtefactError
from jacobi_forcing.files import read_json

KEY = "schema"
"""The key that names kind and version."""
_NAME = re.compile(r"jforce\.([a-z][a-z-]*)/([1-9][0-9]*)")
_FILE = re.compile(r"([a-z][a-z-]*)-([1-9][0-9]*)\.json")


@dataclass(frozen=True)
class Result:
    """A result that was read.

    Attributes:
        value: As it stands in the file.
        kind: Such as `bench`.
        version: Of its schema.
        note: What people should know, where there is anything: the file is older than these schemas.
    """

    value: dict[str, Any]
    kind: str
    version: int
    note: str | None = None


@functools.cache
def versions() -> Mapping[str, tuple[int, ...]]:
    """Every kind that has a schema, and its versions in ascending order."""
    found: dict[str, list[int]] = {}
    for entry in _folder().iterdir():
        if match := _FILE.fullmatch(entry.name):
            found.setdefault(match[1], []).append(int(match[2]))
    return {kind: tuple(sorted(found[kind])) for kind in sorted(found)}


def schema(kind: str, version: int) -> dict[str, Any]:
    """The JSON schema of a kind.

    Raises:
        KeyError: There is no such kind or version.
    """
    if version not in versions().get(kind, ()):
        raise KeyError(f"{kind}/{version}")
    return _load(f"{kind}-{version}.json")


def common() -> dict[str, Any]:
    """The definitions that schemas share."""
    return _load("common.json")


def stamped(kind: str, value: Mapping[str, Any]) -> dict[str, Any]:
    """A result with its schema named first, in the highest version of its kind.

    Raises:
        KeyError: No schema has such a name.
    """
    return {KEY: f"jforce.{kind}/{versions()[kind][-1]}", **value}


def identify(value: Mapping[str, Any], where: str | Path, *kinds: str) -> Result:
    """Tell kind and version of a result, and check that it can be read.

    Args:
        value: The result.
        where: What messages call it: its file.
        *kinds: Those that will do; any by default.

    Raises:
        ArtefactError: It is no result, of another kind, of a version that is not known, or lacks a required key.
    """
    named = value.get(KEY)
    match = _NAME.fullmatch(named) if isinstance(named, str) else None
    kind, version = (match[1], int(match[2])) if match else _by_shape(value)
    if kind not in versions() or (named is not None and match is None):
        expected = f'"{KEY}": "jforce.<kind>/<version>" with a kind out of ' + ", ".join(kinds or versions())
        raise ArtefactError(f"'{where}' is no result of jforce", seen=f"{KEY}: {named}", expected=expected)
    if kinds and kind not in kinds:
        raise ArtefactError(f"'{where}' holds a result of another kind", seen=kind, expected=" or ".join(kinds))
    known = versions()[kind]
    if version not in known:
        newer = version > known[-1]
        raise ArtefactError(
            f"'{where}' has a version of '{kind}' that is not known here",
            seen=version,
            expected=" or ".join(map(str, known)),
            remedy="install a newer jacobi-forcing" if newer else "measure again: this form is no longer read",
        )
    form = f"jforce.{kind}/{version}"
    missing = [key for key in schema(kind, version)["required"] if key not in value and (key != KEY or match)]
    if missing:
        raise ArtefactError(f"'{where}' is damaged", seen="no " + ", ".join(missing), expected=form)
    note = None if match else f"'{where}' names no schema: read as {form}"
    return Result(dict(value), kind, version, note)


def read_result(path: str | Path, *kinds: str) -> Result:
    """Read a result file; see `identify`.

    Raises:
        ArtefactError: It is missing, damaged, or no result that is known.
    """
    return identify(read_json(path), path, *kinds)


def read_lines(path: str | Path, kind: str) -> list[dict[str, Any]]:
    """Read a `.jsonl` file of results of one kind.

    Raises:
        ArtefactError: It is missing, or a line is damaged or of another kind.
    """
    found = []
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ArtefactError(f"Cannot read '{path}'", seen=str(error)) from error
    for number, line in enumerate(lines, 1):
        try:
            value = json.loads(line)
        except ValueError as error:
            raise ArtefactError(f"'{path}' is damaged", seen=f"line {number}: {error}") from error
        if not isinstance(value, dict):
            raise ArtefactError(f"'{path}' is damaged", seen=f"line {number}: {line[:40]}", expected="a JSON object")
        found.append(identify(value, f"{path}:{number}", kind).value)
    return found


def _by_shape(value: Mapping[str, Any]) -> tuple[str, int]:
    """Kind and version of what was written before results named their schema."""
    if value.get("kind") in ("bench", "run", "ablation") and isinstance(value.get("version"), int):
        return str(value["kind"]), int(value["version"])
    if {"format", "shards", "samples"} <= value.keys():
        return "trajectories", int(value["format"])
    if {"step", "tokens_per_forward", "decoder"} <= value.keys():
        return "probe", 1
    if "step" in value and {"loss", "train_loss"} & value.keys():
        return "train-log", 1
    return "", 0


def _folder() -> Any:
    return importlib.resources.files(__package__) / "schemas"


@functools.cache
def _load(name: str) -> dict[str, Any]:
    value = json.loads((_folder() / name).read_text(encoding="utf-8"))
    assert isinstance(value, dict)
    return value
