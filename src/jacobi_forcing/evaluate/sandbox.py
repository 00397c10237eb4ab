"""Runs generated code where it can do no harm, and says how far it was shut in.

The code runs in a process of its own, in its own user, pid, network and mount namespaces where the system lets us make
them, with resource limits everywhere, and is killed with all that it started when its time is up. See
`sandbox_child.py` for how. Linux only: other systems lack the means.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import secrets
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, Literal, get_args

from jacobi_forcing.errors import ModelError
from jacobi_forcing.schema import Config, option

Status = Literal["passed", "failed", "timeout", "memory", "processes", "files", "network", "crashed"]
"""How a program ended: see `Outcome`."""

_CHILD = Path(__file__).with_name("sandbox_child.py")
_GRACE = 15.0
"""Seconds that the supervisor has beyond the program's own, to start and to clear up, before it is killed itself."""
_number = itertools.count()


@dataclasses.dataclass(frozen=True)
class SandboxLimits(Config):
    """What generated code may use."""

    seconds: float = option(60.0, help="wall time, seconds", above=0)
    cpu_seconds: int = option(20, help="CPU time of each process, seconds: counts work, not waiting", at_least=1)
    memory_bytes: int = option(1 << 30, help="address space of each process, bytes", at_least=1 << 27)
    file_bytes: int = option(16 << 20, help="longest file, and longest output, bytes", at_least=1)
    disk_bytes: int = option(64 << 20, help="room in the scratch folder, bytes", at_least=1)
    processes: int = option(16, help="processes and threads at a time, the program's first included", at_least=1)
    open_files: int = option(64, help="open files of each process", at_least=8)
    output_bytes: int = option(4096, help="end of its output that is kept, bytes", at_least=0)
    namespaces: bool = option(True, help="own namespaces where the system has them; false: resource limits only")


@dataclasses.dataclass(frozen=True)
class Isolation:
    """Which walls stood around a program, as found when it ran, not as hoped for.

    Attributes:
        network: It had no network: an own, empty network namespace.
        pid: It saw only its own processes, all of which ended with it.
        user: It ran in a user namespace with one user without rights.
        mount: The disk was read-only but for its scratch folder, memory of a fixed size.
        rlimits: Limits of CPU time, memory, file length, open files, and no capability.
        processes: The limit of processes held: root is exempt from it.
    """

    network: bool = False
    pid: bool = False
    user: bool = False
    mount: bool = False
    rlimits: bool = False
    processes: bool = False

    @property
    def complete(self) -> bool:
        """Whether every wall stood."""
        return all(dataclasses.astuple(self))

    def sentence(self) -> str:
        """A line for people, with what was missing."""
        missing = [text for name, text in _MISSING.items() if not getattr(self, name)]
        if not missing:
            return (
                "Generated code ran without network, in its own user, pid and mount namespaces, under resource "
                "limits, and could write to its scratch folder only"
            )
        return "Generated code ran in a process under limits, but this system did not allow: " + "; ".join(missing)


_MISSING = {
    "network": "shutting off the network",
    "pid": "own process ids (what leaves its process group is found and killed all the same)",
    "user": "an own user namespace",
    "mount": "a read-only disk (it could write wherever its user can)",
    "rlimits": "limits of CPU time, memory and files",
    "processes": "a limit of processes",
}


@dataclasses.dataclass(frozen=True)
class Outcome:
    """How a program ended.

    Attributes:
        status: passed: it ran to its end; failed: it raised an error or ended early; timeout, memory, processes, files,
            network: it met that limit; crashed: a signal ended it.
        detail: The error, one line, or nothing.
        output: The end of what it printed.
        seconds: Wall time.
        isolation: The walls around it.
    """

    status: Status
    detail: str
    output: str
    seconds: float
    isolation: Isolation

    @property
    def passed(self) -> bool:
        """Whether it ran to its end."""
        return self.status == "passed"


def run_program(program: str, limits: SandboxLimits | None = None) -> Outcome:
    """Run a Python program, most often a solution with its tests behind it, in the sandbox.

    Args:
        program: Python source. It runs as the module `solution`, so that nothing below
            `if __name__ == "__main__"` does, in an empty scratch folder, without standard input.
        limits: What it may use.

    Raises:
        ModelError: The sandbox itself could not be started.
    """
    limits = limits or SandboxLimits()
    nonce = secrets.token_hex(8)
    with tempfile.TemporaryDirectory(prefix="jforce-sandbox-") as base:
        os.chmod(base, 0o711)  # a user without rights must come through to the scratch folder
        job = {**limits.to_dict(), "program": program, "nonce": nonce}
        job["number"] = (os.getpid() * 1000 + next(_number) % 1000) % (1 << 29)
        for name in ("scratch", "libraries"):
            job[name] = os.path.join(base, name)
            os.mkdir(job[name], 0o700 if name == "scratch" else 0o755)
        verdict = _supervise(job, limits)
    return _outcome(verdict, nonce, limits)


def isolation(limits: SandboxLimits | None = None) -> Isolation:
    """The walls that this system allows, found by running an empty program."""
    return run_program("", limits).isolation


def _supervise(job: dict[str, Any], limits: SandboxLimits) -> dict[str, Any]:
    command = [sys.executable, "-I", "-B", "-X", "utf8", str(_CHILD)]
    process = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={"PATH": os.defpath},
        start_new_session=True,
        encoding="utf-8",
        errors="replace",
    )
    try:
        told, _ = process.communicate(json.dumps(job), timeout=limits.seconds + _GRACE)
        return dict(json.loads(told))
    except (subprocess.TimeoutExpired, ValueError) as error:
        process.kill()  # its entrance, and with it the pid namespace, die with it
        _, complaints = process.communicate()
        raise ModelError(
            "The sandbox did not report",
            seen=" ".join(complaints.split())[-300:] or str(error),
            remedy="it needs Linux; see docs/evaluation.md",
        ) from error
    except BaseException:
        process.kill()
        raise


def _outcome(verdict: dict[str, Any], nonce: str, limits: SandboxLimits) -> Outcome:
    facts, report = verdict["facts"], verdict["report"]
    walls = Isolation(**{field.name: bool(facts.get(field.name)) for field in dataclasses.fields(Isolation)})
    status: Status
    code = verdict["exit"]
    if code is None:
        status, detail = "timeout", "Its time was up"
    elif isinstance(report, dict) and report.get("nonce") == nonce and report.get("status") in get_args(Status):
        status, detail = report["status"], str(report.get("detail", ""))
    elif code == 128 + signal.SIGXCPU or (code == 128 + signal.SIGKILL and verdict["seconds"] > limits.cpu_seconds):
        status, detail = "timeout", "Its CPU time was up"
    elif code > 128:
        status, detail = "crashed", f"Signal {code - 128} ended it"
    else:
        status, detail = "failed", "The code ended the process before its tests were through"
    return Outcome(status, detail, verdict["output"], verdict["seconds"], walls)
