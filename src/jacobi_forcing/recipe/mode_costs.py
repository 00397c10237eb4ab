"""What a training step costs in either mode: core-seconds and memory, measured on the real stages.

Wall time tells little where other work shares the machine; what the process itself computed, in all its threads, does.
Each measurement runs in a process of its own, so that its memory is its own too.
"""

from __future__ import annotations

import dataclasses
import itertools
import multiprocessing
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import torch

from jacobi_forcing.config import RecipeConfig
from jacobi_forcing.files import remove
from jacobi_forcing.packing import PackedRows
from jacobi_forcing.recipe.collecting import collect_trajectories
from jacobi_forcing.recipe.planning.peak import Peak
from jacobi_forcing.recipe.reporter import Reporter
from jacobi_forcing.recipe.run import adapter_trainer, trainer
from jacobi_forcing.recipe.settings import round_noise, round_prompts, sweeps_blocks
from jacobi_forcing.trajectories.store import TrajectoryReader

WARM_UP = 2
"""Training steps that are not counted."""


@dataclasses.dataclass(frozen=True)
class ModeCost:
    """What one round costs, by measurement.

    Attributes:
        mode: full or adapter.
        collect: Core-seconds to collect one response, with its trajectory in mode full, alone in mode adapter.
        step: Core-seconds of a training step, the median.
        responses: Responses in a step, on average.
        memory: Peak of the training process, bytes, the model included.
        slots: Slots of drafts that one response is learnt from: in mode full each token of the response once, in mode
            adapter those of all its lines, in every state that is trained on.
    """

    mode: str
    collect: float
    step: float
    responses: float
    memory: float
    slots: float

    @property
    def train(self) -> float:
        """Core-seconds to train on one response once."""
        return self.step / self.responses

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {**dataclasses.asdict(self), "train": self.train}


def in_child(work: Callable[..., Any], *arguments: Any) -> Any:
    """Run a function of a module in a fresh process; what it raises is raised here."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(work, *arguments).result()


def mode_cost(recipe: RecipeConfig, folder: Path, *, steps: int = 8, threads: int = 1, number: int = 1) -> ModeCost:
    """Collect a round's responses and train on them for a few steps.

    Args:
        recipe: Its round `number` is measured, from `recipe.model`; as many prompts as it names are collected.
        folder: For what is collected and trained; thrown away afterwards.
        steps: Training steps that are counted.
        threads: Of torch.
        number: Which round, from 1.

    Raises:
        JForceError: Whatever a stage raises.
    """
    collected = in_child(_collect, recipe, folder, number, threads)
    step, memory = in_child(_train, recipe, folder, number, steps, threads)
    reader = TrajectoryReader(folder / "trajectories")
    tokens = statistics.mean(len(trajectory.response_ids) for trajectory in reader)
    settings = recipe.rounds[number - 1]
    responses = float(settings.batch_size * settings.gradient_accumulation_steps)
    ages = recipe.adapter.max_sweeps + 1 if recipe.adapter.states == "every" else 1
    slots = float(recipe.adapter.lines_per_response * settings.block_size * ages)
    if recipe.mode == "full":
        slots = tokens
        rows = PackedRows(
            reader, max_length=settings.max_length, window_size=settings.window_size, misfits=settings.misfits
        )
        responses *= len(reader) / len(rows)
    remove(folder)
    return ModeCost(recipe.mode, collected, step, responses, memory, slots)


def affordable_steps(cost: ModeCost, responses: int, core_seconds: float) -> int:
    """Training steps that a budget leaves once its responses are collected; 0 if collecting alone takes it up."""
    return max(0, int((core_seconds - cost.collect * responses) / cost.step))


class _Meter(Reporter):
    """Notes what the process has computed whenever a step ends."""

    def __init__(self) -> None:
        self.ticks: list[float] = []

    def progress(self, done: int, total: int, detail: str = "") -> None:
        self.ticks.append(time.process_time())


def _collect(recipe: RecipeConfig, folder: Path, number: int, threads: int) -> float:
    """Core-seconds a response, loading not counted: that of few would weigh too much."""
    torch.set_num_threads(threads)
    settings, seconds = recipe.rounds[number - 1], []
    prompts = round_prompts(recipe, number - 1)
    for count in (1, 1, prompts.limit):  # the first is a warm-up
        remove(folder / "trajectories")
        started = time.process_time()
        report = collect_trajectories(
            recipe.model,
            dataclasses.replace(prompts, limit=count),
            recipe.collect,
            block_size=settings.block_size,
            folder=folder / "trajectories",
            reporter=Reporter(),
            states=sweeps_blocks(recipe, settings),
            needed=round_noise(settings),
        )
        seconds.append((time.process_time() - started, report["trajectories"]))
    _, (few, one), (many, all_) = seconds
    return max(many - few, 0.0) / max(all_ - one, 1)


def _train(recipe: RecipeConfig, folder: Path, number: int, steps: int, threads: int) -> tuple[float, float]:
    """Core-seconds of a step, and the peak of memory, bytes."""
    torch.set_num_threads(threads)
    settings = dataclasses.replace(recipe.rounds[number - 1], steps=WARM_UP + steps, save_steps=WARM_UP + steps)
    meter = _Meter()
    common: dict[str, Any] = {"seed": recipe.seed, "reporter": meter}
    place = folder / "trajectories"
    with Peak(recipe.model.device) as peak:
        if recipe.mode == "adapter":
            adapter_trainer()(recipe.model, place, settings, recipe.adapter, folder, **common)
        else:
            trainer()(recipe.model, place, settings, folder, **common, peft=recipe.peft)
    ticks = meter.ticks[WARM_UP - 1 :]
    return statistics.median(after - before for before, after in itertools.pairwise(ticks)), peak.bytes
