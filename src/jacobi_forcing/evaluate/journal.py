"""Answers as they are made, one JSON line each, so that a run that is killed goes on with the items that are left."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from jacobi_forcing.errors import ArtefactError
from jacobi_forcing.files import append_text, read_json, whole_lines, write_json


@dataclasses.dataclass(frozen=True)
class Answer:
    """One decoder's answer to one item.

    Attributes:
        task: Name of the benchmark.
        item: Place of the item in its data, from 0.
        decoder: Key of the decoder, see `Contender`.
        prompt: The first 16 hex digits of the SHA-256 of the prompt's ids.
        prompt_tokens: Tokens of the prompt.
        limit: Most tokens that were allowed.
        ids: Generated ids, the end token included.
        text: What they say, without special tokens, cut where a stop string began.
        forwards: Forward passes, prefill included.
        slots: How often a forward behind the prefill took so many tokens.
        seconds: Wall time; of a batch each answer has an equal share.
        rows: Answers that were decoded side by side.
        finished: Ended by an end token or a stop string, within the limit.
        repeats: Ends in a loop.
    """

    task: str
    item: int
    decoder: str
    prompt: str
    prompt_tokens: int
    limit: int
    ids: list[int]
    text: str
    forwards: int
    slots: dict[str, int]
    seconds: float
    rows: int
    finished: bool
    repeats: bool

    @property
    def key(self) -> tuple[str, int, str]:
        """What makes it this answer and no other."""
        return self.task, self.item, self.decoder

    @property
    def tokens(self) -> int:
        """Generated tokens, the end token included."""
        return len(self.ids)


class Journal:
    """The answers so far, in memory and, where there is a folder, on disk.

    Args:
        folder: Where `answers.jsonl` and `settings.json` are; None keeps answers in memory alone.
        settings: All that decides an answer or its time, beside what the answers name. Journals of other settings are
            not gone on with.

    Raises:
        ArtefactError: The folder holds answers of other settings, or a damaged line.
    """

    def __init__(self, folder: Path | None = None, settings: Mapping[str, Any] | None = None) -> None:
        self.answers: dict[tuple[str, int, str], Answer] = {}
        self.found = 0
        self._path = None if folder is None else folder / "answers.jsonl"
        if folder is None or self._path is None:
            return
        self._check(folder, dict(settings or {}))
        if self._path.exists():
            self._read(self._path)
        self.found = len(self.answers)

    def add(self, answers: Iterable[Answer]) -> None:
        """Keep answers; on disk before this returns."""
        new = list(answers)
        self.answers.update((answer.key, answer) for answer in new)
        if self._path is None:
            return
        lines = "".join(json.dumps(dataclasses.asdict(answer), ensure_ascii=False) + "\n" for answer in new)
        append_text(self._path, lines)

    def _check(self, folder: Path, settings: dict[str, Any]) -> None:
        settings = json.loads(json.dumps(settings))
        path = folder / "settings.json"
        if path.exists():
            old = read_json(path)
            other = sorted(name for name in old.keys() | settings.keys() if old.get(name) != settings.get(name))
            if other:
                raise ArtefactError(
                    f"'{folder}' holds answers that were made otherwise",
                    seen="; ".join(f"{name}: {old.get(name)}" for name in other)[:300],
                    expected="; ".join(f"{name}: {settings.get(name)}" for name in other)[:300],
                    remedy="name another --output, or delete that folder",
                )
        else:
            write_json(path, settings)

    def _read(self, path: Path) -> None:
        """Take what is there."""
        for number, line in enumerate(whole_lines(path), 1):
            try:
                answer = Answer(**json.loads(line))
            except (ValueError, TypeError) as error:
                raise ArtefactError(
                    f"'{path}' line {number} is damaged", seen=str(error), remedy="delete that line, or the file"
                ) from error
            self.answers[answer.key] = answer
