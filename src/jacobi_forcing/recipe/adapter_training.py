"""The stage that trains a gated adapter: a base, a folder of its responses, and a folder with a plain peft adapter.

Needs the extra `train`: import it through `recipe.run.adapter_trainer`.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from jacobi_forcing import processes, provenance
from jacobi_forcing.adapter import GatedAdapter
from jacobi_forcing.config import AdapterSettings, DecodeConfig, EvaluationConfig, ModelConfig, RoundConfig
from jacobi_forcing.files import new_folder, remove, write_json
from jacobi_forcing.loading import load
from jacobi_forcing.recipe.collapse import FiniteLosses, loggers
from jacobi_forcing.recipe.probe import Probe
from jacobi_forcing.recipe.reporter import Reporter
from jacobi_forcing.recipe.training import TrainLog, log_result, quiet, resume
from jacobi_forcing.training.adapter_config import AdapterConfig
from jacobi_forcing.training.adapter_trainer import AdapterTrainer
from jacobi_forcing.trajectories.store import TrajectoryReader


def train_adapter(
    model: ModelConfig,
    responses: Path,
    settings: RoundConfig,
    adapter: AdapterSettings,
    folder: Path,
    *,
    seed: int,
    reporter: Reporter,
    evaluation: EvaluationConfig | None = None,
) -> dict[str, Any]:
    """Train and save into `folder`: `model/` with the adapter, `log.jsonl`, `probe.jsonl`; at work `checkpoints/` too.

    Goes on at the last whole checkpoint and then ends with the weights of an undisturbed run. Base and adapter are in
    fp32 while training, under autocast where `model.dtype` is shorter.

    Args:
        model: The base, and the adapter to go on from if it names one.
        responses: A folder that collecting has completed, with or without states.
        settings: The round.
        adapter: What the adapter is and how it is trained.
        folder: Where everything goes.
        seed: Of whatever is random.
        reporter: Told every step.
        evaluation: For probes, where it asks for them.

    Returns:
        Last logged figures, steps, `train_tokens` and `core_seconds` as `budget.Meter` counts them, and a `summary`.

    Raises:
        JForceError: See `load` and `AdapterTrainer`.
    """
    reader = TrajectoryReader(responses)
    loaded = load(dataclasses.replace(model, dtype="float32"))
    checkpoints = folder / "checkpoints"
    log = TrainLog(folder / "log.jsonl", reporter)
    callbacks: list[TrainerCallback] = [FiniteLosses(), log, *loggers(settings.report_to, folder)]
    trainer = AdapterTrainer(
        loaded.model,
        _arguments(model, settings, adapter, checkpoints, seed),
        reader,
        processing_class=loaded.tokenizer,
        callbacks=callbacks,
    )
    if evaluation is not None and evaluation.probe_steps is not None:
        trainer.add_callback(Probe(folder / "probe.jsonl", evaluation, loaded, reporter, reader))
    resume(trainer, checkpoints, reporter)
    if processes.is_main():
        record = provenance.collect(seed=seed, model=model.name, round=settings.to_dict(), adapter=adapter.to_dict())
        _save(trainer.adapter, model.name, folder / "model", DecodeConfig(block_size=settings.block_size), record)
        remove(checkpoints)
    return log_result(log, trainer.state.global_step, trainer.meter)


def _arguments(
    model: ModelConfig, settings: RoundConfig, adapter: AdapterSettings, checkpoints: Path, seed: int
) -> AdapterConfig:
    options = {**adapter.to_dict(), "targets": None if adapter.targets is None else list(adapter.targets)}
    return AdapterConfig(
        output_dir=str(checkpoints),
        seed=seed,
        block_size=settings.block_size,
        max_steps=settings.steps or -1,
        learning_rate=settings.learning_rate,
        per_device_train_batch_size=settings.batch_size,
        gradient_accumulation_steps=settings.gradient_accumulation_steps,
        max_length=settings.max_length,
        optimizer=settings.optimizer,
        lr_scheduler_type=settings.lr_scheduler,
        warmup_steps=settings.warmup_ratio,
        save_steps=settings.save_steps,
        misfits=settings.misfits,
        **quiet(model),
        **options,
    )


def _save(adapter: GatedAdapter, base: str, folder: Path, decode: DecodeConfig, record: dict[str, Any]) -> None:
    with new_folder(folder) as temporary:
        adapter.save(temporary, provenance.portable(base), decode)
        write_json(temporary / "provenance.json", record)
