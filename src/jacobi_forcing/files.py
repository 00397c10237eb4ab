"""Writing so that a kill leaves either the old content or the new one, never a part of it."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from jacobi_forcing.errors import ArtefactError

TEMPORARY = ".tmp"
"""What the name of an unfinished file or folder ends in."""
_OLD = ".old"


def write_file(path: str | Path, write: Callable[[Path], object]) -> Path:
    """Let `write` fill a file under a temporary name, flush it to disk, then rename it; folders are made as needed.

    The file is whole or absent, or still the old one, even after a power cut.

    Raises:
        ArtefactError: The disk refuses.
    """
    target = Path(path)
    temporary = target.with_name(target.name + TEMPORARY)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        write(temporary)
        _flush(temporary, os.O_RDWR)
        os.replace(temporary, target)
        if os.name == "posix":  # elsewhere a folder cannot be opened
            _flush(target.parent, os.O_RDONLY)
    except OSError as error:
        raise ArtefactError(
            f"Cannot write '{path}'", seen=error.strerror or str(error), remedy="check the path and the disk"
        ) from error
    return target


def _flush(path: Path, flags: int) -> None:
    descriptor = os.open(path, flags)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_text(path: str | Path, text: str) -> Path:
    """Write a text file as `write_file` does."""
    return write_file(path, lambda temporary: temporary.write_text(text, encoding="utf-8"))


def append_text(path: Path, text: str) -> None:
    """Add whole lines to a text file; they are on disk when this returns.

    Raises:
        ArtefactError: The disk refuses.
    """
    try:
        with path.open("a", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise ArtefactError(
            f"Cannot write '{path}'", seen=error.strerror, remedy="check the disk, then start again"
        ) from error


def whole_lines(path: Path) -> list[bytes]:
    """The lines of a file that `append_text` fills; what a kill left of the last one is cut off, the file's too.

    Raises:
        ArtefactError: The disk refuses.
    """
    try:
        content = path.read_bytes()
        whole = content[: content.rfind(b"\n") + 1]
        if len(whole) < len(content):
            with path.open("r+b") as file:
                file.truncate(len(whole))
    except OSError as error:
        raise ArtefactError(f"Cannot read '{path}'", seen=error.strerror, remedy="check the path") from error
    return whole.splitlines()


def file_sha256(path: Path) -> str:
    """SHA-256 of a file's bytes, 64 hex digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_json(path: str | Path, value: Any) -> Path:
    """Write JSON as `write_text` does, indented, one trailing newline."""
    return write_text(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def read_json(path: str | Path) -> dict[str, Any]:
    """Read a JSON object that this package wrote.

    Raises:
        ArtefactError: It is missing, damaged or no object.
    """
    try:
        value = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ArtefactError(f"Cannot read '{path}'", seen=str(error)) from error
    if not isinstance(value, dict):
        raise ArtefactError(f"'{path}' is damaged", seen=type(value).__name__, expected="a JSON object")
    return value


def check_new_folder(path: str | Path) -> None:
    """Refuse a name that `new_folder` cannot give, so that this is known before the work and not after it.

    Raises:
        ArtefactError: It is a file's, a dangling link's or the current folder's, lies below a file, or may not be
            written.
    """
    target, above = Path(path), Path(path).absolute().parent
    while not os.path.lexists(above):
        above = above.parent
    seen = None
    if os.path.isdir(target):
        if target.name in ("", "..") or os.path.samefile(target, os.curdir):
            seen = "the current folder, or one that holds it"
        elif not os.access(target, os.R_OK | os.W_OK | os.X_OK):
            seen = "a folder that may not be written"
    elif os.path.lexists(target):
        seen = "a link to nothing" if target.is_symlink() else "a file"
    if seen is None and not os.path.isdir(above):
        seen = f"'{above}' is a file, or a link to nothing"
    if seen is None and not os.access(above, os.W_OK | os.X_OK):
        seen = f"'{above}' may not be written"
    if seen is not None:
        raise ArtefactError(
            f"There can be no new folder '{path}'", seen=seen, expected="a name that is free", remedy="use another name"
        )


def contents(folder: Path) -> str:
    """The first names in a folder, for messages; empty where there is none, or nothing in it."""
    there = sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []
    return ", ".join(there[:4]) + ", …" * (len(there) > 4)


@contextlib.contextmanager
def new_folder(path: str | Path) -> Iterator[Path]:
    """A folder to fill; it takes its name, and the place of an older one, when the block ends without an error.

    Raises:
        ArtefactError: The name cannot be a new folder's, see `check_new_folder`.
    """
    check_new_folder(path)
    target = Path(path)
    temporary, old = (target.with_name(target.name + end) for end in (TEMPORARY, _OLD))
    for left_behind in (temporary, old):
        if left_behind.is_symlink() or left_behind.is_file():  # not of our making
            raise ArtefactError(f"'{left_behind}' stands in the way", seen="a file", remedy="remove or rename it")
        shutil.rmtree(left_behind, ignore_errors=True)
    temporary.mkdir(parents=True)
    try:
        yield temporary
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    check_new_folder(path)  # once more: the block may have taken hours
    try:
        if target.exists():
            os.replace(target, old)
        os.replace(temporary, target)
    except BaseException:
        if os.path.lexists(old) and not os.path.lexists(target):
            os.replace(old, target)
        raise
    if old.is_symlink():  # the older one was a link; what it points to is not ours to delete
        old.unlink()
    shutil.rmtree(old, ignore_errors=True)


def link_folder(source: str | Path, target: str | Path) -> None:
    """Give a folder's files a second place without a second copy where the disk can do that."""
    with new_folder(target) as folder:
        shutil.copytree(source, folder, copy_function=_link, dirs_exist_ok=True)


def remove(path: str | Path) -> None:
    """Delete a file or a folder; nothing happens where there is none."""
    target = Path(path)
    if target.is_dir() and not target.is_symlink():
        shutil.rmtree(target)
    else:
        target.unlink(missing_ok=True)


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


def count_lines(path: Path) -> int:
    """Lines of a text file that are not empty."""
    with path.open("rb") as file:
        return sum(1 for line in file if line.strip())
