"""`jforce bench`: decoders, and models, against each other."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from jacobi_forcing import provenance
from jacobi_forcing.cli import options
from jacobi_forcing.cli.console import print_json
from jacobi_forcing.config import DecodeConfig, EvaluationConfig, ModelConfig, PromptsConfig
from jacobi_forcing.embedded import BUILTIN
from jacobi_forcing.files import write_json

DEFAULT_PROMPTS = 20


def bench(
    model: options.Model = BUILTIN,
    compare: Annotated[
        list[str] | None, typer.Option(help="A further model to measure, such as the trained one. Repeatable.")
    ] = None,
    prompts: options.Source = BUILTIN,
    field: options.PromptField = PromptsConfig.field,
    answer_field: options.AnswerField = None,
    subset: options.Subset = None,
    split: options.SplitOrTest = None,
    template: options.Template = PromptsConfig.template,
    offset: options.Offset = 0,
    limit: Annotated[int, options.option(PromptsConfig, "limit", "--limit", "-l")] = DEFAULT_PROMPTS,
    prompts_seed: options.PromptSeed = 1,
    task: options.TaskName = None,
    decoder: options.Decoders = None,
    block_size: options.BlockSizes = None,
    draft_init: options.DraftInit = DecodeConfig.draft_init,
    draft_seed: options.DraftSeed = DecodeConfig.draft_seed,
    max_new_tokens: options.MaxNewTokens = 256,
    dtype: options.DType = ModelConfig.dtype,
    device: options.Device = ModelConfig.device,
    trust_remote_code: options.TrustRemoteCode = ModelConfig.trust_remote_code,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Write the figures to this file too.")] = None,
    json: options.Json = False,
) -> None:
    """Measure decoders on the same weights and prompts, one row at a time: speed, exactness and quality together.

    --decoder and --block-size may be repeated; every decoder is measured at every size. The last line of standard
    output is a JSON object with all figures; with --json it is the only one.
    """
    given = dict(locals())
    builtin = prompts == BUILTIN
    source = options.settings(
        PromptsConfig, given, source=prompts, split=split or ("heldout" if builtin else "test"), seed=prompts_seed
    )
    asked = options.settings(
        EvaluationConfig,
        {"max_new_tokens": max_new_tokens},
        prompts=source,
        task=task or ("word_problems" if builtin else "none"),
        decode=[
            options.settings(DecodeConfig, given, decoder=name, block_size=n)
            for name in decoder or [DecodeConfig.decoder]
            for n in block_size or [DecodeConfig.block_size]
        ],
    )
    models = [options.settings(ModelConfig, given, name=name) for name in [model, *(compare or [])]]

    from jacobi_forcing.cli.tables import show_models

    results = _measure(models, asked)
    show_models(results, to_stderr=json)
    report = _report(results, source, draft_seed)
    if output is not None:
        write_json(output, report)
    print_json(report)


def _report(results: list[dict[str, Any]], source: PromptsConfig, seed: int) -> dict[str, Any]:
    from jacobi_forcing.bench.speed import SCHEMA_VERSION

    return {
        "version": SCHEMA_VERSION,
        "kind": "bench",
        "models": results,
        "prompts": source.to_dict(),
        "provenance": provenance.collect(seed=seed),
    }


def _measure(models: list[ModelConfig], asked: EvaluationConfig) -> list[dict[str, Any]]:
    """One model after the other; only one is in memory at a time."""
    from jacobi_forcing.backbone import Backbone
    from jacobi_forcing.bench.speed import bench as measure
    from jacobi_forcing.cli.bars import Bars
    from jacobi_forcing.loading import load
    from jacobi_forcing.trajectories.prompts import load_prompts

    results = []
    with Bars() as bars:
        for settings in models:
            bars.begin("bench", f"Measure {settings.name}")
            loaded = load(settings)
            context = Backbone(loaded.model).context_length
            found = load_prompts(asked.prompts, loaded.tokenizer, context_length=context)
            result = measure(
                loaded,
                found,
                decode=asked.decode,
                max_new_tokens=asked.max_new_tokens,
                task=asked.task,
                on_progress=lambda done, total: bars.progress(done, total, "prompts"),
            )
            results.append(result.to_dict())
            bars.end("bench", f"{settings.name}: {len(found)} prompts")
    return results
