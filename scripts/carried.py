"""What travels to a machine without a network and back: one large file in parts, verified when they are joined.

`split` cuts a file, `join` puts it together again; the checksum of the whole and of each part stands in what `split`
returns. `pack` and `unpack` make one file of a folder, so that a model or an adapter travels in the same way.
"""

from __future__ import annotations

import shutil
import tarfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from jacobi_forcing.files import file_sha256, new_folder, write_file

MIB = 2**20
_CHUNK = 8 * MIB


def split(file: Path, targets: Sequence[tuple[Path, int]]) -> dict[str, Any]:
    """Cut a file into parts, named like it with a number behind the name.

    Args:
        file: What to cut.
        targets: For each part its folder, which is made, and its size in bytes; together the size of the file.

    Returns:
        Name, bytes and SHA-256 of the file, and of each of its `parts`: what `join` wants.

    Raises:
        ValueError: The sizes do not add up to that of the file.
    """
    size = file.stat().st_size
    if sum(count for _, count in targets) != size:
        raise ValueError(f"parts of {[count for _, count in targets]} bytes do not make up {size}")
    parts = []
    with file.open("rb") as source:
        for number, (folder, count) in enumerate(targets, start=1):
            folder.mkdir(parents=True, exist_ok=True)
            part = folder / f"{file.name}.{number}"
            with part.open("wb") as target:
                left = count
                while left:
                    data = source.read(min(left, _CHUNK))
                    left -= len(data)
                    target.write(data)
            parts.append({"name": part.name, "bytes": count, "sha256": file_sha256(part)})
    return {"name": file.name, "bytes": size, "sha256": file_sha256(file), "parts": parts}


def sizes_of(size: int, most: int) -> list[int]:
    """Sizes of the fewest parts of at most `most` bytes each that make up `size`, alike but for one byte."""
    count = max(1, -(-size // most))
    return [size // count + (index < size % count) for index in range(count)]


def found(manifest: dict[str, Any], folders: Iterable[Path]) -> list[Path]:
    """The parts that lie in `folders`, in order, each verified.

    Raises:
        SystemExit: A part is missing or damaged; says which and what to do.
    """
    places, parts = list(folders), []
    for part in manifest["parts"]:
        there = [folder / part["name"] for folder in places if (folder / part["name"]).is_file()]
        if not there:
            raise SystemExit(
                f"{part['name']} is missing in {', '.join(map(str, places))}. "
                "A machine started anew has lost what an earlier call left there: begin with the first call again"
            )
        _verify(there[0], part)
        parts.append(there[0])
    return parts


def join(manifest: dict[str, Any], folders: Iterable[Path], target: Path) -> Path:
    """Put a file together; it takes its name only when it is whole and verified.

    Args:
        manifest: From `split`.
        folders: Where the parts lie.
        target: The file to write.

    Raises:
        SystemExit: A part is missing, or a checksum is wrong.
    """
    parts = found(manifest, folders)

    def write(path: Path) -> None:
        with path.open("wb") as whole:
            for part in parts:
                with part.open("rb") as source:
                    while data := source.read(_CHUNK):
                        whole.write(data)
        _verify(path, manifest)

    target.parent.mkdir(parents=True, exist_ok=True)
    return write_file(target, write)


def _verify(path: Path, told: dict[str, Any]) -> None:
    seen = {"bytes": path.stat().st_size, "sha256": file_sha256(path)}
    for name, value in seen.items():
        if value != told[name]:
            raise SystemExit(f"{told['name']} is damaged; {name} seen: {value}; expected: {told[name]}. Bring it anew")


def pack(folder: Path, file: Path) -> Path:
    """Put all that lies in a folder into one uncompressed tar archive, names in order and no times or owners."""

    def plain(entry: tarfile.TarInfo) -> tarfile.TarInfo:
        entry.mtime, entry.uid, entry.gid, entry.uname, entry.gname = 0, 0, 0, "", ""
        return entry

    file.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(file, "w") as archive:
        for path in sorted(folder.rglob("*")):
            archive.add(path, path.relative_to(folder).as_posix(), recursive=False, filter=plain)
    return file


def unpack(file: Path, folder: Path) -> Path:
    """The folder that `pack` was given; it appears only when it is whole."""
    with new_folder(folder) as temporary, tarfile.open(file) as archive:
        # By hand: the filter that keeps extractall within a folder came with Python 3.11.4.
        for entry in archive:
            place = temporary / entry.name
            content = archive.extractfile(entry) if entry.isfile() else None
            if not place.resolve().is_relative_to(temporary.resolve()) or not (content or entry.isdir()):
                raise SystemExit(f"{file.name} holds '{entry.name}', which is no plain file or folder within it")
            if content is None:
                place.mkdir(parents=True, exist_ok=True)
                continue
            place.parent.mkdir(parents=True, exist_ok=True)
            with content, place.open("wb") as copy:
                shutil.copyfileobj(content, copy)
    return folder
