"""Shared by all tests: no network, fixed seeds, one thread, and `gpu` tests that skip themselves."""

from __future__ import annotations

import os

# Before transformers is imported: it reads them once.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_HUB_DISABLE_TELEMETRY"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"

import contextlib
import random
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from tiny_folder import save_prompts, save_tiny

# The models are so small that a second thread costs more than it brings, and one thread sums in one order.
torch.set_num_threads(1)


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device, and there is none here")


@pytest.fixture(autouse=True)
def seeded() -> None:
    """Every test starts from the same random state, whichever tests ran before it."""
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A working folder with a model and prompts, for modules that make none of their own."""
    folder = tmp_path_factory.mktemp("place")
    save_tiny(folder / "model")
    save_prompts(folder / "prompts.jsonl", 6)
    with contextlib.chdir(folder):
        yield folder


@pytest.fixture
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    """A terminal that breaks no line."""
    monkeypatch.setenv("COLUMNS", "200")
