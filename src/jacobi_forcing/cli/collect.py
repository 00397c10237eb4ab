"""`jforce collect`: trajectories of one model on some prompts."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from jacobi_forcing.cli import options
from jacobi_forcing.cli.console import print_result
from jacobi_forcing.config import CollectConfig, ModelConfig, PromptsConfig, RoundConfig
from jacobi_forcing.embedded import BUILTIN
from jacobi_forcing.errors import ConfigError

States = Annotated[
    bool, typer.Option(help="Sweep the blocks; without, responses alone: enough for adapters and for on_policy.")
]
NeededOnly = Annotated[bool, options.option(CollectConfig, "needed_only", "--needed-only/--all-states")]


Prompts = Annotated[
    str | None, options.option(PromptsConfig, "source", "--prompts", "-p", show_default="the file of --responses")
]
Filters = Annotated[
    list[str] | None, options.option(CollectConfig, "filters", "--filter", show_default="all answers are kept")
]


def _schedule(field: str, *names: str) -> Any:
    """An option that only --needed-only reads."""
    return options.option(
        RoundConfig, field, *names, rich_help_panel="Schedule of the training to come, for --needed-only"
    )


def collect(
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder for the shards and their manifest.")],
    prompts: Prompts = None,
    model: options.Model = BUILTIN,
    block_size: options.RoundBlockSize = 16,
    field: options.PromptField = PromptsConfig.field,
    subset: options.Subset = None,
    split: options.Split = PromptsConfig.split,
    template: options.Template = PromptsConfig.template,
    answer_field: options.AnswerField = None,
    offset: options.Offset = 0,
    limit: options.Limit = None,
    prompts_seed: options.PromptSeed = 0,
    max_new_tokens: options.MaxNewTokens = CollectConfig.max_new_tokens,
    batch_size: options.CollectBatch = CollectConfig.batch_size,
    shard_size: options.ShardSize = CollectConfig.shard_size,
    draft_init: options.FirstState = CollectConfig.draft_init,
    seed: options.CollectSeed = CollectConfig.seed,
    responses: Annotated[str | None, options.option(CollectConfig, "responses")] = None,
    responses_check: Annotated[int, options.option(CollectConfig, "responses_check")] = CollectConfig.responses_check,
    filters: Filters = None,
    filter_task: Annotated[str, options.option(CollectConfig, "filter_task")] = CollectConfig.filter_task,
    executor: Annotated[str, options.option(CollectConfig, "executor")] = CollectConfig.executor,
    workers: Annotated[int, options.option(CollectConfig, "workers")] = CollectConfig.workers,
    worker_gpus: Annotated[float, options.option(CollectConfig, "worker_gpus")] = CollectConfig.worker_gpus,
    states: States = True,
    needed_only: NeededOnly = CollectConfig.needed_only,
    window_size: Annotated[int, _schedule("window_size", "--window-size", "-w")] = RoundConfig.window_size,
    schedule: Annotated[str, _schedule("schedule")] = RoundConfig.schedule,
    t_min: Annotated[float, _schedule("t_min")] = RoundConfig.t_min,
    t_max: Annotated[float, _schedule("t_max")] = RoundConfig.t_max,
    schedule_phase: Annotated[str, _schedule("schedule_phase")] = RoundConfig.schedule_phase,
    dtype: options.DType = ModelConfig.dtype,
    device: options.Device = ModelConfig.device,
    pack_weights: options.PackWeights = ModelConfig.pack_weights,
    trust_remote_code: options.TrustRemoteCode = ModelConfig.trust_remote_code,
    json: options.Json = False,
) -> None:
    """Collect Jacobi trajectories: greedy responses, and the states of their blocks. Goes on where it was stopped.

    On several GPUs: torchrun --nproc-per-node 8 -m jacobi_forcing collect …, or --executor ray --workers 8.
    """
    result = _perform(dict(locals()))
    print_result(str(output), result, json=json)


def _perform(arguments: dict[str, Any]) -> dict[str, Any]:
    from jacobi_forcing.cli.bars import Bars
    from jacobi_forcing.recipe.collecting import collect_trajectories
    from jacobi_forcing.recipe.settings import round_noise

    given = {name: value for name, value in arguments.items() if name != "states"}
    output, model, block_size = given["output"], given["model"], given["block_size"]
    if block_size < 1:
        raise ConfigError("'block_size' is too small", seen=block_size, expected="at least 1")
    source = given["prompts"] or given["responses"]
    if source is None:
        raise ConfigError("There are no prompts", remedy="name them with --prompts, or a file with --responses")
    with Bars() as bars:
        bars.begin("collect", "Collect trajectories")
        result = collect_trajectories(
            options.settings(ModelConfig, given, name=model),
            options.settings(PromptsConfig, given, source=source, seed=given["prompts_seed"]),
            options.settings(CollectConfig, given, filters=given["filters"] or None),
            block_size=block_size,
            folder=output,
            reporter=bars,
            states=arguments["states"],
            needed=round_noise(options.settings(RoundConfig, given, steps=1)),
        )
        bars.end("collect", result["summary"])
    return {**result, "output": str(output), "block_size": block_size, "model": model}
