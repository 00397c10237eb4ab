"""`jforce tune`: the fastest settings for a model on this device."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from jacobi_forcing import provenance
from jacobi_forcing.cli import options
from jacobi_forcing.cli.console import note, print_report, print_table, print_text
from jacobi_forcing.config import DecodeConfig, EvaluationConfig, ModelConfig, PromptsConfig
from jacobi_forcing.embedded import BUILTIN, BUILTIN_TASKS
from jacobi_forcing.errors import ConfigError
from jacobi_forcing.files import remove, write_json
from jacobi_forcing.formats import stamped

JOURNAL, RESULT = "calls.jsonl", "tune.json"
DEFAULT_PROMPTS = 16
GRID = {
    "decoder": "window, recycle, multiblock",
    "block_size": "8, 16, 32, 64",
    "candidates": "0, 1, 2, 4, 8",
    "num_blocks": "2",
    "spawn_ratio": "0, 0.85",
}


def _several(field: str, *names: str) -> Any:
    return options.option(DecodeConfig, field, *names, show_default=GRID[field])


Decoders = Annotated[list[str] | None, _several("decoder", "--decoder", "-d")]
BlockSizes = Annotated[list[int] | None, _several("block_size", "--block-size", "-n")]
Candidates = Annotated[list[int] | None, _several("candidates")]
BlockCounts = Annotated[list[int] | None, _several("num_blocks")]
SpawnRatios = Annotated[list[float] | None, _several("spawn_ratio")]
Prompts = Annotated[int, options.option(PromptsConfig, "limit", "--limit", "-l")]
BatchSize = Annotated[int, typer.Option("--batch-size", "-b", min=1, help="Prompts decoded side by side.")]
Repeats = Annotated[
    int, typer.Option(min=1, help="Timed runs of a setting on a batch; of the finalists only, without --full.")
]
Full = Annotated[bool, typer.Option("--full", help="Measure every setting on every prompt, not the better ones only.")]
CompareShort = Annotated[
    bool,
    typer.Option(
        "--compare-short", help="With --full: also search in few runs, and tell how near it comes to the best."
    ),
]
Write = Annotated[
    bool,
    typer.Option(
        "--write",
        help="Write the best setting into the generation config in the model's folder, or beside the adapter.",
    ),
]
Folder = Annotated[Path, typer.Option("--output", "-o", help="Folder of the result; a search that was killed goes on.")]
Fresh = Annotated[bool, typer.Option("--fresh", help="Start anew, whatever the folder holds.")]
Figure = Annotated[Path | None, typer.Option(help="Draw curves and contours into this .png or .svg file.")]

LEGEND = (
    "TPS: speed-up over ar on the same runs, times ar's TPS over all prompts; settings that were dropped early have "
    "seen fewer prompts. TPF: tokens per forward. exact: answers equal to ar's token for token; a setting at fault is "
    "never recommended."
)


def tune(
    model: options.Model = BUILTIN,
    adapter: options.Adapter = ModelConfig.adapter,
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
    decoder: Decoders = None,
    block_size: BlockSizes = None,
    candidates: Candidates = None,
    num_blocks: BlockCounts = None,
    spawn_ratio: SpawnRatios = None,
    batch_size: BatchSize = 1,
    max_new_tokens: options.MaxNewTokens = 256,
    repeats: Repeats = 3,
    full: Full = False,
    compare_short: CompareShort = False,
    write: Write = False,
    output: Folder = Path("runs/tune"),
    fresh: Fresh = False,
    figure: Figure = None,
    dtype: options.DType = ModelConfig.dtype,
    device: options.Device = ModelConfig.device,
    pack_weights: options.PackWeights = ModelConfig.pack_weights,
    trust_remote_code: options.TrustRemoteCode = ModelConfig.trust_remote_code,
    json: options.Json = False,
) -> None:
    """Find the settings with which this model decodes fastest on this device.

    By default in few runs: all settings on few prompts, the better half on more. Where standard output is no
    terminal, its last line is a JSON object with all figures; with --json it is the only one.
    """
    given = dict(locals())
    settings = options.settings(ModelConfig, given, name=model)
    asked = _asked(given)
    _check(given)
    if fresh:
        for name in (JOURNAL, RESULT):
            remove(output / name)
    report = stamped("tune", {**_measure(settings, asked, given), "provenance": provenance.collect()})
    write_json(output / RESULT, report)
    _show(report, to_stderr=json)
    if figure is not None:
        from jacobi_forcing.viz.figures_tune import draw_tune

        draw_tune(report, figure)
        note(f"figure: {figure}")
    if write:
        _write(model, adapter, report["best"]["settings"])
    print_report(report, json=json)


def _asked(given: Mapping[str, Any]) -> EvaluationConfig:
    builtin = given["prompts"] in BUILTIN_TASKS
    source = options.settings(
        PromptsConfig,
        given,
        source=given["prompts"],
        split=given["split"] or ("heldout" if builtin else "test"),
        seed=given["prompts_seed"],
    )
    return options.settings(
        EvaluationConfig,
        {"max_new_tokens": given["max_new_tokens"]},
        prompts=source,
        task=given["task"] or BUILTIN_TASKS.get(given["prompts"], "none"),
    )


def _check(given: Mapping[str, Any]) -> None:
    """What can be told before anything is loaded."""
    if given["compare_short"] and not given["full"]:
        raise ConfigError("--compare-short holds the short search against the full grid", remedy="add --full")
    if given["write"] and given["adapter"] is None and not Path(given["model"]).expanduser().is_dir():
        raise ConfigError("--write needs a model in a folder", seen=given["model"], remedy="save the model first")
    if given["figure"] is not None:
        from jacobi_forcing.viz.canvas import check_figure

        check_figure(given["figure"])


def _measure(settings: ModelConfig, asked: EvaluationConfig, given: Mapping[str, Any]) -> dict[str, Any]:
    from jacobi_forcing.backbone import Backbone
    from jacobi_forcing.bench.tune import Grid, Search
    from jacobi_forcing.bench.tune import tune as search
    from jacobi_forcing.cli.bars import Bars
    from jacobi_forcing.loading import load
    from jacobi_forcing.trajectories.prompts import check_source, load_prompts

    axes = {"decoders": "decoder", "block_sizes": "block_size", "candidates": "candidates"}
    axes |= {"num_blocks": "num_blocks", "spawn_ratios": "spawn_ratio"}
    grid = Grid(**{axis: given[name] for axis, name in axes.items() if given[name]})
    grid.settings()  # a wrong one is refused before the model is loaded
    check_source(asked.prompts)
    source = {**asked.prompts.to_dict(), "source": provenance.portable(asked.prompts.source)}
    with Bars() as bars:
        bars.begin("tune", f"Tune {settings.name}")
        loaded = load(settings)
        found = load_prompts(asked.prompts, loaded.tokenizer, context_length=Backbone(loaded.model).context_length)
        result = search(
            loaded,
            found,
            grid=grid,
            how=Search(given["full"], given["compare_short"], given["repeats"]),
            max_new_tokens=asked.max_new_tokens,
            batch_size=given["batch_size"],
            task=asked.task,
            label=options.label(settings),
            journal=given["output"] / JOURNAL,
            head={
                "model": {
                    **settings.to_dict(),
                    "name": options.label(settings),
                    "adapter": settings.adapter is not None,
                },
                "fingerprint": provenance.model_fingerprint(loaded.model),
                "source": source,
            },
            on_progress=lambda done, total: bars.progress(done, total, "runs"),
        )
        bars.end("tune", f"{len(result['settings'])} settings, {sum(result['runs'].values())} runs")
    return {**result, "model": provenance.portable(settings.name), "source": source}


def _show(report: Mapping[str, Any], *, to_stderr: bool) -> None:
    heads = ("decoder", "n", "candidates", "K", "r", "prompts", "TPF", "TPS", "speed-up", "exact")
    ranked = sorted(report["settings"], key=lambda one: -one["tokens_per_second"])
    print_table(heads, [_row(one) for one in ranked], to_stderr=to_stderr)
    for text in _sentences(report):
        print_text(text, to_stderr=to_stderr)
    quality = report["quality"]
    solved = "" if quality["solve_rate"] is None else f"{100 * quality['solve_rate']:.1f} % solved, "
    note(f"ar's answers, which all others equal: {solved}{100 * quality['repetition_rate']:.1f} % end in a loop.")
    note(LEGEND)


def _row(one: Mapping[str, Any]) -> tuple[str, ...]:
    wrong = f", near ties {one['near_ties']}, faults {one['faults']}" if one["near_ties"] or one["faults"] else ""
    config, name = one["settings"], one["decoder"]
    return (
        name,
        "–" if name == "ar" else str(config["block_size"]),
        str(config["candidates"]) if name in ("recycle", "multiblock") else "–",
        str(config["num_blocks"]) if name == "multiblock" else "–",
        f"{config['spawn_ratio']:g}" if name == "multiblock" else "–",
        str(one["of"]),
        f"{one['tokens_per_forward']:.2f}",
        f"{one['tokens_per_second']:.1f}",
        f"{one['speedup']:.2f}×",
        f"{one['exact']}/{one['of']}{wrong}",
    )


def _sentences(report: Mapping[str, Any]) -> list[str]:
    best, said = report["best"], []
    for surface in report["surfaces"]:
        top = surface["optimum"]
        more = f" K={surface['num_blocks']} r={surface['spawn_ratio']:g}" if "num_blocks" in surface else ""
        said.append(
            f"surface of {surface['decoder']}{more}: optimum near n={top['block_size']:.0f}, "
            f"{top['candidates']:.1f} candidates, {top['tokens_per_second']:.0f} TPS "
            f"(R² {surface['fit']:.2f} over {surface['points']} settings)."
        )
    if best["decoder"] == "ar":
        said.append("nothing is faster than ar here: take ar, or train more.")
    else:
        said.append(f"best: {_name(best)}, {best['tokens_per_second']:.0f} TPS, {best['speedup']:.2f}× ar.")
    compared = report["comparison"]
    if compared is not None:
        picked = report["settings"][compared["picked"]]
        runs = f"{report['runs']['short']} runs instead of {report['runs']['full']}"
        said.append(
            f"the short search ({runs}) takes {_name(picked)}: "
            f"{100 * compared['ratio']:.1f} % of the best TPS, both by the full grid's runs."
        )
    return said


def _name(one: Mapping[str, Any]) -> str:
    """All that tells a setting from others, defaults too."""
    heads, cells = ("n=", "candidates=", "K=", "r="), _row(one)[1:5]
    told = ", ".join(head + cell for head, cell in zip(heads, cells, strict=True) if cell != "–")
    return f"{one['decoder']} {told}".strip()


def _write(folder: str, adapter: str | None, settings: Mapping[str, Any]) -> None:
    """Where `generate` looks where it is told no settings: an adapter keeps its own, its base stays as it is."""
    if adapter is not None:
        from jacobi_forcing import entry

        entry.write_for_adapter(Path(adapter), dict(settings))
        note(f"written into {Path(adapter) / entry.FOLDER / entry.DECODE}: decoding with the adapter goes by it")
        return
    from jacobi_forcing.decode.saved import save_custom_generate

    place = Path(folder).expanduser()
    save_custom_generate(place, DecodeConfig.from_dict(settings))
    note(f"written into {place / 'generation_config.json'}: generate() goes by it where it is told nothing else")
