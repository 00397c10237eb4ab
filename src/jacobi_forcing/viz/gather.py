"""What a folder holds: the report of a run, its logs, and every result file beside them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jacobi_forcing.errors import ArtefactError
from jacobi_forcing.files import read_json
from jacobi_forcing.formats import Result, identify, read_lines
from jacobi_forcing.provenance import portable

_SKIPPED = ("model", "stages", "checkpoints", "trajectories")
"""Folders of a run in which no result lies."""


@dataclasses.dataclass
class Found:
    """Everything that a report can tell of.

    Attributes:
        name: What the report is about: the folder's name.
        run: `report.json` of a recipe's run.
        results: Other results by kind, with the name of each file.
        logs: Lines of `round-R/log.jsonl`, by round.
        probes: Lines of `round-R/probe.jsonl`, by round.
        manifests: Manifests of trajectories, by round.
        adapter: Settings of the adapter in `model/`, where there is one.
        notes: What people should know about the files.
    """

    name: str
    run: dict[str, Any] | None = None
    results: dict[str, list[tuple[str, dict[str, Any]]]] = dataclasses.field(default_factory=dict)
    logs: dict[int, list[dict[str, Any]]] = dataclasses.field(default_factory=dict)
    probes: dict[int, list[dict[str, Any]]] = dataclasses.field(default_factory=dict)
    manifests: dict[int, dict[str, Any]] = dataclasses.field(default_factory=dict)
    adapter: dict[str, Any] | None = None
    notes: list[str] = dataclasses.field(default_factory=list)

    def of(self, kind: str) -> list[tuple[str, dict[str, Any]]]:
        """Name and value of the results of a kind."""
        return self.results.get(kind, [])

    @property
    def models(self) -> list[dict[str, Any]]:
        """Measured models: those of the run, before and after training."""
        return list(self.run["models"]) if self.run is not None else []

    @property
    def benches(self) -> list[dict[str, Any]]:
        """Measured models of all benches; where two files have one of the same label, it also says which."""
        labels = [model["label"] for model in self.models]
        labels += [model["label"] for _, value in self.of("bench") for model in value["models"]]
        return [
            {**model, "label": f"{model['label']} in {name}"} if labels.count(model["label"]) > 1 else model
            for name, value in self.of("bench")
            for model in value["models"]
        ]


def gather(folder: str | Path, extra: Sequence[str | Path] = ()) -> Found:
    """Read a folder.

    Args:
        folder: Of a run, or any that holds result files, at its top or one folder below.
        extra: Further result files, from elsewhere.

    Raises:
        ArtefactError: There is no such folder, nothing in it can be told of, or a file that is a result is damaged.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise ArtefactError(f"There is no folder '{folder}'", remedy="name the output of a run")
    found = Found(folder.resolve().name)
    for path in _files(folder):
        _take(found, path, path.relative_to(folder).as_posix(), strict=False)
    for path in map(Path, extra):
        _take(found, path, path.name, strict=True)
    for place in sorted(folder.glob("round-*")):
        number = place.name.removeprefix("round-")
        if number.isdigit():
            _round(found, place, int(number))
    settings = folder / "model" / "adapter_config.json"
    found.adapter = read_json(settings) if settings.is_file() else None
    if found.run is None and not found.results:
        raise ArtefactError(
            f"There are no results in '{folder}'",
            expected="report.json of `jforce run`, or .json files of bench, eval, profile or tune",
            remedy="name the output of a run, or write results there with --output",
        )
    return found


def _files(folder: Path) -> list[Path]:
    below = [path for path in sorted(folder.iterdir()) if path.is_dir() and path.name not in _SKIPPED]
    places = [folder, *(path for path in below if not path.name.startswith("round-"))]
    return [path for place in places for path in sorted(place.glob("*.json"))]


def _take(found: Found, path: Path, name: str, *, strict: bool) -> None:
    """Add one file. What is no result at all is passed over, unless it was asked for."""
    try:
        value = read_json(path)
    except ArtefactError:
        if strict or path.name == "report.json":
            raise
        found.notes.append(f"{name} is not read: it is no JSON object.")
        return
    if not strict and "schema" not in value and value.get("kind") not in ("run", "bench", "ablation"):
        return
    result = identify(_published(value), name)
    if result.note is not None:
        found.notes.append(result.note + ".")
    _add(found, result, name)


def _published(value: Any) -> Any:
    """A result without paths of the machine that it was made on; old ones have some."""
    if isinstance(value, dict):
        return {name: _published(part) for name, part in value.items()}
    if isinstance(value, list):
        return [_published(part) for part in value]
    return portable(value) if isinstance(value, str) and value.startswith("/") else value


def _add(found: Found, result: Result, name: str) -> None:
    if result.kind == "run" and found.run is None:
        found.run = result.value
    elif result.kind == "run":
        found.notes.append(f"{name} is left out: there is the report of a run already.")
    else:
        found.results.setdefault(result.kind, []).append((name, result.value))


def _round(found: Found, place: Path, number: int) -> None:
    for name, kind, into in (("log.jsonl", "train-log", found.logs), ("probe.jsonl", "probe", found.probes)):
        if (place / name).is_file():
            into[number] = read_lines(place / name, kind)
    manifest = place / "trajectories" / "manifest.json"
    if manifest.is_file():
        found.manifests[number] = read_json(manifest)
