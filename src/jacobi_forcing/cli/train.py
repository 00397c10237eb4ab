"""`jforce train`: one training run on collected trajectories."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Annotated, Any

import typer

from jacobi_forcing.cli import options
from jacobi_forcing.cli.console import print_result
from jacobi_forcing.config import AdapterSettings, ModelConfig, PeftSettings, RecipeConfig, RoundConfig
from jacobi_forcing.embedded import BUILTIN
from jacobi_forcing.processes import is_main
from jacobi_forcing.schema import dataclasses_help

_RATES = {"full": RoundConfig.learning_rate, "adapter": 3e-3, "peft": 1e-4}
LearningRate = Annotated[
    float | None,
    options.option(
        *(RoundConfig, "learning_rate", "--learning-rate", "--lr"),
        show_default="1e-06, 0.0001 with --peft, 0.003 with --mode adapter",
    ),
]
States = Annotated[
    str | None,
    typer.Option(
        help="Mode full: "
        + dataclasses_help(RoundConfig, "states")
        + ". Mode adapter: "
        + dataclasses_help(AdapterSettings, "states")
        + ".",
        show_default=f"{RoundConfig.states}, and {AdapterSettings.states} with --mode adapter",
    ),
]
LinesPerResponse = Annotated[int, options.option(AdapterSettings, "lines_per_response")]


def train(
    trajectories: Annotated[Path, typer.Option("--trajectories", "-t", help="Folder that jforce collect filled.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder for the model, checkpoints and log.")],
    steps: Annotated[int | None, options.option(RoundConfig, "steps", show_default="none")] = None,
    train_tokens: Annotated[int | None, options.option(RoundConfig, "train_tokens", show_default="none")] = None,
    core_seconds: Annotated[float | None, options.option(RoundConfig, "core_seconds", show_default="none")] = None,
    model: options.Model = BUILTIN,
    mode: Annotated[str, options.option(RecipeConfig, "mode")] = RecipeConfig.mode,
    adapter: options.Adapter = ModelConfig.adapter,
    rank: Annotated[int, options.option(AdapterSettings, "rank")] = AdapterSettings.rank,
    alpha: Annotated[float | None, options.option(AdapterSettings, "alpha", show_default="2 r")] = None,
    lines_per_response: LinesPerResponse = AdapterSettings.lines_per_response,
    max_sweeps: Annotated[int, options.option(AdapterSettings, "max_sweeps")] = AdapterSettings.max_sweeps,
    states: States = None,
    right_weight: Annotated[float, options.option(AdapterSettings, "right_weight")] = AdapterSettings.right_weight,
    slot_decay: Annotated[float, options.option(AdapterSettings, "slot_decay")] = AdapterSettings.slot_decay,
    peft: options.Peft = PeftSettings.method,
    peft_rank: options.PeftRank = PeftSettings.rank,
    peft_alpha: options.PeftAlpha = PeftSettings.alpha,
    peft_target: options.PeftTarget = None,
    peft_merge: options.PeftMerge = PeftSettings.merge,
    quantization: options.Quantization = ModelConfig.quantization,
    window_size: Annotated[int, options.option(RoundConfig, "window_size", "--window-size", "-w")] = 16,
    learning_rate: LearningRate = None,
    batch_size: Annotated[int, options.option(RoundConfig, "batch_size")] = RoundConfig.batch_size,
    gradient_accumulation_steps: Annotated[int, options.option(RoundConfig, "gradient_accumulation_steps")] = 1,
    max_length: Annotated[int, options.option(RoundConfig, "max_length")] = RoundConfig.max_length,
    ar_weight: Annotated[float, options.option(RoundConfig, "ar_weight")] = RoundConfig.ar_weight,
    schedule: Annotated[str, options.option(RoundConfig, "schedule")] = RoundConfig.schedule,
    t_min: Annotated[float, options.option(RoundConfig, "t_min")] = RoundConfig.t_min,
    t_max: Annotated[float, options.option(RoundConfig, "t_max")] = RoundConfig.t_max,
    schedule_phase: Annotated[str, options.option(RoundConfig, "schedule_phase")] = RoundConfig.schedule_phase,
    mask: Annotated[str, options.option(RoundConfig, "mask")] = RoundConfig.mask,
    loss_positions: Annotated[str, options.option(RoundConfig, "loss_positions")] = RoundConfig.loss_positions,
    loss_reduction: Annotated[str, options.option(RoundConfig, "loss_reduction")] = RoundConfig.loss_reduction,
    temperature: Annotated[float, options.option(RoundConfig, "temperature")] = RoundConfig.temperature,
    optimizer: Annotated[str, options.option(RoundConfig, "optimizer")] = RoundConfig.optimizer,
    lr_scheduler: Annotated[str, options.option(RoundConfig, "lr_scheduler")] = RoundConfig.lr_scheduler,
    warmup_ratio: Annotated[float, options.option(RoundConfig, "warmup_ratio")] = RoundConfig.warmup_ratio,
    misfits: Annotated[str, options.option(RoundConfig, "misfits")] = RoundConfig.misfits,
    gradient_checkpointing: Annotated[bool, options.option(RoundConfig, "gradient_checkpointing")] = False,
    attention: options.Attention = RoundConfig.attention,
    save_steps: Annotated[int, options.option(RoundConfig, "save_steps")] = RoundConfig.save_steps,
    report_to: Annotated[str, options.option(RoundConfig, "report_to")] = RoundConfig.report_to,
    fsdp: Annotated[bool, options.option(RoundConfig, "fsdp", "--fsdp")] = RoundConfig.fsdp,
    fsdp_config: Annotated[str | None, options.option(RoundConfig, "fsdp_config")] = None,
    deepspeed: Annotated[str | None, options.option(RoundConfig, "deepspeed")] = None,
    seed: Annotated[int, typer.Option(help="Seed of the order of rows.")] = 0,
    dtype: options.DType = ModelConfig.dtype,
    device: options.Device = ModelConfig.device,
    trust_remote_code: options.TrustRemoteCode = ModelConfig.trust_remote_code,
    json: options.Json = False,
) -> None:
    """Train on trajectories. Goes on at the last checkpoint, and then ends as an undisturbed run would.

    With --mode adapter the weights stay as they are, and what is trained is a gated adapter. With --peft it is one of
    peft's, and the text may change. On several GPUs: torchrun --nproc-per-node 8 -m jacobi_forcing train …
    """
    result = _perform(dict(locals()))
    print_result(result["model"], result, json=json)


def _peft(given: dict[str, Any]) -> PeftSettings:
    """Settings of peft's adapter, whose options have names of their own beside those of the gated one."""
    targets = given["peft_target"]
    values = {"method": given["peft"], **{name: given[f"peft_{name}"] for name in ("rank", "alpha", "merge")}}
    return PeftSettings.from_dict({**values, "targets": list(targets) if targets else None})


def _perform(given: dict[str, Any]) -> dict[str, Any]:
    from jacobi_forcing.cli.bars import Bars
    from jacobi_forcing.recipe.run import adapter_trainer, alone, refuse_foreign, trainer
    from jacobi_forcing.recipe.settings import check_mode, check_peft
    from jacobi_forcing.recipe.stages import Stage, model_inputs, perform, refuse_other_settings, train_inputs
    from jacobi_forcing.trajectories.store import TrajectoryReader

    trajectories, output, mode, seed = (given[name] for name in ("trajectories", "output", "mode", "seed"))
    reader = TrajectoryReader(trajectories)
    few = _peft(given)
    kind = "peft" if mode == "full" and few.method != "none" else mode
    rate = given["learning_rate"] or _RATES.get(kind, RoundConfig.learning_rate)
    # Both kinds of training call it "states"; each is given its own.
    states = given.pop("states")
    of_full, of_adapter = (
        {"states": states} if states is not None and (mode == "adapter") == is_adapter else {}
        for is_adapter in (False, True)
    )
    settings = options.settings(RoundConfig, given, block_size=reader.block_size, learning_rate=rate, **of_full)
    loading = options.settings(ModelConfig, given, name=given["model"])
    apart = options.settings(AdapterSettings, given, **of_adapter)
    check_mode(mode, [settings], apart)
    check_peft(few, mode, loading, [settings])
    shards = [entry["sha256"] for entry in reader.manifest["shards"]]
    inputs = {
        "model": model_inputs(loading),
        "trajectories": shards,
        **train_inputs(settings, seed, loading.dtype, few),
    }
    work = functools.partial(trainer(), loading, trajectories, settings, output, seed=seed, peft=few)
    if mode == "adapter":
        inputs["adapter"] = apart.to_dict()
        work = functools.partial(adapter_trainer(), loading, trajectories, settings, apart, output, seed=seed)
    stage = Stage("train", "train", 1, inputs)
    with alone(output), Bars() as bars:
        if is_main():
            refuse_foreign(output)
            refuse_other_settings(output, [stage], "use another --output")
        result = perform(output, stage, functools.partial(work, reporter=bars), bars, seed=seed)
    return {**result, "model": str(output / "model"), "block_size": reader.block_size}
