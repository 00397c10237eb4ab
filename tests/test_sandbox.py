"""The sandbox: what generated code may not do is stopped, and it is said what stopped it."""

from __future__ import annotations

import functools
import os
import secrets
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from jacobi_forcing.errors import ConfigError
from jacobi_forcing.evaluate.sandbox import Isolation, Outcome, SandboxLimits, isolation, run_program

QUICK = SandboxLimits(seconds=20, cpu_seconds=1)
FORKS = """
import os, time
forked = 0
try:
    for _ in range(200):
        if os.fork() == 0:
            time.sleep(3)
            os._exit(0)
        forked += 1
finally:
    print("forked", forked)
"""


@functools.cache
def walls() -> Isolation:
    return isolation()


def need(wall: str) -> None:
    if not getattr(walls(), wall):
        pytest.skip(f"this system gives a process no wall '{wall}'")


def run(program: str, **limits: object) -> Outcome:
    return run_program(program, SandboxLimits.from_dict({**QUICK.to_dict(), **limits}))


def running() -> list[str]:
    """The names of all processes."""
    names = []
    for entry in filter(str.isdigit, os.listdir("/proc")):
        try:
            names.append(Path("/proc", entry, "comm").read_text().strip())
        except OSError:
            continue
    return names


def wait_until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_program_that_runs_to_its_end_has_passed() -> None:
    outcome = run("import math\nassert math.isclose(1.0, 1.0)\nprint('done')")
    assert (outcome.status, outcome.passed, outcome.output) == ("passed", True, "done\n")
    assert 0 < outcome.seconds < 20


@pytest.mark.parametrize(
    ("program", "told"),
    [
        ("assert 1 == 2, 'not so'", "AssertionError: not so"),
        ("def f(:", "SyntaxError"),
        ("import sys; sys.exit(0)", "ended the process before its tests"),
        ("import os; os._exit(0)", "ended the process before its tests"),
        ("import os\nif os.fork():\n    os.wait()\n    raise ValueError('the child went on')", "the child went on"),
        ("input()", "EOFError"),
    ],
)
def test_whatever_does_not_reach_the_end_has_failed_and_says_why(program: str, told: str) -> None:
    outcome = run(program)
    assert outcome.status == "failed" and not outcome.passed
    assert told in outcome.detail


@pytest.mark.parametrize(
    "program",
    [
        "import json\njson.dumps = lambda *a, **k: 'x'\nassert False",
        "import os\nos.write(3, b'x')",
        "import os, sys, json\nj = sys._getframe(1).f_locals['job']['nonce']\n"
        "os.write(3, json.dumps({'nonce': j}).encode())\nos._exit(0)",
    ],
)
def test_a_program_that_spoils_its_report_has_failed_and_spoils_nothing_else(program: str) -> None:
    assert run_program(program).status == "failed"


def test_nothing_below_the_name_of_the_main_program_runs() -> None:
    assert run("if __name__ == '__main__':\n    raise SystemExit(1)").passed


def test_classes_of_the_program_can_be_found_by_their_module() -> None:
    program = "import dataclasses, pickle\n@dataclasses.dataclass\nclass A:\n    x: int = 1\n"
    assert run(program + "assert pickle.loads(pickle.dumps(A())) == A()").passed


# The five that must be contained ----------------------------------------------------------------------------------


def test_an_endless_loop_is_ended_by_its_cpu_time() -> None:
    outcome = run("while True: pass")
    assert (outcome.status, outcome.detail) == ("timeout", "Its CPU time was up")
    assert outcome.seconds < 15


def test_an_endless_wait_is_ended_by_the_clock() -> None:
    started = time.monotonic()
    outcome = run("import time\nwhile True: time.sleep(1)", seconds=0.5)
    assert (outcome.status, outcome.detail) == ("timeout", "Its time was up")
    assert time.monotonic() - started < 15


@pytest.mark.parametrize("namespaces", [True, False])
def test_a_fork_bomb_meets_the_limit_of_processes(namespaces: bool) -> None:
    """A bounded one first: only a limit that held is put to the proof by one without bounds."""
    outcome = run(FORKS, namespaces=namespaces)
    if not outcome.isolation.processes:
        pytest.skip("this system limits no processes")
    assert outcome.status == "processes" and "BlockingIOError" in outcome.detail
    assert outcome.output == f"forked {QUICK.processes - 1}\n" or not (outcome.isolation.user or os.getuid() == 0)
    if outcome.output == f"forked {QUICK.processes - 1}\n":
        assert run("import os\nwhile True: os.fork()", namespaces=namespaces).status == "processes"


def test_threads_count_as_processes() -> None:
    need("processes")
    program = "import threading, time\nfor _ in range(100): threading.Thread(target=time.sleep, args=(2,)).start()"
    assert run(program).status == "processes"


def test_an_allocation_of_ten_gigabytes_is_refused() -> None:
    outcome = run("x = bytearray(10 * 1024**3)")
    assert (outcome.status, outcome.isolation.rlimits) == ("memory", True)


def test_a_file_outside_the_scratch_folder_is_refused(tmp_path: Path) -> None:
    need("mount")
    place = tmp_path / "escaped"
    for folder in (tmp_path, *tmp_path.parents[:-2]):
        folder.chmod(folder.stat().st_mode | 0o005)
    tmp_path.chmod(0o777)
    outcome = run(f"open({str(place)!r}, 'w').write('x')")
    assert outcome.status == "files" and "Read-only file system" in outcome.detail
    assert not place.exists()


def test_the_scratch_folder_can_be_written_up_to_its_size() -> None:
    program = "import os\nassert os.listdir('.') == []\nopen('a', 'w').write('x')\nassert open('a').read() == 'x'\n"
    assert run(program + "import tempfile; tempfile.TemporaryFile().write(b'x')").passed
    many = "for n in range(20):\n    open(str(n), 'wb').write(bytes(1 << 20))"
    assert run(many).passed
    assert run("open('a', 'wb').write(bytes(1 << 20))", file_bytes=1 << 19).status == "files"
    need("mount")
    outcome = run(many, disk_bytes=8 << 20)
    assert outcome.status == "files" and "No space left" in outcome.detail


@pytest.mark.parametrize("host", ["127.0.0.1", "192.0.2.1", "example.com"])
def test_a_socket_reaches_nothing(host: str) -> None:
    need("network")
    outcome = run(f"import socket\nsocket.create_connection(({host!r}, 80), timeout=5)")
    assert outcome.status == "network"


# Nothing is left, nothing is taken along --------------------------------------------------------------------------


@pytest.mark.parametrize("namespaces", [True, False])
def test_a_process_that_leaves_its_session_ends_with_the_program(namespaces: bool) -> None:
    name = "jf" + secrets.token_hex(6)
    program = f"""
import ctypes, os, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        ctypes.CDLL(None).prctl(15, b"{name}", 0, 0, 0)
        print(open("/proc/self/comm").read(), flush=True)
        time.sleep(60)
    os._exit(0)
time.sleep(0.5)
"""
    outcome = run(program, namespaces=namespaces)
    assert outcome.passed and name in outcome.output
    assert name not in running()


@pytest.mark.parametrize("namespaces", [True, False])
def test_a_program_ends_with_the_process_that_runs_it(namespaces: bool) -> None:
    name = "jf" + secrets.token_hex(6)
    program = f'import ctypes, time\nctypes.CDLL(None).prctl(15, b"{name}", 0, 0, 0)\ntime.sleep(60)'
    runner = os.fork()
    if runner == 0:
        run(program, namespaces=namespaces, seconds=60)
        os._exit(0)
    wait_until(lambda: name in running())
    os.kill(runner, 9)
    os.waitpid(runner, 0)
    wait_until(lambda: name not in running())


def test_the_program_sees_neither_our_environment_nor_our_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET_TOKEN", "x")
    outcome = run("import os\nprint(sorted(os.environ), sorted(os.listdir('/proc/self/fd')))")
    assert "SECRET_TOKEN" not in outcome.output
    assert "'4'" in outcome.output and "'5'" not in outcome.output  # 3 reports, 4 is the listing itself


def test_rights_cannot_be_had_back() -> None:
    need("mount")
    program = """
import ctypes
libc = ctypes.CDLL(None)
libc.unshare(0x10020000)
libc.mount(b"none", b"/", b"none", 32 | 4096, b"")
libc.umount2(b"/", 2)
open("/var/tmp/jforce-escaped", "w")
"""
    assert run(program).status == "files"
    assert not Path("/var/tmp/jforce-escaped").exists()


def test_output_without_end_is_cut() -> None:
    outcome = run("while True: print('x' * 1000)", file_bytes=1 << 16, output_bytes=100)
    assert outcome.status == "files"
    assert len(outcome.output) == 100


def test_a_signal_that_ends_it_is_told() -> None:
    outcome = run("import os; os.kill(os.getpid(), 11)")
    assert (outcome.status, outcome.detail) == ("crashed", "Signal 11 ended it")


# What is said about the walls -------------------------------------------------------------------------------------


def test_walls_that_do_not_stand_are_named() -> None:
    full = Isolation(True, True, True, True, True, True)
    assert full.complete and "scratch folder only" in full.sentence()
    open_ = Isolation(rlimits=True, processes=True)
    assert not open_.complete
    assert "shutting off the network" in open_.sentence() and "read-only disk" in open_.sentence()
    assert "limit of processes" not in open_.sentence()


def test_without_namespaces_the_report_says_so() -> None:
    found = isolation(SandboxLimits(namespaces=False))
    assert (found.network, found.pid, found.user, found.mount) == (False, False, False, False)
    assert found.rlimits


def test_a_limit_that_no_python_could_start_under_is_refused() -> None:
    with pytest.raises(ConfigError, match="memory_bytes"):
        SandboxLimits(memory_bytes=1)
