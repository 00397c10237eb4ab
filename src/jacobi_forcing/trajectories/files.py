"""Files that are whole or absent, and their hashes."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from pathlib import Path

TEMPORARY = ".tmp"
"""What the name of an unfinished file ends in."""


def file_sha256(path: Path) -> str:
    """SHA-256 of a file's bytes, 64 hex digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_atomically(path: Path, write: Callable[[Path], object]) -> None:
    """Write under a temporary name, flush to disk, then rename: `path` is whole or absent, even after a power cut."""
    temporary = path.with_name(path.name + TEMPORARY)
    write(temporary)
    _flush(temporary)
    os.replace(temporary, path)
    _flush(path.parent)


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
