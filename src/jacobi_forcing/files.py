"""Writing so that a kill leaves either the old content or the new one, never a part of it."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jacobi_forcing.errors import ArtefactError

_TEMPORARY = ".tmp"
_OLD = ".old"


def write_text(path: str | Path, text: str) -> Path:
    """Write a text file under a temporary name, then rename it; folders are made as needed.

    Raises:
        ArtefactError: The disk refuses.
    """
    target = Path(path)
    temporary = target.with_name(target.name + _TEMPORARY)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with temporary.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, target)
    except OSError as error:
        raise ArtefactError(
            f"Cannot write '{path}'", seen=error.strerror, remedy="check the path and the disk"
        ) from error
    return target


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
    except (OSError, ValueError) as error:
        raise ArtefactError(f"Cannot read '{path}'", seen=str(error)) from error
    if not isinstance(value, dict):
        raise ArtefactError(f"'{path}' is damaged", seen=type(value).__name__, expected="a JSON object")
    return value


@contextlib.contextmanager
def new_folder(path: str | Path) -> Iterator[Path]:
    """A folder to fill; it takes its name, and the place of an older one, when the block ends without an error."""
    target = Path(path)
    temporary, old = (target.with_name(target.name + end) for end in (_TEMPORARY, _OLD))
    for left_behind in (temporary, old):
        shutil.rmtree(left_behind, ignore_errors=True)
    temporary.mkdir(parents=True)
    yield temporary
    if target.exists():
        os.replace(target, old)
    os.replace(temporary, target)
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
