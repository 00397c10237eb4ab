"""Costs measured: a few real prompts, tokens and steps through the real stages, at real shapes, on this machine."""

from __future__ import annotations

import dataclasses
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jacobi_forcing.backbone import Backbone
from jacobi_forcing.bench.contestants import AR
from jacobi_forcing.bench.cost import synchronise
from jacobi_forcing.bench.speed import bench
from jacobi_forcing.config import CollectConfig, DecodeConfig, EvaluationConfig, PromptsConfig, RecipeConfig
from jacobi_forcing.evaluate.quality import answers
from jacobi_forcing.loading import Loaded, load
from jacobi_forcing.recipe.planning.arithmetic import prompt_count, trained_weights
from jacobi_forcing.recipe.planning.costs import CollectCost, Costs, MeasureCost, TrainCost
from jacobi_forcing.recipe.planning.peak import Peak, folder_bytes
from jacobi_forcing.recipe.planning.shape import shape_of
from jacobi_forcing.recipe.reporter import Reporter
from jacobi_forcing.recipe.run import adapter_trainer, trainer
from jacobi_forcing.recipe.settings import round_noise, round_prompts, sweeps_blocks
from jacobi_forcing.trajectories.collect import collect
from jacobi_forcing.trajectories.prompts import Prompt, load_prompts
from jacobi_forcing.trajectories.report import CollectReport
from jacobi_forcing.trajectories.store import TrajectoryReader, TrajectoryWriter
from jacobi_forcing.trajectories.trajectory import Trajectory

STEPS = 4
"""Training steps of a micro-run; the first one is not timed."""
_PROBED = 8  # tokens from which the time of a whole response is foreseen


class _Clock(Reporter):
    """Notes when each step ended."""

    def __init__(self) -> None:
        self.ticks: list[float] = []

    def progress(self, done: int, total: int, detail: str = "") -> None:
        self.ticks.append(time.perf_counter())


class MicroRun:
    """The real stages on a little of the real work.

    Args:
        recipe: What is to be estimated.
        budget: Seconds that each kind of measurement may take, about. Where whole responses would take longer,
            shorter ones are generated and the rest is extrapolated, which `assumptions` then says.
        reporter: Told what is being measured.
    """

    def __init__(self, recipe: RecipeConfig, budget: float, reporter: Reporter) -> None:
        self.recipe, self.budget, self.reporter = recipe, budget, reporter
        self.assumptions: list[str] = []

    def costs(self) -> Costs:
        """Measure.

        Raises:
            JForceError: Whatever a stage raises.
        """
        collects, trains = [], []
        with tempfile.TemporaryDirectory(prefix="jforce-plan-") as name:
            for index in range(len(self.recipe.rounds)):
                folder = Path(name) / f"round-{index + 1}"
                collects.append(self._collect(index, folder / "trajectories"))
                trains.append(self._train(index, folder))
        measure = self._measure()
        device = load_device(self.recipe)
        return Costs(tuple(collects), tuple(trains), measure, device, tuple(dict.fromkeys(self.assumptions)))

    def _collect(self, index: int, folder: Path) -> CollectCost:
        """Collect one real batch."""
        stage = f"collect-{index + 1}"
        self.reporter.begin(stage, f"Measure collecting, round {index + 1}")
        settings, block = self.recipe.collect, self.recipe.rounds[index].block_size
        with Peak(self.recipe.model.device) as peak:
            started = time.perf_counter()
            loaded = load(self.recipe.model)
            backbone = Backbone(loaded.model)
            loading = time.perf_counter() - started
            count, prompts = self._sample(round_prompts(self.recipe, index), loaded, settings.batch_size, index)
            limit = self._limit(backbone, prompts, settings, block)
            small = dataclasses.replace(settings, max_new_tokens=limit, shard_size=len(prompts))
            started = time.perf_counter()
            report = collect(
                backbone,
                prompts,
                folder=folder,
                config=small,
                block_size=block,
                vocabulary=loaded.vocabulary if settings.draft_init == "vocabulary" else None,
                states=sweeps_blocks(self.recipe, self.recipe.rounds[index]),
                needed=round_noise(self.recipe.rounds[index]),
            )
            seconds = time.perf_counter() - started
        length = _length(report, limit, settings.max_new_tokens)
        scale = length / (report.tokens / report.responses)
        if limit < settings.max_new_tokens:
            self.assumptions.append(
                f"responses were measured up to {limit} tokens; unfinished ones are taken to reach "
                f"{settings.max_new_tokens}, at the same cost a token"
            )
            _stretch(folder, settings.max_new_tokens)
        self.reporter.end(stage, f"{report.responses} responses in {seconds:.1f} s")
        return CollectCost(
            responses=count,
            seconds_per_response=scale * seconds / report.responses,
            tokens_per_response=length,
            bytes_per_response=scale * folder_bytes(folder) / report.responses,
            memory=peak.bytes,
            fixed_seconds=loading,
        )

    def _sample(
        self, prompts: PromptsConfig, loaded: Loaded, size: int, index: int | None = None
    ) -> tuple[int, list[Prompt]]:
        """How many prompts there are, and the first batch of them."""
        context = Backbone(loaded.model).context_length
        if prompts.limit is None:
            found = load_prompts(prompts, loaded.tokenizer, context_length=context)
            return len(found), found[:size]
        few = dataclasses.replace(prompts, limit=min(size, prompts.limit))
        found = load_prompts(few, loaded.tokenizer, context_length=context)
        return prompts.limit if index is None else prompt_count(self.recipe, index), found

    def _limit(self, backbone: Backbone, prompts: Sequence[Prompt], settings: CollectConfig, block: int) -> int:
        """Tokens of a response that the budget allows; sweeping takes about as long as generating."""
        seconds = []
        for few in (1, 1, 1 + _PROBED):  # the first is a warm-up
            started = time.perf_counter()
            answers(backbone, prompts, max_new_tokens=few, batch_size=settings.batch_size)
            synchronise(backbone.device)
            seconds.append(time.perf_counter() - started)
        prefill, token = seconds[1], max((seconds[2] - seconds[1]) / _PROBED, 1e-6)
        return min(settings.max_new_tokens, max(2 * block, int((self.budget / 2 - prefill) / token)))

    def _train(self, index: int, folder: Path) -> TrainCost:
        """A few real steps, with loading and saving."""
        stage = f"train-{index + 1}"
        self.reporter.begin(stage, f"Measure training, round {index + 1}")
        recipe = self.recipe
        settings = dataclasses.replace(
            recipe.rounds[index], steps=STEPS, train_tokens=None, core_seconds=None, save_steps=STEPS
        )
        clock = _Clock()
        with Peak(recipe.model.device) as peak:
            begun = time.perf_counter()
            if recipe.mode == "adapter":
                adapter_trainer()(
                    *(recipe.model, folder / "trajectories", settings, recipe.adapter, folder),
                    **{"seed": recipe.seed, "reporter": clock},
                )
            else:
                trainer()(
                    *(recipe.model, folder / "trajectories", settings, folder),
                    **{"seed": recipe.seed, "reporter": clock, "peft": recipe.peft},
                )
            ended = time.perf_counter()
        steps = [after - before for before, after in zip(clock.ticks, clock.ticks[1:], strict=False)]
        step = statistics.median(steps)
        saving = ended - clock.ticks[-1]
        self.reporter.end(stage, f"{step:.3g} s a step")
        learnt = trained_weights(recipe, shape_of(recipe.model))
        return TrainCost(
            seconds_per_step=step,
            tokens_per_step=_row_tokens(recipe, index, folder),
            memory=peak.bytes,
            fixed_seconds=max(0.0, clock.ticks[0] - begun - step) + saving,
            checkpoint_seconds=saving,
            checkpoint_bytes=4.0 * learnt * (3 if settings.optimizer == "adamw" else 2),
            model_bytes=folder_bytes(folder / "model"),
        )

    def _measure(self) -> MeasureCost:
        """Answers side by side, and a prompt that every decoder answers alone."""
        self.reporter.begin("evaluate", "Measure decoding")
        recipe = self.recipe
        settings = recipe.evaluation or _stand_in(recipe)
        with Peak(recipe.model.device) as peak:
            started = time.perf_counter()
            loaded = load(recipe.model)
            loading = time.perf_counter() - started
            backbone = Backbone(loaded.model)
            _, prompts = self._sample(settings.prompts, loaded, settings.batch_size)
            shape = CollectConfig(max_new_tokens=settings.max_new_tokens, batch_size=settings.batch_size)
            limit = self._limit(backbone, prompts, shape, 8)
            scale = settings.max_new_tokens / limit
            started = time.perf_counter()
            answers(backbone, prompts, max_new_tokens=limit, batch_size=settings.batch_size)
            answering = (time.perf_counter() - started) / len(prompts)
            few = prompts[: min(2, settings.speed_prompts or 2)]
            started = time.perf_counter()
            result = bench(loaded, few, decode=settings.decode, max_new_tokens=limit)
            whole = time.perf_counter() - started
        timed = sum(turn.seconds for decoder in result.decoders for turn in decoder.turns) / len(few)
        ar = next(decoder for decoder in result.decoders if decoder.decoder == AR)
        ratios = [decoder.cost_ratio for decoder in result.decoders if decoder.cost_ratio is not None]
        self.reporter.end("evaluate", f"{ar.tokens_per_second:.1f} tokens/s one by one")
        if scale > 1:
            self.assumptions.append(f"answers were measured up to {limit} of {settings.max_new_tokens} tokens")
        return MeasureCost(
            seconds_per_answer=scale * answering,
            seconds_per_timed=scale * timed,
            memory=peak.bytes,
            # One answer of each decoder is thrown away, and forwards of several sizes are timed.
            fixed_seconds=loading + scale * timed + max(0.0, whole - (len(few) + 1) * timed),
            ar_seconds_per_token=1 / ar.tokens_per_second,
            cost_ratio=ratios[0] if ratios else 1.0,
        )


def load_device(recipe: RecipeConfig) -> str:
    """The kind of device that the recipe runs on."""
    from jacobi_forcing.loading import resolve_device

    return resolve_device(recipe.model.device).type


def _stand_in(recipe: RecipeConfig) -> EvaluationConfig:
    """What to decode for the break-even where the recipe measures nothing."""
    decode = (DecodeConfig(block_size=recipe.rounds[-1].block_size),)
    prompts = dataclasses.replace(recipe.prompts, limit=min(recipe.prompts.limit or 4, 4))
    return EvaluationConfig(prompts=prompts, decode=decode, max_new_tokens=recipe.collect.max_new_tokens, batch_size=4)


def _length(report: CollectReport, limit: int, longest: int) -> float:
    """Mean length of a response: those that were cut off at `limit` are taken to reach the longest, tokens."""
    return (report.tokens + report.unfinished * (longest - limit)) / report.responses


def _stretch(folder: Path, longest: int) -> None:
    """Lengthen responses that the budget cut off, with tokens they have, so that rows are as full as they will be."""
    reader = TrajectoryReader(folder)
    found = [t if t.finished else _longer(t, longest) for t in reader]
    for path in folder.iterdir():
        path.unlink()
    writer = TrajectoryWriter(
        folder,
        samples=[trajectory.sample for trajectory in found],
        block_size=reader.block_size,
        shard_size=len(found),
        settings=reader.manifest["settings"],
    )
    writer.write_shard(0, found)
    writer.finish()


def _longer(trajectory: Trajectory, longest: int) -> Trajectory:
    size, whole = trajectory.block_size, len(trajectory.response_ids) // trajectory.block_size
    if whole == 0:
        return trajectory
    blocks = [trajectory.states[index % whole] for index in range(max(whole, longest // size))]
    response = [token for states in blocks for token in states[-1]]
    return dataclasses.replace(trajectory, response_ids=response, states=blocks)


def _row_tokens(recipe: RecipeConfig, index: int, folder: Path) -> float:
    """Tokens of the packed rows of a step; 0 in mode adapter, whose rows are made otherwise."""
    if recipe.mode == "adapter":
        return 0.0
    from jacobi_forcing.packing import PackedRows

    settings: Any = recipe.rounds[index]
    rows = PackedRows(
        TrajectoryReader(folder / "trajectories"),
        max_length=settings.max_length,
        window_size=settings.window_size,
        misfits=settings.misfits,
        states="on_policy",  # whichever there are: their lengths are the same
    )
    return statistics.mean(rows.lengths) * settings.batch_size * settings.gradient_accumulation_steps
