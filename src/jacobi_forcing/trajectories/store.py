"""Trajectories on disk: Parquet shards with fixed boundaries, and a manifest that is the truth about them.

A folder holds `manifest.json` and `shard-00000.parquet`, `shard-00001.parquet`, ... Shard k holds the k-th run of
`shard_size` planned samples, whatever happened while they were collected, and nothing in it depends on time or place.
So two folders with the same settings have byte-identical shards (same versions of torch and pyarrow on the same kind
of machine). Only the manifest tells when, where and by which command: compare shards, or the hashes in the manifest.

Every file is written under a temporary name, flushed to disk and renamed. A shard counts once the manifest lists it:
whatever else a killed run left behind is removed when the folder is opened again.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from jacobi_forcing.errors import ArtefactError, DataError
from jacobi_forcing.files import TEMPORARY, file_sha256, write_file, write_text
from jacobi_forcing.formats import KEY, stamped
from jacobi_forcing.trajectories.trajectory import Trajectory, read_parquet, require_pyarrow, write_parquet

__all__ = ["Trajectory", "TrajectoryReader", "TrajectoryWriter", "read_manifest"]

logger = logging.getLogger(__name__)

MANIFEST = "manifest.json"
FORMAT = 1
"""Raised whenever a reader of the old layout would misread the new one."""


class TrajectoryWriter:
    """Writes shards into a folder and goes on where a killed run stopped.

    Args:
        folder: Made if it is not there.
        samples: Every sample that the collection is to hold, in ascending order.
        shard_size: Samples per shard.
        block_size: n, tokens per block.
        settings: Everything that decides the content: JSON values only. Equal settings promise equal shards.
        provenance: What is being run, when and where; kept per opening, never compared.

    Raises:
        ArtefactError: The folder holds another collection, or shards without a manifest.
        MissingExtraError: pyarrow is not installed.
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        samples: Sequence[int],
        shard_size: int,
        block_size: int,
        settings: Mapping[str, Any],
        provenance: Mapping[str, Any] | None = None,
    ) -> None:
        require_pyarrow()
        if not samples or any(a >= b for a, b in itertools.pairwise(samples)):
            raise DataError("The samples to collect are empty or out of order", expected="distinct, ascending indices")
        if shard_size < 1:
            raise DataError("The shard size is too small", seen=shard_size, expected="at least 1 sample")
        self.folder = Path(folder)
        self._plan = [list(samples[start : start + shard_size]) for start in range(0, len(samples), shard_size)]
        manifest: dict[str, Any] = {
            "format": FORMAT,
            "complete": False,
            "block_size": block_size,
            "shard_size": shard_size,
            "samples": len(samples),
            "samples_sha256": hashlib.sha256(json.dumps(list(samples)).encode()).hexdigest(),
            # Through JSON, so that settings that were written compare equal to the same ones given anew.
            "settings": json.loads(json.dumps(dict(settings))),
            "shards": [],
            "provenance": [],
        }
        self._manifest = stamped("trajectories", manifest)
        self._open(dict(provenance or {}))

    def _open(self, provenance: dict[str, Any]) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        if (self.folder / MANIFEST).exists():
            found = read_manifest(self.folder)
            _refuse_other_run(self.folder, found, self._manifest)
            self._manifest.update({key: found[key] for key in ("complete", "shards", "provenance")})
        elif any(self.folder.glob("shard-*.parquet")):
            raise ArtefactError(
                f"'{self.folder}' holds shards and no {MANIFEST}", remedy="delete the folder or name another one"
            )
        whole = [entry for entry in self._manifest["shards"] if _is_whole(self.folder, entry)]
        if len(whole) < len(self._manifest["shards"]):
            logger.warning("%d damaged shards are collected again", len(self._manifest["shards"]) - len(whole))
            self._manifest.update(shards=whole, complete=False)
        keep = {entry["file"] for entry in whole}
        for path in [*self.folder.glob("shard-*.parquet"), *self.folder.glob(f"*{TEMPORARY}")]:
            if path.name not in keep:
                path.unlink()
        if not self.complete:
            self._manifest["provenance"].append(provenance)
            self._save_manifest()

    @property
    def complete(self) -> bool:
        """Whether `finish` was reached, in this run or an earlier one."""
        return bool(self._manifest["complete"])

    @property
    def done(self) -> set[int]:
        """Samples whose shard is on disk, the dropped ones among them."""
        kept = {entry["shard"] for entry in self._manifest["shards"]}
        return {sample for index in kept for sample in self._plan[index]}

    def pending(self) -> list[tuple[int, list[int]]]:
        """(shard, its samples) for every shard that is still to be written, in order."""
        kept = {entry["shard"] for entry in self._manifest["shards"]}
        return [(index, list(samples)) for index, samples in enumerate(self._plan) if index not in kept]

    def write_shard(
        self,
        shard: int,
        trajectories: Sequence[Trajectory],
        dropped: Mapping[int, str] | None = None,
        filtered: Mapping[int, str] | None = None,
    ) -> Path:
        """Write one shard and list it in the manifest.

        Args:
            shard: Its number, out of `pending`.
            trajectories: In ascending order of `sample`.
            dropped: Samples of the shard that gave no trajectory, and why.
            filtered: Samples of the shard that a filter kept out, and which filter.

        Raises:
            DataError: The trajectories are not those planned for the shard, or of another block size.
        """
        dropped, filtered = dict(dropped or {}), dict(filtered or {})
        planned = [sample for sample in self._plan[shard] if sample not in dropped and sample not in filtered]
        if [trajectory.sample for trajectory in trajectories] != planned:
            seen = [trajectory.sample for trajectory in trajectories]
            raise DataError(f"Shard {shard} got the wrong samples", seen=seen, expected=planned)
        if other := {t.block_size for t in trajectories} - {self._manifest["block_size"]}:
            raise DataError("A trajectory has another block size", seen=other, expected=self._manifest["block_size"])
        path = self.folder / f"shard-{shard:05d}.parquet"
        write_file(path, lambda temporary: write_parquet(temporary, trajectories))
        entry = {
            "shard": shard,
            "file": path.name,
            "first_sample": self._plan[shard][0],
            "last_sample": self._plan[shard][-1],
            "rows": len(trajectories),
            "dropped": {str(sample): reason for sample, reason in sorted(dropped.items())},
            "filtered": {str(sample): name for sample, name in sorted(filtered.items())},
            "sha256": file_sha256(path),
        }
        self._manifest["shards"] = sorted([*self._manifest["shards"], entry], key=lambda item: int(item["shard"]))
        self._save_manifest()
        return path

    def finish(self) -> None:
        """Mark the collection complete.

        Raises:
            ArtefactError: Shards are still to be written.
        """
        if missing := [shard for shard, _ in self.pending()]:
            raise ArtefactError(f"The collection in '{self.folder}' is not complete", seen=f"missing shards {missing}")
        if not self.complete:
            self._manifest["complete"] = True
            self._save_manifest()

    def _save_manifest(self) -> None:
        write_text(self.folder / MANIFEST, json.dumps(self._manifest, indent=2) + "\n")


class TrajectoryReader:
    """Iterates over the trajectories of a folder in sample order, one shard in memory at a time.

    Args:
        folder: As written by `TrajectoryWriter`.
        allow_incomplete: Read what is there of a collection that has not been finished.

    Raises:
        ArtefactError: There is no readable manifest, or the collection is not complete.
        MissingExtraError: pyarrow is not installed.
    """

    def __init__(self, folder: str | Path, *, allow_incomplete: bool = False) -> None:
        require_pyarrow()
        self.folder = Path(folder)
        self.manifest = read_manifest(self.folder)
        if not self.manifest["complete"] and not allow_incomplete:
            raise ArtefactError(
                f"The collection in '{folder}' is not complete",
                seen=f"{len(self)} of {self.manifest['samples']} samples",
                remedy="start the same collection again, it goes on where it stopped",
            )

    @property
    def block_size(self) -> int:
        """n, tokens per block."""
        return int(self.manifest["block_size"])

    @property
    def has_states(self) -> bool:
        """Whether blocks were swept, and not responses collected alone."""
        return bool(self.manifest.get("settings", {}).get("states", True))

    @property
    def needed_only(self) -> dict[str, Any] | None:
        """The fields of the `NoiseSchedule` whose states alone were collected; None: all states are there."""
        value = self.manifest.get("settings", {}).get("needed_only")
        return None if value is None else dict(value)

    def __len__(self) -> int:
        return sum(int(entry["rows"]) for entry in self.manifest["shards"])

    def __iter__(self) -> Iterator[Trajectory]:
        for entry in self.manifest["shards"]:
            yield from self._shard(entry)

    def verify(self) -> None:
        """Compare every shard with its hash in the manifest.

        Raises:
            ArtefactError: A shard is missing or differs.
        """
        for entry in self.manifest["shards"]:
            if not _is_whole(self.folder, entry):
                raise _damaged(self.folder / entry["file"], "its SHA-256 differs from the manifest, or it is missing")

    def _shard(self, entry: Mapping[str, Any]) -> list[Trajectory]:
        path = self.folder / str(entry["file"])
        try:
            trajectories = read_parquet(path)
        except (OSError, ValueError, KeyError) as error:  # pyarrow's own errors derive from ValueError and OSError
            raise _damaged(path, " ".join(str(error).split())) from error
        if len(trajectories) != entry["rows"]:
            raise _damaged(path, f"{len(trajectories)} rows instead of {entry['rows']}")
        return trajectories


def read_manifest(folder: str | Path) -> dict[str, Any]:
    """The manifest of a folder of trajectories.

    Raises:
        ArtefactError: It is missing, is not JSON, or has another format.
    """
    path = Path(folder) / MANIFEST
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
        if manifest["format"] == FORMAT and {"complete", "block_size", "samples", "shards"} <= manifest.keys():
            return dict(manifest)
    except OSError as error:
        raise ArtefactError(
            f"There are no trajectories in '{folder}'",
            seen=f"{MANIFEST}: {error.strerror}",
            remedy="collect them first",
        ) from error
    except (ValueError, KeyError, TypeError) as error:
        raise ArtefactError(
            f"'{path}' is damaged", seen=str(error), remedy="delete the folder and collect again"
        ) from error
    raise ArtefactError(
        f"'{path}' has another format", seen=manifest["format"], expected=FORMAT, remedy="collect again"
    )


def _refuse_other_run(folder: Path, found: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    """Raise unless both manifests promise the same shards."""
    old, new = {**found, **found.get("settings", {})}, {**wanted, **wanted["settings"]}
    ignored = {KEY, "complete", "shards", "provenance", "settings"}
    # Hashes last: a count or a seed that differs tells more.
    for key in sorted((old.keys() | new.keys()) - ignored, key=lambda key: (key.endswith("sha256"), key)):
        if old.get(key) != new.get(key):
            raise ArtefactError(
                f"'{folder}' holds trajectories of another run: '{key}' differs",
                seen=old.get(key),
                expected=new.get(key),
                remedy="name another folder, or delete this one to collect anew",
            )


def _damaged(path: Path, seen: str) -> ArtefactError:
    return ArtefactError(
        f"'{path}' is damaged", seen=seen, remedy="start the collection again, it replaces damaged shards"
    )


def _is_whole(folder: Path, entry: Mapping[str, Any]) -> bool:
    path = folder / str(entry["file"])
    return path.is_file() and file_sha256(path) == entry["sha256"]
