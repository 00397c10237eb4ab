"""Timed calls of a search, one line each as they happen: a search that is killed goes on where it was."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from jacobi_forcing.errors import ArtefactError
from jacobi_forcing.files import append_text, whole_lines, write_text
from jacobi_forcing.formats import stamped

HEAD, CALL = "tune-head", "tune-call"
Place = tuple[int, int, int]
"""Setting, batch, repeat."""


class Journal:
    """Calls of one search, in memory and, where a path is given, in a file of JSON lines.

    Args:
        path: The file; None keeps nothing on disk.
        head: What the calls depend on. A file with another head is refused.

    Attributes:
        calls: Every call by search, then place.

    Raises:
        ArtefactError: The file belongs to another search, or is damaged before its last line.
    """

    def __init__(self, path: Path | None, head: Mapping[str, Any]) -> None:
        self.path = path
        self.calls: dict[str, dict[Place, dict[str, Any]]] = {}
        first = stamped(HEAD, head)
        if path is None:
            return
        if path.exists():
            self._read(path, first)
        else:
            write_text(path, json.dumps(first, ensure_ascii=False) + "\n")

    def add(self, search: str, place: Place, figures: Mapping[str, Any]) -> None:
        """Keep a call; it is on disk when this returns."""
        setting, batch, repeat = place
        call = {"search": search, "setting": setting, "batch": batch, "repeat": repeat, **figures}
        self._keep(call)
        if self.path is not None:
            append_text(self.path, json.dumps(stamped(CALL, call)) + "\n")

    def of(self, search: str) -> dict[Place, dict[str, Any]]:
        """The calls of a search by place."""
        return self.calls.setdefault(search, {})

    def _keep(self, call: Mapping[str, Any]) -> None:
        place = (int(call["setting"]), int(call["batch"]), int(call["repeat"]))
        self.of(str(call["search"]))[place] = dict(call)

    def _read(self, path: Path, head: Mapping[str, Any]) -> None:
        lines = whole_lines(path)  # what a kill left of the last one is measured again
        try:
            found, *calls = [json.loads(line) for line in lines] or [None]
        except ValueError as error:
            raise ArtefactError(
                f"'{path}' is damaged", seen=str(error), remedy="remove it, or start anew with --fresh"
            ) from error
        if found != json.loads(json.dumps(head)):
            differ = sorted(key for key in head if not isinstance(found, dict) or found.get(key) != head[key])
            raise ArtefactError(
                f"'{path}' holds the calls of another search",
                seen="other " + ", ".join(differ),
                remedy="name another --output, or start anew with --fresh",
            )
        for call in calls:
            self._keep(call)


def rate(calls: Mapping[Place, Mapping[str, Any]], setting: int, places: Iterable[tuple[int, int]]) -> float | None:
    """TPS of a setting: tokens of all batches over the sum of their median seconds; None where it was never measured.

    Args:
        calls: By place.
        setting: Which.
        places: Batches and repeats that count.
    """
    seconds: dict[int, list[float]] = {}
    tokens: dict[int, int] = {}
    for batch, repeat in places:
        call = calls.get((setting, batch, repeat))
        if call is not None:
            seconds.setdefault(batch, []).append(call["seconds"])
            tokens[batch] = call["tokens"]
    total = sum(statistics.median(values) for values in seconds.values())
    return sum(tokens.values()) / total if total else None
