"""What produced an artefact: arguments, commit, versions, seed, and fingerprints of models and folders.

A record is meant to be published beside the artefact, so it holds no path of the machine it was made on: an absolute
path under the working directory is written relative to it, and any other is reduced to its last part.
"""

from __future__ import annotations

import datetime
import functools
import hashlib
import importlib.metadata
import os
import platform
import re
import subprocess
import sys
from collections.abc import Collection, Mapping
from fnmatch import fnmatch
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jacobi_forcing.errors import ArtefactError, DataError, ModelError
from jacobi_forcing.files import file_sha256

if TYPE_CHECKING:
    import torch

_PACKAGES = {"torch": "torch", "transformers": "transformers", "jacobi_forcing": "jacobi-forcing"}
_NAME = re.compile(r"[\w.]+")
"""What stands before the equals sign of `--data TASK=FILE` and `--set prompts.source=FILE`."""
_CHUNK = 1 << 24  # parameter values hashed at a time, so that a model on a GPU is never copied whole
_GIT_TIMEOUT = 10  # seconds
# Set while git runs a hook; they would point our question at the hook's repository.
_GIT_REDIRECTS = ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", "GIT_COMMON_DIR", "GIT_PREFIX")


def collect(*, seed: int | None = None, **extra: Any) -> dict[str, Any]:
    """Describe the running process, ready for `json.dump`.

    Args:
        seed: The seed that the artefact depends on, if it depends on one.
        **extra: Further entries: numbers, text, paths, and lists and mappings of them. Paths are made portable as in
            `argv`, in text too.

    Returns:
        `argv`, `commit` (see `source_commit`), `versions`, `seed`, `created` (UTC, ISO 8601, whole seconds), and the
        entries of `extra` beside them.

    Raises:
        DataError: An entry of `extra` has no JSON form, or bears the name of a standard entry.
    """
    commit = _own_commit()
    record: dict[str, Any] = {
        "argv": portable_argv(sys.argv),
        "commit": dict(commit) if commit else None,
        "versions": _versions(),
        "seed": seed,
        "created": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }
    taken = sorted(record.keys() & extra.keys())
    if taken:
        raise DataError(
            "A provenance entry bears the name of a standard one", seen=", ".join(taken), remedy="rename the entry"
        )
    return record | {name: _portable(value, name) for name, value in extra.items()}


def portable_argv(argv: list[str]) -> list[str]:
    """Command-line arguments without the paths of this machine: the program's name, then its arguments.

    An absolute path, alone or after `--option=`, is written relative to the working directory if it lies under it, and
    else reduced to its last part. Everything else, relative paths among it, stays as typed.
    """
    if not argv:
        return []
    return [os.path.basename(argv[0]), *(portable(argument) for argument in argv[1:])]


def source_commit(folder: Path) -> dict[str, Any] | None:
    """The commit that the source files in `folder` come from.

    Returns:
        `{"hash": 40 hex digits, "dirty": True where a tracked file of the checkout was changed}`, or None where
        `folder` is not part of a git checkout: an installed package that merely lies in somebody's repository is not.
    """
    if not _git(folder, "ls-files", "--error-unmatch", "--", "."):
        return None
    head = _git(folder, "rev-parse", "--verify", "HEAD")
    changes = _git(folder, "--no-optional-locks", "status", "--porcelain", "--untracked-files=no")
    if head is None or changes is None:
        return None
    return {"hash": head.strip(), "dirty": bool(changes.strip())}


def model_fingerprint(model: torch.nn.Module) -> str:
    """SHA-256 over the model's parameters: names in order, shapes, dtypes and bytes. Tied weights count once.

    Buffers are left out: the library computes them from the config. Two copies of a model have the same fingerprint on
    every device; a copy in another dtype has another.

    Returns:
        64 hex digits.

    Raises:
        ModelError: A parameter has no values yet (it lies on the `meta` device).
    """
    import torch

    digest = hashlib.sha256()
    for name, parameter in sorted(model.named_parameters(), key=itemgetter(0)):
        if parameter.is_meta:
            raise ModelError("A model without values has no fingerprint", seen=f"{name} on the meta device")
        digest.update(f"{name}\0{tuple(parameter.shape)}\0{parameter.dtype}\0".encode())
        for chunk in parameter.detach().reshape(-1).split(_CHUNK):
            digest.update(chunk.cpu().contiguous().view(torch.uint8).numpy())
    return digest.hexdigest()


def folder_fingerprint(path: str | os.PathLike[str], *, ignore: Collection[str] = ()) -> str:
    """SHA-256 over the names and bytes of every file in a folder and below, whatever order the disk lists them in.

    Links to files are followed (the hub's cache is made of them), links to folders are not. Times and modes do not
    count.

    Args:
        path: The folder.
        ignore: Patterns (as for `fnmatch`) of file names to leave out, such as a record that holds the fingerprint.

    Returns:
        64 hex digits.

    Raises:
        ArtefactError: `path` is not a folder, or a file in it cannot be read.
    """
    root = Path(path)
    if not root.is_dir():
        raise ArtefactError(
            "The folder to fingerprint is missing" if not root.exists() else "The path to fingerprint is no folder",
            seen=root,
        )
    digest = hashlib.sha256()
    for file in _files(root):
        if any(fnmatch(file.name, pattern) for pattern in ignore):
            continue
        try:
            content = file_sha256(file)
        except OSError as error:
            raise ArtefactError("A file of the folder cannot be read", seen=f"{file}: {error.strerror}") from error
        digest.update(f"{file.relative_to(root).as_posix()}\0{content}\0".encode())
    return digest.hexdigest()


def _files(root: Path) -> list[Path]:
    found = [Path(folder, name) for folder, _, names in os.walk(root) for name in names]
    return sorted(found, key=lambda file: file.relative_to(root).as_posix())


def _versions() -> dict[str, str | None]:
    versions: dict[str, str | None] = {"python": platform.python_version()}
    for name, distribution in _PACKAGES.items():
        try:
            versions[name] = importlib.metadata.version(distribution)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = None  # run from a source tree that was never installed
    # Not platform.platform(): kernel names can tell whose machine it was.
    versions["platform"] = f"{platform.system()} {platform.machine()}"
    return versions


@functools.cache
def _own_commit() -> dict[str, Any] | None:
    """Asked once a process: what matters is the code that was loaded, not what was committed meanwhile."""
    return source_commit(Path(__file__).parent)


def _git(folder: Path, *arguments: str) -> str | None:
    """What git prints, or None where it fails or is not installed."""
    environment = {name: value for name, value in os.environ.items() if name not in _GIT_REDIRECTS}
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *arguments],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            timeout=_GIT_TIMEOUT,
            env=environment,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None


def _portable(value: Any, name: str) -> Any:
    """The JSON form of an entry, without the paths of this machine."""
    if value is None or isinstance(value, (bool, int, float)):
        return value
    if isinstance(value, (str, os.PathLike)):
        return portable(os.fspath(value))
    if isinstance(value, Mapping):
        return {str(key): _portable(inner, f"{name}.{key}") for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_portable(inner, f"{name}[{index}]") for index, inner in enumerate(value)]
    raise DataError(
        f"The provenance entry '{name}' has no JSON form",
        seen=type(value).__name__,
        expected="numbers, text, paths, or lists and mappings of them",
    )


def portable(text: str) -> str:
    """A name, path or argument without what is private to this machine, see `portable_argv`."""
    option, equals, value = text.partition("=")
    if equals and (option.startswith("-") or _NAME.fullmatch(option)):
        return f"{option}={_portable_path(value)}"
    return _portable_path(text)


def _portable_path(text: str) -> str:
    if not os.path.isabs(text):
        return text
    path = Path(os.path.normpath(text))
    here = Path.cwd()
    return path.relative_to(here).as_posix() if path.is_relative_to(here) else path.name
