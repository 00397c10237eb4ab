"""The far side of the sandbox: a script of its own, started with `python -I`, that knows nothing of the package.

Four processes, each the parent of the next::

    supervisor   as it was started; keeps the clock, kills what is left, writes the verdict to standard output
    entrance     makes the namespaces; whoever unshares a pid namespace is not yet in it
    init         process 1 of the pid namespace: when it ends, the kernel ends everything in there
    program      limits in force, privileges gone; runs the code and writes one line to a pipe

The program counts as passed only if the code ran to its end and this line came from the process that was meant to run
it: neither an early `exit()` nor a forked child can pass.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import importlib.util
import json
import os
import resource
import signal
import sys
import time
import types
from collections.abc import Iterator
from typing import Any

_REAP_SECONDS = 5.0
_POLL_SECONDS = 0.002


def _load_walls() -> Any:
    """The module beside this file, without its folder on `sys.path`: other files there hide some of the library's."""
    path = os.path.join(os.path.dirname(os.path.abspath(__file__)), "sandbox_walls.py")
    spec = importlib.util.spec_from_file_location("sandbox_walls", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


walls = _load_walls()


def main() -> None:
    """Read the job as JSON from standard input, run it, write the verdict as JSON to standard output."""
    job = json.load(sys.stdin)
    _die_with_parent()
    walls.libc.prctl(walls.PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    facts_in, facts_out = os.pipe()
    report_in, report_out = os.pipe()
    output = os.memfd_create("output")
    started = time.monotonic()
    entrance = os.fork()
    if entrance == 0:
        with _no_return():
            _enter(job, facts_out, report_out, output)
    os.close(facts_out)
    os.close(report_out)
    status = _wait(entrance, started + job["seconds"])
    seconds = time.monotonic() - started
    _end_all()
    verdict = {
        "facts": _object(_drain(facts_in)) or {},
        "report": _object(_drain(report_in)),
        "exit": None if status is None else os.waitstatus_to_exitcode(status),
        "seconds": seconds,
        "output": _tail(output, job["output_bytes"]),
    }
    print(json.dumps(verdict))


def _object(text: str) -> dict[str, Any] | None:
    """A JSON object, or None: the code may have written anything on the pipe."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


@contextlib.contextmanager
def _no_return() -> Iterator[None]:
    """A forked child must never run on into its parent's code."""
    try:
        yield
    except BaseException as error:
        os.write(2, f"{type(error).__name__}: {error}\n".encode())
    finally:
        os._exit(70)


# Supervisor -------------------------------------------------------------------------------------------------------


def _wait(pid: int, deadline: float) -> int | None:
    """The wait status of a child, or None when it is killed at the deadline."""
    while True:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return status
        if time.monotonic() > deadline:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            return None
        time.sleep(_POLL_SECONDS)


def _end_all() -> None:
    """Kill every descendant. Orphans become our children, so that a while later there is nobody left."""
    deadline = time.monotonic() + _REAP_SECONDS
    while time.monotonic() < deadline:
        for pid in _children():
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return
        time.sleep(_POLL_SECONDS)


def _children() -> list[int]:
    me, found = str(os.getpid()), []
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError), open(f"/proc/{name}/stat") as file:
            if file.read().rpartition(")")[2].split()[1] == me:
                found.append(int(name))
    return found


def _drain(pipe: int) -> str:
    os.set_blocking(pipe, False)
    with contextlib.suppress(BlockingIOError):
        return os.read(pipe, 1 << 16).decode(errors="replace")
    return ""


def _tail(output: int, limit: int) -> str:
    size = os.fstat(output).st_size
    return os.pread(output, limit, max(0, size - limit)).decode(errors="replace")


# Entrance ---------------------------------------------------------------------------------------------------------


def _enter(job: dict[str, Any], facts_out: int, report_out: int, output: int) -> None:
    """Make the namespaces, then let init in; passes on how it ended."""
    _die_with_parent()
    root, facts = os.getuid() == 0, {"user": False, "pid": False, "network": False, "mount": False}
    if job["namespaces"]:
        facts["user"] = not root and walls.own_users(os.getuid(), os.getgid())
        facts["network"] = walls.unshare(walls.NEWNET)
        walls.unshare(walls.NEWIPC)
        walls.unshare(walls.NEWUTS)
        facts["pid"] = walls.unshare(walls.NEWPID)
        facts["mount"] = walls.unshare(walls.NEWNS) and walls.close_disk(job, root)
    init = os.fork()
    if init == 0:
        with _no_return():
            _init(job, facts, facts_out, report_out, output)
    os.close(facts_out)
    os.close(report_out)
    _exit_like(os.waitpid(init, 0)[1])


# Init and program -------------------------------------------------------------------------------------------------


def _init(job: dict[str, Any], facts: dict[str, bool], facts_out: int, report_out: int, output: int) -> None:
    """Give up what rights are left, tell what was reached, and wait for the program."""
    _die_with_parent()
    if facts["pid"] and facts["mount"]:
        walls.mount("proc", "/proc", "proc", walls.MS_NOSUID | walls.MS_NODEV | walls.MS_NOEXEC)
    if os.getuid() == 0:
        facts["dropped"] = walls.become_nobody(job)
        facts["user"] = job["namespaces"] and facts["dropped"] and walls.own_users(os.getuid(), os.getgid())
    _die_with_parent()  # said again: a change of user or namespace has made the kernel forget it
    # Root is above the limit of processes, and without a user namespace it counts everything the user runs.
    facts["processes"] = os.getuid() != 0
    # This process counts too, and so does the entrance where it is in the same user namespace.
    others = 1 if facts.get("dropped") else 2 if facts["user"] else _threads_of(os.getuid())
    allowed = job["processes"] + others
    program = os.fork()
    if program == 0:
        with _no_return():
            walls.libc.prctl(walls.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
            facts["rlimits"] = _limit(job, allowed)
            os.write(facts_out, json.dumps(facts).encode())
            _die_with_parent()
            _run(job, report_out, output)
    os.close(facts_out)
    os.close(report_out)
    while True:
        done, status = os.wait()
        if done == program:
            _exit_like(status)


def _die_with_parent() -> None:
    walls.libc.prctl(walls.PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def _exit_like(status: int) -> None:
    code = os.waitstatus_to_exitcode(status)
    os._exit(128 - code if code < 0 else code)


def _threads_of(uid: int) -> int:
    count = 0
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            if os.stat(f"/proc/{name}").st_uid == uid:
                count += len(os.listdir(f"/proc/{name}/task"))
    return count


def _limit(job: dict[str, Any], processes: int) -> bool:
    """Resource limits, and no capability, not even in the own user namespace."""
    limits = (
        (resource.RLIMIT_CPU, job["cpu_seconds"]),
        (resource.RLIMIT_AS, job["memory_bytes"]),
        (resource.RLIMIT_FSIZE, job["file_bytes"]),
        (resource.RLIMIT_NOFILE, job["open_files"]),
        (resource.RLIMIT_NPROC, processes),
        (resource.RLIMIT_CORE, 0),
    )
    for kind, limit in limits:
        _, most = resource.getrlimit(kind)
        value = limit if most == resource.RLIM_INFINITY else min(limit, most)
        resource.setrlimit(kind, (value, value))
    header = (ctypes.c_uint32 * 2)(walls.CAPABILITY_VERSION, 0)
    return bool(walls.libc.capset(header, (ctypes.c_uint32 * 6)()) == 0)


def _run(job: dict[str, Any], report_out: int, output: int) -> None:
    """Run the code as the module `solution`, and report how it ended."""
    nothing = os.open(os.devnull, os.O_RDONLY)
    report = os.dup(report_out)
    for target, source in ((0, nothing), (1, output), (2, output), (3, report)):
        os.dup2(source, target)
    os.closerange(4, max(report, output, nothing, report_out) + 1)
    os.chdir(job["scratch"])
    os.environ.clear()
    os.environ.update(HOME=job["scratch"], TMPDIR=job["scratch"], PATH=os.defpath, LANG="C.UTF-8", OMP_NUM_THREADS="1")
    me, module = os.getpid(), types.ModuleType("solution")
    # Taken now: the code may change the modules that they come from.
    to_text, write, end, process = json.dumps, os.write, os._exit, os.getpid
    sys.modules["solution"] = module
    sys.stdin, sys.argv = open(0), ["solution.py"]  # noqa: SIM115  # the program's own
    try:
        exec(compile(job["program"], "solution.py", "exec"), module.__dict__)
        report_text = {"status": "passed", "detail": ""}
    except BaseException as error:
        report_text = _verdict(error)
    with contextlib.suppress(BaseException):
        sys.stdout.flush()
    if process() == me:
        write(3, to_text({**report_text, "nonce": job["nonce"]}).encode())
    end(0)


_NETWORK = {
    errno.ENETUNREACH,
    errno.EHOSTUNREACH,
    errno.ENETDOWN,
    errno.EADDRNOTAVAIL,
    errno.EAFNOSUPPORT,
    errno.ENONET,
}
_DISK = {errno.EROFS, errno.EFBIG, errno.ENOSPC, errno.EDQUOT}
_DENIED = {errno.EACCES, errno.EPERM}


def _verdict(error: BaseException) -> dict[str, str]:
    """What stopped the code: one of the limits, or the code itself."""
    detail = f"{type(error).__name__}: {error}"[:500]
    number = error.errno if isinstance(error, OSError) else None
    status = "failed"
    if isinstance(error, SystemExit):
        detail = "The code ended the process before its tests were through"
    elif isinstance(error, MemoryError) or number == errno.ENOMEM:
        status = "memory"
    elif number == errno.EAGAIN or "start new thread" in str(error):
        status = "processes"
    elif number in _NETWORK or any(kind.__name__ == "gaierror" for kind in type(error).__mro__):
        status = "network"
    elif number in _DISK or (number in _DENIED and isinstance(error, OSError) and error.filename is not None):
        status = "files"
    return {"status": status, "detail": detail}


if __name__ == "__main__":
    main()
