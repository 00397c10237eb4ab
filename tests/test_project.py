"""The project's own files: pins, commands, what a wheel carries, and the check of README's commands."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
import zipfile
from email import message_from_bytes
from pathlib import Path

import pytest

import check_readme
import recipe_reference

ROOT = Path(__file__).resolve().parents[1]
TRAINING_ONLY = {"accelerate", "datasets", "pyarrow"}


@pytest.fixture(scope="module")
def project() -> dict[str, object]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def canonical(requirement: str) -> str:
    """The name in a requirement, as package indexes compare it."""
    return re.sub(r"[-_.]+", "-", re.match(r"[A-Za-z0-9._-]+", requirement)[0]).lower()


def pins() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    return {canonical(line): line for line in lines if line and not line.startswith("#")}


def test_every_constraint_is_one_exact_public_version() -> None:
    assert pins()["torch"] == "torch==2.13.0"
    for line in pins().values():
        assert re.fullmatch(r"[A-Za-z0-9._-]+==[0-9A-Za-z.]+", line), line
    assert "jacobi-forcing" not in pins()


def test_everything_that_make_installs_is_pinned(project: dict) -> None:
    extras = project["optional-dependencies"]
    wanted = {canonical(line) for line in [*project["dependencies"], *extras["train"], *extras["dev"]]}
    assert wanted - {"jacobi-forcing"} <= pins().keys()


def test_decoding_asks_for_nothing_that_only_training_needs(project: dict) -> None:
    assert not TRAINING_ONLY & {canonical(line) for line in project["dependencies"]}
    assert {canonical(line) for line in project["optional-dependencies"]["train"]} >= TRAINING_ONLY
    assert set(project["optional-dependencies"]) == {"train", "eval", "serve", "ray", "dev"}


def test_both_commands_go_through_the_pinned_install() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert "-c constraints.txt -e '.[dev]'" in makefile
    for target in ("quickstart", "test"):
        assert re.search(rf"^{target}: \$\(STAMP\)", makefile, re.MULTILINE), target
    assert re.search(r"^\$\(STAMP\): pyproject\.toml constraints\.txt$", makefile, re.MULTILINE)


def test_an_old_or_missing_interpreter_is_refused_with_one_clear_line(tmp_path: Path) -> None:
    # A stand-in that calls itself Python 3.9: it fails the version check, and nothing is made.
    old = tmp_path / "python-old"
    old.write_text('#!/bin/sh\n[ "$1" = --version ] && echo Python 3.9.2\nexit 1\n')
    old.chmod(0o755)
    for file in ("Makefile", "pyproject.toml", "constraints.txt"):
        (tmp_path / file).write_bytes((ROOT / file).read_bytes())
    for interpreter, said in ((str(old), "3.11 or newer is needed"), ("python-missing", "is not on the path")):
        done = subprocess.run(
            ["make", "--no-print-directory", f"PYTHON={interpreter}", "venv"],
            cwd=tmp_path,
            env={name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "MAKELEVEL")},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode != 0
        assert said in done.stderr
        assert "make PYTHON=python3.12" in done.stderr
        assert not (tmp_path / ".venv").exists()


def test_continuous_integration_runs_every_gate() -> None:
    script = ROOT / ".ci" / "run"
    assert os.access(script, os.X_OK)
    lines = script.read_text(encoding="utf-8").splitlines()
    assert "set -euo pipefail" in lines
    targets = [line.removeprefix("make ") for line in lines if line.startswith("make ")]
    assert targets == ["lint", "types", "readme", "test"]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    pytest.importorskip("hatchling", reason="building a wheel needs hatchling, which the dev extra brings")
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return zipfile.ZipFile(next(folder.glob("*.whl")))


def test_a_wheel_carries_all_that_the_checkout_offers_a_user(wheel: zipfile.ZipFile) -> None:
    carried = set(wheel.namelist())
    files = [file.relative_to(ROOT).as_posix() for file in (ROOT / "recipes").rglob("*.yaml")]
    recipes = {f"jacobi_forcing/{file}" for file in files}
    assert recipes >= {"jacobi_forcing/recipes/quickstart.yaml", "jacobi_forcing/recipes/ablations/masks.yaml"}
    source = {
        file.relative_to(ROOT / "src").as_posix()
        for file in (ROOT / "src" / "jacobi_forcing").rglob("*")
        if file.is_file() and "__pycache__" not in file.parts
    }
    assert source >= {"jacobi_forcing/py.typed", "jacobi_forcing/embedded/base/model.safetensors"}
    missing = (recipes | source) - carried
    assert not missing, missing
    surplus = {name for name in carried - recipes - source if ".dist-info/" not in name}
    assert not surplus, surplus


def test_a_wheel_names_its_command_and_its_licence(wheel: zipfile.ZipFile) -> None:
    info = "jacobi_forcing-0.1.0.dist-info"
    assert b"jforce = jacobi_forcing.cli:main" in wheel.read(f"{info}/entry_points.txt")
    metadata = message_from_bytes(wheel.read(f"{info}/METADATA"))
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata["Requires-Python"] == ">=3.11"
    assert b"Version 2.0, January 2004" in wheel.read(f"{info}/licenses/LICENSE")


MARKDOWN = """\
# Title

```bash
not run
```

<!-- ci -->

```console
$ echo one \\
>   two
one two
$ false
```

<!-- ci timeout=5 -->
````bash
cat <<'END'
```
END
````
"""


def test_only_marked_blocks_are_run_and_of_a_console_only_its_commands() -> None:
    first, second = check_readme.find_blocks(MARKDOWN)
    assert (first.line, first.language, first.timeout) == (9, "console", 120)
    assert first.script == "echo one \\\n  two\nfalse"
    assert (second.line, second.timeout) == (17, 5)
    assert second.script == "cat <<'END'\n```\nEND"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("<!-- ci -->\nwords\n```bash\ntrue\n```\n", "no block below"),
        ("<!-- ci -->\n", "no block below"),
        ("<!-- ci -->\n```bash\ntrue\n", "no end"),
        ("<!-- ci -->\n```yaml\na: 1\n```\n", "cannot run"),
        ("<!-- ci -->\n```console\nls\n```\n", "no command"),
    ],
)
def test_a_marked_block_that_cannot_be_run_is_an_error(text: str, said: str) -> None:
    with pytest.raises(check_readme.ReadmeError, match=said):
        check_readme.find_blocks(text)


def run_readme(path: Path, text: str) -> subprocess.CompletedProcess[str]:
    path.write_text(text)
    command = [sys.executable, str(ROOT / "scripts" / "check_readme.py"), str(path)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_a_readme_whose_commands_work_passes(tmp_path: Path) -> None:
    text = (
        "<!-- ci -->\n```console\n$ cd src\n$ test -d jacobi_forcing\n```\n"
        "<!-- ci -->\n```python\nimport sys\nassert sys.version_info >= (3, 11)\n```\n"
    )
    done = run_readme(tmp_path / "README.md", text)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == "README.md: 2 of 2 blocks ran"


def test_a_failing_command_fails_the_check_and_shows_what_it_printed(tmp_path: Path) -> None:
    done = run_readme(tmp_path / "README.md", "<!-- ci -->\n```console\n$ echo reason; false\n$ echo unreached\n```\n")
    assert done.returncode == 1
    assert "README.md:2: exit status 1" in done.stdout
    output = done.stdout.partition("--- output")[2]
    assert "reason" in output and "unreached" not in output


def test_a_command_that_hangs_is_ended_with_its_children(tmp_path: Path) -> None:
    done = run_readme(tmp_path / "README.md", "<!-- ci timeout=1 -->\n```bash\nsleep 50 | sleep 50\n```\n")
    assert done.returncode == 1
    assert "still running after 1 s" in done.stdout


def test_a_readme_with_nothing_marked_is_no_pass(tmp_path: Path) -> None:
    done = run_readme(tmp_path / "README.md", "```console\n$ true\n```\n")
    assert done.returncode == 1
    assert "no block is marked" in done.stderr


def test_the_reference_of_recipe_keys_is_up_to_date() -> None:
    assert recipe_reference.PAGE.read_text(encoding="utf-8") == recipe_reference.page(), (
        "run scripts/recipe_reference.py"
    )
