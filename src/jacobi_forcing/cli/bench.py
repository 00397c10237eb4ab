"""`jforce bench`: decoders, and models, against each other."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from jacobi_forcing import provenance
from jacobi_forcing.cli import options
from jacobi_forcing.cli.console import print_report
from jacobi_forcing.config import DecodeConfig, EvaluationConfig, ModelConfig, PromptsConfig
from jacobi_forcing.embedded import BUILTIN, BUILTIN_TASKS
from jacobi_forcing.errors import ConfigError
from jacobi_forcing.files import write_json
from jacobi_forcing.formats import stamped

DEFAULT_PROMPTS = 20
RIVALS = ("prompt-lookup", "assisted")

Compare = Annotated[
    list[str] | None, typer.Option(help="A further model to measure, such as the trained one. Repeatable.")
]
Adapters = Annotated[
    list[str] | None,
    typer.Option(help="Folder of a gated adapter of --model; both together are measured beside it. Repeatable."),
]
Prompts = Annotated[int, options.option(PromptsConfig, "limit", "--limit", "-l")]
Rivals = Annotated[
    list[str] | None,
    typer.Option(
        help=f"A decoder of the library to measure too: {', '.join(RIVALS)}. One row at a time. Repeatable.",
        show_default="none; its greedy generate is always measured",
    ),
]
Assistant = Annotated[
    str | None, typer.Option(help="Model that drafts for the rival assisted: folder or hub name, same tokenizer.")
]
LookupTokens = Annotated[int, typer.Option(min=1, help="Longest draft of the rival prompt-lookup, tokens.")]
BatchSizes = Annotated[
    list[int] | None,
    typer.Option(
        "--batch-size",
        "-b",
        min=1,
        help="Prompts decoded side by side, by ar and the library too. Repeatable.",
        show_default="1",
    ),
]
WithOverhead = Annotated[
    bool, typer.Option("--overhead", help="Also measure what the decoding loop costs beside the bare forwards.")
]
Details = Annotated[
    bool,
    typer.Option(
        "--details", help="Also show latencies, accepted lengths, right guesses by distance, lines won, and strata."
    ),
]
Output = Annotated[Path | None, typer.Option("--output", "-o", help="Write the figures to this file too.")]


def bench(
    model: options.Model = BUILTIN,
    compare: Compare = None,
    adapter: Adapters = None,
    prompts: options.Source = BUILTIN,
    field: options.PromptField = PromptsConfig.field,
    answer_field: options.AnswerField = None,
    subset: options.Subset = None,
    split: options.SplitOrTest = None,
    template: options.Template = PromptsConfig.template,
    offset: options.Offset = 0,
    limit: Prompts = DEFAULT_PROMPTS,
    prompts_seed: options.PromptSeed = 1,
    task: options.TaskName = None,
    decoder: options.Decoders = None,
    block_size: options.BlockSizes = None,
    candidates: options.CandidateCounts = None,
    num_blocks: options.BlockCounts = None,
    spawn_ratio: options.SpawnRatios = None,
    prompt_ngrams: options.PromptNgrams = DecodeConfig.prompt_ngrams,
    draft_init: options.DraftInits = None,
    draft_seed: options.DraftSeed = DecodeConfig.draft_seed,
    static_shapes: options.StaticShapes = DecodeConfig.static_shapes,
    rival: Rivals = None,
    assistant: Assistant = None,
    lookup_tokens: LookupTokens = 10,
    batch_size: BatchSizes = None,
    max_new_tokens: options.MaxNewTokens = 256,
    dtype: options.DType = ModelConfig.dtype,
    device: options.Device = ModelConfig.device,
    pack_weights: options.PackWeights = ModelConfig.pack_weights,
    trust_remote_code: options.TrustRemoteCode = ModelConfig.trust_remote_code,
    overhead: WithOverhead = False,
    details: Details = False,
    output: Output = None,
    json: options.Json = False,
) -> None:
    """Measure decoders on the same weights and prompts: speed, exactness and quality together.

    --decoder, --block-size and the decoders' other settings that take a value may be repeated; every combination is
    measured. Where standard output is no terminal, its last line is a JSON object with all figures;
    with --json it is the only one.
    """
    plan = _plan(dict(locals()))

    from jacobi_forcing.cli.tables import show_models

    results = _measure(plan)
    show_models(results, to_stderr=json, details=details)
    report = _report(results, plan.asked.prompts, draft_seed)
    if output is not None:
        write_json(output, report)
    print_report(report, json=json)


@dataclasses.dataclass(frozen=True)
class _Plan:
    """What is to be measured, checked before anything is loaded."""

    models: list[ModelConfig]
    asked: EvaluationConfig
    rivals: list[str]
    assistant: ModelConfig | None
    lookup_tokens: int
    batch_sizes: list[int]
    overhead: bool


_SWEPT = ("block_size", "candidates", "num_blocks", "spawn_ratio", "draft_init")
"""Settings of decoders of which several values may be given."""


def _plan(given: Mapping[str, Any]) -> _Plan:
    """Turn a call's arguments into settings.

    Raises:
        ConfigError: One is wrong.
    """
    source = options.settings(
        PromptsConfig,
        given,
        source=given["prompts"],
        split=given["split"] or ("heldout" if given["prompts"] in BUILTIN_TASKS else "test"),
        seed=given["prompts_seed"],
    )
    choices = [given[name] or [getattr(DecodeConfig, name)] for name in ("decoder", *_SWEPT)]
    asked = options.settings(
        EvaluationConfig,
        {"max_new_tokens": given["max_new_tokens"]},
        prompts=source,
        task=given["task"] or BUILTIN_TASKS.get(given["prompts"], "none"),
        decode=[
            options.settings(DecodeConfig, given, **dict(zip(("decoder", *_SWEPT), values, strict=True)))
            for values in itertools.product(*choices)
        ],
    )
    helper = given["assistant"]
    return _Plan(
        models=_models(given),
        asked=asked,
        rivals=_rivals(given["rival"] or [], helper),
        assistant=None if helper is None else options.settings(ModelConfig, given, name=helper),
        lookup_tokens=given["lookup_tokens"],
        batch_sizes=given["batch_size"] or [1],
        overhead=given["overhead"],
    )


def _models(given: Mapping[str, Any]) -> list[ModelConfig]:
    """The model, those to compare with it, and the model with each of its adapters."""
    plain = [(name, None) for name in [given["model"], *(given["compare"] or [])]]
    adapted = [(given["model"], folder) for folder in given["adapter"] or []]
    return [options.settings(ModelConfig, given, name=name, adapter=folder) for name, folder in [*plain, *adapted]]


def _rivals(names: list[str], assistant: str | None) -> list[str]:
    for name in names:
        if name not in RIVALS:
            raise ConfigError(f"There is no rival '{name}'", expected="one of " + ", ".join(RIVALS))
    if "assisted" in names and assistant is None:
        raise ConfigError("The rival 'assisted' needs a model that drafts", remedy="name one with --assistant")
    if "assisted" not in names and assistant is not None:
        raise ConfigError("An assistant drafts for the rival 'assisted' only", remedy="add --rival assisted")
    return list(dict.fromkeys(names))


def _report(results: list[dict[str, Any]], source: PromptsConfig, seed: int) -> dict[str, Any]:
    return stamped(
        "bench",
        {
            "models": results,
            "prompts": {**source.to_dict(), "source": provenance.portable(source.source)},
            "provenance": provenance.collect(seed=seed),
        },
    )


def _measure(plan: _Plan) -> list[dict[str, Any]]:
    """One model after the other; only one, and the assistant, are in memory at a time."""
    from jacobi_forcing.adapter_file import read_adapter
    from jacobi_forcing.backbone import Backbone
    from jacobi_forcing.bench import assisted, prompt_lookup
    from jacobi_forcing.bench import bench as measure
    from jacobi_forcing.cli.bars import Bars
    from jacobi_forcing.loading import load
    from jacobi_forcing.trajectories.prompts import check_source, load_prompts

    check_source(plan.asked.prompts)
    for settings in plan.models:
        if settings.adapter is not None:
            read_adapter(settings.adapter)  # a name that is wrong shows before the base is measured, not behind it
    results, base = [], None
    with Bars() as bars:
        helper = load(plan.assistant) if plan.assistant is not None else None
        for settings in plan.models:
            name = options.label(settings)
            bars.begin("bench", f"Measure {name}")
            loaded = load(settings)
            rivals = [
                assisted(loaded, helper)
                if name == "assisted" and helper is not None
                else prompt_lookup(plan.lookup_tokens)
                for name in plan.rivals
            ]
            context = Backbone(loaded.model).context_length
            found = load_prompts(plan.asked.prompts, loaded.tokenizer, context_length=context)
            result = measure(
                loaded,
                found,
                decode=plan.asked.decode,
                max_new_tokens=plan.asked.max_new_tokens,
                task=plan.asked.task,
                rivals=rivals,
                batch_sizes=plan.batch_sizes,
                overhead=plan.overhead,
                base=base,
                label=name,
                on_progress=lambda done, total: bars.progress(done, total, "prompts"),
            )
            base = base or result.traits
            results.append({**result.to_dict(), "model": provenance.portable(settings.name)})
            bars.end("bench", f"{name}: {len(found)} prompts")
    return results
