"""`jforce collect`: trajectories of one model on some prompts."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from jacobi_forcing.cli import options
from jacobi_forcing.cli.console import print_result
from jacobi_forcing.config import CollectConfig, ModelConfig, PromptsConfig
from jacobi_forcing.embedded import BUILTIN
from jacobi_forcing.errors import ConfigError


def collect(
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder for the shards and their manifest.")],
    prompts: options.Source,
    model: options.Model = BUILTIN,
    block_size: options.RoundBlockSize = 16,
    field: options.PromptField = PromptsConfig.field,
    subset: options.Subset = None,
    split: options.Split = PromptsConfig.split,
    template: options.Template = PromptsConfig.template,
    offset: options.Offset = 0,
    limit: options.Limit = None,
    prompts_seed: options.PromptSeed = 0,
    max_new_tokens: options.MaxNewTokens = CollectConfig.max_new_tokens,
    batch_size: options.CollectBatch = CollectConfig.batch_size,
    shard_size: options.ShardSize = CollectConfig.shard_size,
    draft_init: options.FirstState = CollectConfig.draft_init,
    seed: options.CollectSeed = CollectConfig.seed,
    dtype: options.DType = ModelConfig.dtype,
    device: options.Device = ModelConfig.device,
    trust_remote_code: options.TrustRemoteCode = ModelConfig.trust_remote_code,
    json: options.Json = False,
) -> None:
    """Collect Jacobi trajectories: greedy responses, and the states of their blocks. Goes on where it was stopped."""
    given = dict(locals())
    if block_size < 1:
        raise ConfigError("'block_size' is too small", seen=block_size, expected="at least 1")

    from jacobi_forcing.cli.bars import Bars
    from jacobi_forcing.recipe.collecting import collect_trajectories

    with Bars() as bars:
        bars.begin("collect", "Collect trajectories")
        result = collect_trajectories(
            options.settings(ModelConfig, given, name=model),
            options.settings(PromptsConfig, given, source=prompts, seed=prompts_seed),
            options.settings(CollectConfig, given),
            block_size=block_size,
            folder=output,
            reporter=bars,
        )
        bars.end("collect", result["summary"])
    figures = {**result, "output": str(output), "block_size": block_size, "model": model}
    print_result(str(output), figures, json=json)
