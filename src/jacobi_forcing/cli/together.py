"""Recipes trained side by side, each by a process of its own with its share of the cores.

One training of a model of a million parameters hardly gains from a second core; two trainings do.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import IO, NamedTuple

from jacobi_forcing.cli.console import note
from jacobi_forcing.errors import JForceError

_ERROR = "Error: "
# On Linux it dies with this process, however that ends: what is left behind would hold the folder and the cores.
_CHILD = """
import runpy, signal, sys
if sys.platform == "linux":
    import ctypes
    ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)
runpy.run_module("jacobi_forcing", run_name="__main__", alter_sys=True)
"""


class Call(NamedTuple):
    """What `jforce run` is to be told.

    Attributes:
        recipe: File or name.
        overrides: `key.path=value`.
        output: Folder of the run; None for the recipe's own.
    """

    recipe: str
    overrides: list[str]
    output: Path | None


def train_together(calls: Mapping[str, Call], *, fresh: bool) -> bool:
    """Do the collecting and training of several recipes at the same time, but measure nothing: clocks want quiet.

    Does nothing where there are fewer threads than recipes, where one of them wants a GPU or probes, or where fewer
    than two of them have anything left to train.

    Args:
        calls: The recipes by the name that stands before their lines.
        fresh: Throw away what earlier runs left.

    Returns:
        Whether it did anything.

    Raises:
        JForceError: What ended one of them; the others are ended too, and go on where they were when called again.
    """
    import torch

    share = torch.get_num_threads() // len(calls)
    if share < 1 or not all(_waits(call, fresh) for call in calls.values()):
        return False
    note(f"{' and '.join(calls)} at the same time, {share} {'thread' if share == 1 else 'threads'} each")
    started = {name: _start(call, share, fresh) for name, call in calls.items()}
    errors: dict[str, str] = {}
    readers = [
        threading.Thread(target=_relay, args=(name, process.stderr, errors), daemon=True)
        for name, process in started.items()
    ]
    try:
        for reader in readers:
            reader.start()
        failed = _first_failed(started)
    finally:
        for process in started.values():
            process.terminate()
            process.wait()
    for reader in readers:
        reader.join()
    if failed is not None:
        name, status = failed
        how = f"ended with status {status}" if status > 0 else f"was killed by signal {-status}"
        if status == 1:
            raise RuntimeError(f"{name}: {errors.get(name, how)}")
        raise JForceError(
            f"{name}: {errors.get(name, how)}", remedy=None if name in errors else "call it again: it goes on"
        )
    return True


def _waits(call: Call, fresh: bool) -> bool:
    """Whether there is something to train, on CPUs and without probes."""
    from jacobi_forcing.loading import resolve_device
    from jacobi_forcing.recipe import load_recipe
    from jacobi_forcing.recipe.stages import is_done, plan

    settings = load_recipe(call.recipe, call.overrides, call.output)
    probes = settings.evaluation is not None and settings.evaluation.probe_steps is not None
    if resolve_device(settings.model.device).type != "cpu" or probes:
        return False
    folder = Path(settings.output)
    return fresh or not all(is_done(folder, stage) for stage in plan(settings) if stage.kind == "train")


def _start(call: Call, threads: int, fresh: bool) -> subprocess.Popen[str]:
    options = [part for text in [*call.overrides, "evaluation=null"] for part in ("--set", text)]
    place = [] if call.output is None else ["--output", str(call.output)]
    command = [sys.executable, "-c", _CHILD, "run", call.recipe, *options, *place, *(["--fresh"] * fresh)]
    return subprocess.Popen(
        command,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": str(threads)},
    )


def _relay(name: str, lines: IO[str] | None, errors: dict[str, str]) -> None:
    """Tell what a process tells."""
    for line in lines or ():
        text = line.rstrip()
        if text.startswith(_ERROR):
            errors[name] = text.removeprefix(_ERROR)
        elif text and not text.startswith(("Model: ", "As one page")):
            note(f"{name}: {text}")


def _first_failed(started: Mapping[str, subprocess.Popen[str]]) -> tuple[str, int] | None:
    """Wait until all have ended well, or one has not: its name and status."""
    waiting = dict(started)
    while waiting:
        for name, process in list(waiting.items()):
            try:
                status = process.wait(timeout=0.2)
            except subprocess.TimeoutExpired:
                continue
            if status:
                return name, status
            del waiting[name]
    return None
