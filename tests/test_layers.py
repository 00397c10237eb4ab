"""The shape of the source: which module may import which, what decoding loads, and how long things may get."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "src"
PACKAGE = "jacobi_forcing"

# A module imports only from its own line and from the lines above it.
LAYERS = (
    "errors",
    "files",
    "processes",
    "formats",
    "blocks",
    "schema",
    "config",
    "provenance",
    "embedded",
    "entry",
    "packed",
    "gated",
    "adapter_file",
    "adapter",
    "peft_models",
    "quantized",
    "loading",
    "cache",
    "refusals",
    "backbone",
    "sweep",
    "decode",
    "schedule",
    "trajectories",
    "tags",
    "packing",
    "mask",
    "flexmask",
    "losses",
    "training",
    "evaluate",
    "bench",
    "viz",
    "recipe",
    "ablate",
    "serve",
    "cli",
    "__main__",
)

# Libraries that only the extras bring.
EXTRAS = (
    "accelerate",
    "datasets",
    "fastapi",
    "lm_eval",
    "math_verify",
    "matplotlib",
    "peft",
    "pyarrow",
    "ray",
    "uvicorn",
)
# transformers itself loads accelerate wherever it is installed, so its absence from sys.modules proves nothing.
LOADED_BY_LIBRARY = {"accelerate"}

MAX_FILE_LINES = 300
MAX_FUNCTION_LINES = 60
# In pieces, so that this file does not find itself.
MACHINE_PATH = re.compile(r"(?<![\w.:/~-])/(?:" + "|".join(("work", "root", "home", "tmp", "Users")) + r")/\w")


def source_files() -> list[Path]:
    files = sorted((SOURCE / PACKAGE).rglob("*.py"))
    assert files, "the source was not found"
    return files


def is_module(name: str) -> bool:
    return name in LAYERS or any((SOURCE / PACKAGE / candidate).exists() for candidate in (name, f"{name}.py"))


def package_imports(tree: ast.AST, module: str, *, is_package: bool) -> Iterator[tuple[int, str]]:
    """(line, module) for every import from the package itself, wherever it stands; "" is the package's root."""
    for node in ast.walk(tree):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            origin = node.module or ""
            if node.level:
                parts = module.split(".")
                kept = parts[: len(parts) - node.level + is_package]
                origin = ".".join([*kept, origin]) if origin else ".".join(kept)
            names = [f"{origin}.{alias.name}" for alias in node.names] if origin == PACKAGE else [origin]
        for name in names:
            first, *rest = name.split(".")
            if first == PACKAGE:
                yield node.lineno, rest[0] if rest and is_module(rest[0]) else ""


def upward_imports(code: str, module: str, *, is_package: bool = False) -> list[str]:
    """What is wrong with a module's imports, one line each; `module` is its dotted name."""
    parts = module.split(".")
    if len(parts) == 1:
        return []  # the package's root gathers the public names, from any layer
    if parts[1] not in LAYERS:
        return [f"{module} is in no layer: give it a line in LAYERS"]
    own = LAYERS.index(parts[1])
    faults = []
    for line, layer in package_imports(ast.parse(code), module, is_package=is_package):
        if layer == "" and parts[1] not in ("cli", "__main__"):
            faults.append(f"{module}:{line} imports from the package's root, which stands above it")
        elif layer in LAYERS and LAYERS.index(layer) > own:
            faults.append(f"{module}:{line} imports {layer}, which stands above it")
    return faults


def test_no_module_imports_from_a_layer_above_its_own() -> None:
    faults = []
    for file in source_files():
        parts = file.relative_to(SOURCE).with_suffix("").parts
        is_package = parts[-1] == "__init__"
        module = ".".join(parts[:-1] if is_package else parts)
        faults += upward_imports(file.read_text(encoding="utf-8"), module, is_package=is_package)
    assert not faults, "\n".join(faults)


@pytest.mark.parametrize(
    ("code", "module"),
    [
        ("from jacobi_forcing.cli import main", "jacobi_forcing.blocks"),
        ("import jacobi_forcing.training.trainer", "jacobi_forcing.decode.generate"),
        ("from jacobi_forcing import recipe", "jacobi_forcing.losses"),
        ("from jacobi_forcing import generate", "jacobi_forcing.training.trainer"),
        ("from ..decode import generate", "jacobi_forcing.sweep.inner"),
        ("from . import serve", "jacobi_forcing.recipe"),
        ("def late():\n    from jacobi_forcing.decode import generate", "jacobi_forcing.cache"),
        ("", "jacobi_forcing.unheard_of"),
    ],
)
def test_the_layer_check_finds_every_way_to_import_upward(code: str, module: str) -> None:
    assert len(upward_imports(code, module)) == 1


@pytest.mark.parametrize(
    ("code", "module", "is_package"),
    [
        ("from jacobi_forcing.errors import JForceError\nimport torch", "jacobi_forcing.blocks", False),
        ("from jacobi_forcing.decode.drafts import draft", "jacobi_forcing.decode.generate", False),
        ("from .drafts import draft", "jacobi_forcing.decode", True),
        ("from . import drafts", "jacobi_forcing.decode", True),
        ("from .errors import JForceError", "jacobi_forcing.blocks", False),
        ("from jacobi_forcing.decode import generate", "jacobi_forcing", True),
        ("from jacobi_forcing import __version__", "jacobi_forcing.cli", False),
    ],
)
def test_the_layer_check_lets_downward_imports_pass(code: str, module: str, is_package: bool) -> None:
    assert upward_imports(code, module, is_package=is_package) == []


def run_python(script: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        cwd=SOURCE,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_public_names_import_without_loading_what_only_the_extras_bring() -> None:
    absent = sorted(set(EXTRAS) - LOADED_BY_LIBRARY)
    loaded = run_python(f"""
        import sys
        import jacobi_forcing
        from jacobi_forcing import DecodeConfig, generate
        print([name for name in {absent} if name in sys.modules])
    """)
    assert loaded.strip() == "[]"


def test_decoding_works_where_no_extra_is_installed() -> None:
    output = run_python(f"""
        import sys
        for name in {EXTRAS}:
            sys.modules[name] = None  # importing it now fails, and find_spec calls it absent
        import torch
        from transformers import LlamaConfig, LlamaForCausalLM
        from jacobi_forcing import DecodeConfig, generate
        torch.set_num_threads(1)
        torch.manual_seed(0)
        model = LlamaForCausalLM(LlamaConfig(
            vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
            max_position_embeddings=64, bos_token_id=None, eos_token_id=None, pad_token_id=0)).eval()
        prompt = torch.tensor([[5, 6, 7]])
        expected = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=12, do_sample=False)
        decode = DecodeConfig(decoder="window", block_size=4)
        got = generate(model, prompt, decode=decode, max_new_tokens=12)
        print(torch.equal(got, expected))
    """)
    assert output.split()[-1] == "True"


def test_no_source_file_and_no_function_is_too_long() -> None:
    faults = []
    for file in source_files():
        code = file.read_text(encoding="utf-8")
        name = file.relative_to(ROOT).as_posix()
        if len(code.splitlines()) > MAX_FILE_LINES:
            faults.append(f"{name}: {len(code.splitlines())} lines, at most {MAX_FILE_LINES}")
        for node in ast.walk(ast.parse(code)):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                length = (node.end_lineno or node.lineno) - node.lineno + 1
                if length > MAX_FUNCTION_LINES:
                    faults.append(f"{name}:{node.lineno} {node.name}: {length} lines, at most {MAX_FUNCTION_LINES}")
    assert not faults, "\n".join(faults)


def test_no_file_names_a_path_of_somebodys_machine() -> None:
    listing = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    if listing.returncode != 0:
        pytest.skip("not a git checkout, so there is no list of the project's files")
    faults = []
    for name in filter(None, listing.stdout.split("\0")):
        try:
            lines = (ROOT / name).read_text(encoding="utf-8").splitlines()
        except (FileNotFoundError, UnicodeDecodeError):
            continue  # deleted and not yet committed, or not text
        faults += [
            f"{name}:{number}: {line.strip()}" for number, line in enumerate(lines, 1) if MACHINE_PATH.search(line)
        ]
    assert not faults, "\n".join(faults)


def test_the_machine_path_check_sees_paths_and_spares_links() -> None:
    def path(*parts: str) -> str:
        return "/" + "/".join(parts)

    for text in (path("home", "ann", "x"), f'open("{path("work", "x.json")}")', f"cd {path('tmp', 'x')}"):
        assert MACHINE_PATH.search(text), text
    for text in (f"https://site.org{path('home', 'x')}", f"net{path('work', 'x')}", f"..{path('tmp', 'x')}"):
        assert not MACHINE_PATH.search(text), text
