from __future__ import annotations

import functools
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from cli_tools import GENERATE_KEYS
from tiny_folder import save_prompts

WITHOUT_EXTRAS = """
import sys
for name in ("accelerate", "datasets", "pyarrow"):
    sys.modules[name] = None  # importing it now fails, and find_spec calls it absent
from jacobi_forcing.cli import main
status = main(["generate", "What is 6?", "-m", "model", "--max-new-tokens", "4", "--json"])
more = main(["collect", "-m", "model", "-p", "prompts.jsonl", "--field", "question", "-o", "extra", "-n", "4"])
print(status, more)
"""


def start(place: Path, *arguments: str) -> subprocess.Popen[str]:
    source = str(Path(__file__).resolve().parents[1] / "src")
    environment = {**os.environ, "PYTHONPATH": source, "OMP_NUM_THREADS": "1"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    # Tests that a shell runs in the background inherit that Ctrl-C is ignored.
    heeding = functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    return subprocess.Popen(
        [sys.executable, *arguments], cwd=place, env=environment, text=True, preexec_fn=heeding, **pipes
    )


@pytest.mark.timeout(300)  # here and below: a process imports torch, on a machine that may be busy
def test_a_process_prints_nothing_but_json_and_our_own_lines(place: Path) -> None:
    arguments = ["generate", "What is 5?", "-m", "model", "--max-new-tokens", "4", "--json"]
    out, err = start(place, "-m", "jacobi_forcing", *arguments).communicate(timeout=250)
    assert json.loads(out).keys() >= GENERATE_KEYS
    assert err.splitlines() == ["The tokenizer has no chat template: prompts are used as they are"]


@pytest.mark.timeout(300)
def test_generate_does_without_the_training_extras_and_collect_names_the_one_it_needs(place: Path) -> None:
    out, err = start(place, "-c", WITHOUT_EXTRAS).communicate(timeout=250)
    answer, statuses = out.splitlines()
    assert json.loads(answer).keys() >= GENERATE_KEYS
    assert statuses == "0 2"
    assert "Error: The package 'pyarrow' is not installed; install it with: pip install 'jacobi-forcing[train]'." in err


@pytest.mark.timeout(300)
def test_ctrl_c_ends_quietly_with_status_130(place: Path) -> None:
    save_prompts(place / "many.jsonl", 2000)
    arguments = ["collect", "-m", "model", "-p", "many.jsonl", "--field", "question", "-o", "stopped"]
    process = start(place, "-m", "jacobi_forcing", *arguments, "--shard-size", "1")
    deadline = time.monotonic() + 200
    while not (place / "stopped" / "shard-00000.parquet").exists():
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "Traceback" not in err
