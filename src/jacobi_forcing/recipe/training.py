"""The stage that trains: a model, a folder of trajectories, and a folder that loads with plain transformers.

Needs the extra `train`: import it through `recipe.run.trainer`.
"""

from __future__ import annotations

import dataclasses
import json
import time
from pathlib import Path
from typing import Any

import torch
from transformers import PrinterCallback, Trainer, TrainerCallback

from jacobi_forcing import processes, provenance
from jacobi_forcing.config import DecodeConfig, EvaluationConfig, ModelConfig, PeftSettings, RoundConfig
from jacobi_forcing.decode.saved import save_custom_generate
from jacobi_forcing.files import new_folder, remove, write_json, write_text
from jacobi_forcing.formats import stamped
from jacobi_forcing.loading import Loaded, resolve_device
from jacobi_forcing.recipe.collapse import FiniteLosses, loggers
from jacobi_forcing.recipe.peft_training import begin, finish
from jacobi_forcing.recipe.probe import Probe
from jacobi_forcing.recipe.reporter import Reporter
from jacobi_forcing.recipe.settings import round_noise
from jacobi_forcing.training import JacobiForcingConfig, JacobiForcingTrainer, last_checkpoint
from jacobi_forcing.training.budget import Meter
from jacobi_forcing.trajectories.needed import check_states
from jacobi_forcing.trajectories.store import TrajectoryReader

LOG_EVERY = 10
"""Steps between log lines."""
CHECKPOINTS = 2
"""How many are kept while training: one may be half written when a run is killed."""


def train_model(
    model: ModelConfig,
    trajectories: Path,
    settings: RoundConfig,
    folder: Path,
    *,
    seed: int,
    reporter: Reporter,
    evaluation: EvaluationConfig | None = None,
    peft: PeftSettings | None = None,
) -> dict[str, Any]:
    """Train and save into `folder`: `model/`, `log.jsonl`, `probe.jsonl`; while at work `checkpoints/` too.

    Goes on at the last whole checkpoint and then ends with the weights of an undisturbed run. Weights are trained in
    fp32, under autocast where `model.dtype` is shorter, and saved in `model.dtype`.

    Args:
        model: Where to start from.
        trajectories: A folder of complete trajectories.
        settings: The round.
        folder: Where everything goes.
        seed: Of the order of rows, and of whatever else is random.
        reporter: Told every step.
        evaluation: For probes, where it asks for them.
        peft: Trains an adapter of peft's instead of all weights, where it names a method.

    Returns:
        Last logged losses, steps, `train_tokens` and `core_seconds` as `budget.Meter` counts them, and a `summary`.

    Raises:
        JForceError: See `load` and `JacobiForcingTrainer`.
    """
    reader = _reader(trajectories, settings)
    few = peft if peft is not None and peft.method != "none" else None
    sharded = bool(settings.fsdp or settings.deepspeed)
    # Where the weights are to be shared out, no GPU need hold them all.
    source = dataclasses.replace(model, device="cpu") if sharded else model
    loaded, adapted = begin(source, few, seed)
    checkpoints, log = folder / "checkpoints", TrainLog(folder / "log.jsonl", reporter, settings.core_seconds)
    callbacks: list[TrainerCallback] = [FiniteLosses(), log, *loggers(settings.report_to, folder)]
    if evaluation is not None and evaluation.probe_steps is not None:
        callbacks.append(Probe(folder / "probe.jsonl", evaluation, loaded, reporter, reader))
    trainer = JacobiForcingTrainer(
        loaded.model if adapted is None else adapted,
        JacobiForcingConfig.from_round(settings, str(checkpoints), seed=seed, **quiet(model)),
        reader,
        processing_class=loaded.tokenizer,
        callbacks=callbacks,
        vocabulary=_vocabulary(reader, settings, loaded),
    )
    resume(trainer, checkpoints, reporter)
    if sharded:
        loaded, adapted = _gathered(trainer, source, few, seed)
    if processes.is_main():
        record = provenance.collect(seed=seed, model=model.name, round=settings.to_dict())
        whole = finish(loaded, adapted, few, folder / "model", record)
        if whole is not None:
            _save(whole, model, folder / "model", DecodeConfig(block_size=settings.block_size), record)
        remove(checkpoints)
    return log_result(log, trainer.state.global_step, trainer.meter)


def _gathered(trainer: Trainer, source: ModelConfig, few: PeftSettings | None, seed: int) -> Any:
    """What `begin` gives, with the weights that the processes have between them; in the main process."""
    weights = trainer.accelerator.get_state_dict(trainer.model_wrapped)
    if not processes.is_main():
        return None, None
    loaded, adapted = begin(source, few, seed)
    (loaded.model if adapted is None else adapted).load_state_dict(weights)
    return loaded, adapted


def _reader(trajectories: Path, settings: RoundConfig) -> TrajectoryReader:
    reader = TrajectoryReader(trajectories)
    if settings.states == "stored":
        check_states(reader, round_noise(settings))
    return reader


def _vocabulary(reader: TrajectoryReader, settings: RoundConfig, loaded: Loaded) -> list[int] | None:
    """What states on policy start from: the same kind of draft as the folder was collected with."""
    from_vocabulary = reader.manifest.get("settings", {}).get("draft_init") == "vocabulary"
    return loaded.vocabulary if settings.states == "on_policy" and from_vocabulary else None


def quiet(model: ModelConfig) -> dict[str, Any]:
    """What the library's settings need for a quiet, resumable run."""
    device = resolve_device(model.device)
    return {
        "bf16": model.dtype == "bfloat16",
        "fp16": model.dtype == "float16",
        "use_cpu": device.type == "cpu",
        "dataloader_pin_memory": device.type == "cuda",
        "ddp_find_unused_parameters": False,
        "logging_steps": LOG_EVERY,
        "save_total_limit": CHECKPOINTS,
        "report_to": "none",  # see `loggers`
        "logging_nan_inf_filter": False,
        "disable_tqdm": True,
    }


def resume(trainer: Trainer, checkpoints: Path, reporter: Reporter) -> None:
    """Train to the end, from the last whole checkpoint if there is one; others are thrown away."""
    trainer.remove_callback(PrinterCallback)  # it prints to standard output
    last = processes.from_main(last_checkpoint(checkpoints) if processes.is_main() else None)
    for path in checkpoints.glob("checkpoint-*") if processes.is_main() else ():
        if path != last:
            remove(path)
    if last is not None:
        reporter.note(f"goes on at step {last.name.removeprefix('checkpoint-')}")
    trainer.train(resume_from_checkpoint=str(last) if last is not None else None)
    # Each process leaves the state of its random numbers in the last checkpoint; only then may that go.
    processes.wait()


def _save(loaded: Loaded, model: ModelConfig, folder: Path, decode: DecodeConfig, record: dict[str, Any]) -> None:
    loaded.model.to(getattr(torch, model.dtype)).eval()
    with new_folder(folder) as temporary:
        loaded.model.save_pretrained(temporary)
        loaded.tokenizer.save_pretrained(temporary)
        save_custom_generate(temporary, decode)
        write_json(temporary / "provenance.json", record)


def log_result(log: TrainLog, steps: int, meter: Meter | None = None) -> dict[str, Any]:
    """Steps, the last logged figures, what training took where it was counted, and a `summary`."""
    losses = [entry for entry in log.entries if "loss" in entry]
    last = losses[-1] if losses else {}
    parts = ", ".join(
        f"{name} {last[key]:.4g}"
        for key, name in (
            ("consistency_loss", "consistency loss"),
            ("ar_loss", "AR loss"),
            ("tokens_per_forward", "estimated TPF"),
        )
        if key in last
    )
    return {
        "steps": steps,
        "last_log": last,
        **({"train_tokens": meter.tokens, "core_seconds": round(meter.spent, 2)} if meter is not None else {}),
        "summary": f"{steps} steps" + (f", at last {parts}" if parts else ""),
    }


class TrainLog(TrainerCallback):
    """Keeps the trainer's log as JSON lines, and tells every step.

    Args:
        file: The JSON lines.
        reporter: Told.
        core_seconds: Where these and not a number of steps end the run.
    """

    def __init__(self, file: Path, reporter: Reporter, core_seconds: float | None = None) -> None:
        self.file, self.reporter, self.core_seconds = file, reporter, core_seconds
        self.entries: list[dict[str, Any]] = []
        self._detail, self._started = "", 0.0

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Start from what the checkpoint knows, so that a resumed run leaves no gap and no line twice."""
        self._started = time.process_time()
        self.entries = [dict(entry) for entry in state.log_history]
        self._save()

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        """Keep one entry."""
        self.entries.append({**logs, "step": state.global_step})
        self._save()
        if "loss" in logs:
            self._detail = f"loss {logs['loss']:.4g}"

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Tell."""
        if self.core_seconds is None:
            self.reporter.progress(state.global_step, state.max_steps, self._detail)
        else:
            spent = time.process_time() - self._started
            detail = f"core-seconds, step {state.global_step}, {self._detail}"
            self.reporter.progress(round(spent), round(self.core_seconds), detail)

    def _save(self) -> None:
        if processes.is_main():
            write_text(self.file, "".join(json.dumps(stamped("train-log", entry)) + "\n" for entry in self.entries))
