"""Run the commands that README.md shows, so that they cannot rot.

A fenced block is run when the comment `<!-- ci -->` stands above it; `<!-- ci timeout=600 -->` gives it that many
seconds instead of 120. Each block is one script, started in the repository's root with the interpreter's own folder
first on the path and nothing on standard input:

- ```console: the lines that start with `$ `, with lines that follow a trailing backslash; the rest is output
- ```bash (or sh): the whole block
- ```python: the whole block

Usage::

    python scripts/check_readme.py [README.md]
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
DEFAULT_TIMEOUT = 120  # seconds
MARKER = re.compile(r"<!--\s*ci(?:\s+timeout=(\d+))?\s*-->")
FENCE = re.compile(r"(`{3,}|~{3,})\s*([\w+-]*)")
SHELL = ("bash", "-euo", "pipefail", "-c")
RUNNERS = {"console": SHELL, "bash": SHELL, "sh": SHELL, "python": ("python", "-c")}


@dataclass(frozen=True)
class Block:
    """One marked block: where it starts, how to run it, what to run, and for how many seconds at most."""

    line: int
    language: str
    script: str
    timeout: int


class ReadmeError(ValueError):
    """A marked block that cannot be run as it is written."""


def find_blocks(text: str) -> list[Block]:
    """All marked blocks of a Markdown text, in order.

    Raises:
        ReadmeError: A marker without a block below it, a block without an end, without commands or of another language.
    """
    lines = text.splitlines()
    blocks = []
    position = 0
    marker: re.Match[str] | None = None
    while position < len(lines):
        fence = FENCE.match(lines[position].strip())
        if fence is None:
            if marker and lines[position].strip():
                raise ReadmeError(f"line {position}: the marker has no block below it")
            marker = marker or MARKER.fullmatch(lines[position].strip())
            position += 1
            continue
        end = _end_of_fence(lines, position, fence[1])
        if marker:
            timeout = int(marker[1] or DEFAULT_TIMEOUT)
            script = _script(lines[position + 1 : end], fence[2], position + 1)
            blocks.append(Block(position + 1, fence[2], script, timeout))
            marker = None
        position = end + 1
    if marker:
        raise ReadmeError("the last marker has no block below it")
    return blocks


def _end_of_fence(lines: list[str], start: int, fence: str) -> int:
    for position in range(start + 1, len(lines)):
        stripped = lines[position].strip()
        if stripped.startswith(fence) and not stripped.strip(fence[0]):
            return position
    raise ReadmeError(f"line {start + 1}: the block has no end")


def _script(body: list[str], language: str, line: int) -> str:
    if language not in RUNNERS:
        raise ReadmeError(f"line {line}: cannot run a block of '{language}', only {', '.join(RUNNERS)}")
    script = "\n".join(_console_commands(body) if language == "console" else body)
    if not script.strip():
        hint = " (a command starts with '$ ')" if language == "console" else ""
        raise ReadmeError(f"line {line}: the block has no command{hint}")
    return script


def _console_commands(body: list[str]) -> list[str]:
    commands: list[str] = []
    for row in body:
        continued = bool(commands) and commands[-1].endswith("\\")
        if continued:
            commands.append(row.removeprefix("> "))
        elif row.startswith("$ "):
            commands.append(row[2:])
    return commands


def run_block(block: Block) -> tuple[str | None, str]:
    """Run one block.

    Returns:
        (None or what went wrong, everything it printed).
    """
    environment = os.environ | {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"}
    process = subprocess.Popen(
        [*RUNNERS[block.language], block.script],
        cwd=ROOT,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        encoding="utf-8",
        errors="replace",
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=block.timeout)
    except subprocess.TimeoutExpired:
        # The whole group: a child of the shell would go on and hold the pipe open.
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
        return f"still running after {block.timeout} s", output
    return (f"exit status {process.returncode}" if process.returncode else None), output


def main() -> int:
    """Check one file; 0 when every marked block ran to its end with status 0."""
    parser = argparse.ArgumentParser(description="Run the marked commands of a Markdown file.")
    parser.add_argument("file", type=Path, nargs="?", default=ROOT / "README.md")
    file = parser.parse_args().file
    try:
        blocks = find_blocks(file.read_text(encoding="utf-8"))
    except (OSError, ReadmeError) as error:
        print(f"{file.name}: {error}", file=sys.stderr)
        return 1
    if not blocks:
        print(f"{file.name}: no block is marked with <!-- ci -->, so nothing would be checked", file=sys.stderr)
        return 1
    failures = 0
    for block in blocks:
        started = time.perf_counter()
        problem, output = run_block(block)
        print(f"{file.name}:{block.line}: {problem or 'ok'} ({time.perf_counter() - started:.1f} s)", flush=True)
        if problem:
            failures += 1
            print(f"--- script\n{block.script}\n--- output\n{output}\n---", flush=True)
    print(f"{file.name}: {len(blocks) - failures} of {len(blocks)} blocks ran")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
