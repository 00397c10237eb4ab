from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import jacobi_forcing

SOURCE = Path(__file__).resolve().parents[1] / "src"


def heavy_after(script: str) -> tuple[list[str], str]:
    """Which of the libraries that take seconds a fresh process has imported after a script, and what it printed."""
    script += "\nimport sys\nprint('heavy:', *sorted({'torch', 'transformers'} & sys.modules.keys()))"
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "PYTHONPATH": str(SOURCE)},
        capture_output=True,
        text=True,
        timeout=100,
        check=True,
    )
    output, _, names = done.stdout.rpartition("heavy:")
    return names.split(), output


def test_importing_the_package_does_not_wait_for_torch() -> None:
    assert heavy_after("import jacobi_forcing; from jacobi_forcing import DecodeConfig, JForceError")[0] == []
    assert "torch" in heavy_after("from jacobi_forcing import generate")[0]


@pytest.mark.parametrize(
    ("argument", "said"), [("--version", f"jforce {jacobi_forcing.__version__}"), ("--help", "quickstart")]
)
def test_version_and_help_do_not_wait_for_torch(argument: str, said: str) -> None:
    heavy, output = heavy_after(f"from jacobi_forcing.cli import main; assert main(['{argument}']) == 0")
    assert heavy == []
    assert said in output


def test_every_public_name_is_there_and_others_are_not() -> None:
    for name in jacobi_forcing.__all__:
        assert name in dir(jacobi_forcing)
        assert getattr(jacobi_forcing, name) is not None
    with pytest.raises(AttributeError, match="'jacobi_forcing' has no attribute 'generat'"):
        _ = jacobi_forcing.generat
