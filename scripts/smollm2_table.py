"""One table for one domain: base, CLLM baseline, both rounds of Jacobi Forcing, adapter; speed beside quality.

    python scripts/smollm2_table.py smollm2-orders --base FOLDER
    python scripts/smollm2_table.py smollm2-gsm8k --base FOLDER --data test-a.jsonl

Models are looked for where the recipes leave them (`runs/RECIPE`, `runs/RECIPE-cllm`, `runs/RECIPE-adapter`); one that
is missing is left out, and a note says so. Each is measured in two parts. Quality: `--limit` answers by batched AR of
the model's own weights. Every decoder here is lossless, so these are its answers too; that it is exact is shown on the
prompts that are timed. An adapter's weights answer nothing: its quality is its base's. Speed: `jforce bench` on the
first `--speed-prompts` of the same prompts, `ar` and the library in the same run. A part that is done is kept in
`OUTPUT/stages/`, so a run that was killed goes on with the part it was at; other settings or weights measure anew. One
torch thread, unless `--threads` says otherwise. `table.md`, `table.json` and `bench.json` (for `jforce report` and
cards) are renewed after every part; the last line is JSON.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from jacobi_forcing import provenance
from jacobi_forcing.adapter_file import WEIGHTS
from jacobi_forcing.backbone import Backbone
from jacobi_forcing.bench import bench
from jacobi_forcing.bench.table import graded_parts, grid, notes
from jacobi_forcing.blocks import common_prefix
from jacobi_forcing.cli.bars import Bars
from jacobi_forcing.config import DecodeConfig, EvaluationConfig, ModelConfig
from jacobi_forcing.errors import guarded
from jacobi_forcing.evaluate.quality import answers, quality_of
from jacobi_forcing.files import write_json, write_text
from jacobi_forcing.formats import stamped
from jacobi_forcing.loading import Loaded, load
from jacobi_forcing.recipe.reporter import Reporter
from jacobi_forcing.recipe.settings import load_recipe
from jacobi_forcing.recipe.stages import Stage, model_inputs, perform, prompts_inputs
from jacobi_forcing.trajectories.prompts import Prompt, load_prompts

Form = Mapping[str, Any]
BASE, ADAPTER = "base", "adapter"
COLUMNS = ("model", "decoder", "n", "TPF", "TPS", "speed-up", "solved", "in parts", "repeats", "exact", "as the base")
LEGEND = (
    "TPF, TPS and speed-up: of the prompts that were timed one by one, prefill included; speed-up over ar of the same "
    "model in the same run, which has its own row: models were timed at different times and loads of the machine, so "
    "TPS of different models do not compare. solved (95 % interval), in parts, repeats: batched AR of the same "
    "weights. exact: timed answers that equal ar's of the same weights, token for token. as the base: answers that "
    "equal the base's; of new weights the batched ones, with the mean share of the base's tokens before the first "
    "that differs."
)
AIMS = {"orders": {"tokens_per_forward": 3.0, "speedup": 1.7}, "gsm8k": {"tokens_per_forward": 1.6}}
"""What is hoped for, by task: the best of what was trained."""


@dataclasses.dataclass(frozen=True)
class Entry:
    """A model of the table, and the decoders that it is measured with."""

    label: str
    model: ModelConfig
    decode: tuple[DecodeConfig, ...]

    @property
    def slug(self) -> str:
        """For file names."""
        return re.sub(r"[^a-z0-9]+", "-", self.label.lower()).strip("-")


def entries(base: ModelConfig, asked: argparse.Namespace) -> tuple[list[Entry], list[str]]:
    """The models that are there, the base first, and a note for each that is not."""
    everything = tuple(DecodeConfig(decoder=name, block_size=asked.block_sizes[0]) for name in asked.base_decoders)
    trained = tuple(
        DecodeConfig(decoder=name, block_size=size) for name in asked.decoders for size in asked.block_sizes
    )
    places = {
        "CLLM-style": asked.runs / f"{asked.recipe}-cllm" / "model",
        "round 1": asked.runs / asked.recipe / "round-1" / "model",
        "round 2": asked.runs / asked.recipe / "round-2" / "model",
        ADAPTER: asked.adapter or asked.runs / f"{asked.recipe}-adapter" / "model",
    }
    found, missing = [Entry(BASE, base, everything)], []
    for label, place in places.items():
        drafts = label == ADAPTER
        if not (place / (WEIGHTS if drafts else "config.json")).is_file():
            missing.append(f"{label} is left out: there is no model in {provenance.portable(str(place))}.")
            continue
        change: dict[str, Any] = {"adapter": str(place)} if drafts else {"name": str(place)}
        found.append(Entry(label, dataclasses.replace(base, **change), trained))
    return found, missing


def measure_quality(entry: Entry, settings: EvaluationConfig, reporter: Reporter) -> dict[str, Any]:
    """Answers by batched AR of a model's own weights: quality, and the ids."""
    loaded, prompts = opened(plain(entry), settings)
    backbone = Backbone(loaded.model)
    ids, _ = answers(
        backbone,
        prompts,
        max_new_tokens=settings.max_new_tokens,
        batch_size=settings.batch_size,
        on_progress=lambda done, total: reporter.progress(done, total, "answers"),
    )
    quality = quality_of(ids, prompts, loaded.tokenizer, backbone.eos_ids, settings.task).to_dict()
    return {"quality": quality, "ids": ids, "summary": f"{quality['solved']} of {quality['answers']} solved"}


def measure_speed(entry: Entry, settings: EvaluationConfig, reporter: Reporter) -> dict[str, Any]:
    """What `jforce bench` measures, and the ids of every timed answer."""
    loaded, prompts = opened(entry.model, settings)
    result = bench(
        loaded,
        prompts[: settings.speed_prompts],
        decode=entry.decode,
        max_new_tokens=settings.max_new_tokens,
        task=settings.task,
        label=entry.label,
        on_progress=lambda done, total: reporter.progress(done, total, "timed answers"),
    )
    ids = [[row for turn in one.turns for row in turn.ids] for one in result.decoders]
    best = max(result.decoders, key=lambda one: one.tokens_per_forward)
    form = {**result.to_dict(), "model": provenance.portable(entry.model.name)}
    return {"result": form, "ids": ids, "summary": f"TPF {best.tokens_per_forward:.2f}, {best.speedup:.2f}×"}


def plain(entry: Entry) -> ModelConfig:
    """What answers: the model without its adapter."""
    return dataclasses.replace(entry.model, adapter=None)


def opened(model: ModelConfig, settings: EvaluationConfig) -> tuple[Loaded, list[Prompt]]:
    """The model and the prompts."""
    loaded = load(model)
    context = Backbone(loaded.model).context_length
    return loaded, load_prompts(settings.prompts, loaded.tokenizer, context_length=context)


def parts_of(entry: Entry, settings: EvaluationConfig) -> tuple[Stage, Stage]:
    """The two parts of a model's measurement, and what decides them. An adapter's quality is its base's part."""
    prompts = prompts_inputs(settings.prompts)
    shared = {"prompts": prompts, "task": settings.task, "max_new_tokens": settings.max_new_tokens}
    graded = {"model": model_inputs(plain(entry)), **shared, "batch_size": settings.batch_size}
    timed = {
        "model": model_inputs(entry.model),
        **shared,
        "decode": [one.to_dict() for one in entry.decode],
        "speed_prompts": settings.speed_prompts,
        "threads": torch.get_num_threads(),
    }
    answering = BASE if entry.label == ADAPTER else entry.slug
    return Stage(f"quality-{answering}", "evaluate", 0, graded), Stage(f"speed-{entry.slug}", "evaluate", 0, timed)


def agreement(ids: Sequence[Sequence[int]], base: Sequence[Sequence[int]]) -> dict[str, Any]:
    """How many answers are the base's, and the mean share of the base's tokens before the first that differs."""
    pairs = [(list(mine), list(other)) for mine, other in zip(ids, base, strict=True)]
    shared = [common_prefix(mine, other) / len(other) for mine, other in pairs]
    return {"equal": sum(mine == other for mine, other in pairs), "of": len(pairs), "prefix": sum(shared) / len(pairs)}


def figures(label: str, quality: Form, speed: Form, base: Form) -> list[dict[str, Any]]:
    """The rows of a model out of its parts and the base's: `ar` and what drafts."""
    found, decoders = [], speed["result"]["decoders"]
    new_weights = label not in (BASE, ADAPTER)
    place = [one["decoder"] for one in base["speed"]["result"]["decoders"]].index("ar")
    timed = base["speed"]["ids"][place]
    for one, ids in zip(decoders, speed["ids"], strict=True):
        if one["decoder"] == "library":
            continue
        same = agreement(quality["ids"], base["quality"]["ids"]) if new_weights else agreement(ids, timed)
        names = ("decoder", "block_size", "tokens_per_forward", "tokens_per_second", "speedup", "median_speedup")
        kept = {name: one[name] for name in (*names, "exact", "of", "faults", "cost_ratio", "draft_accuracy")}
        found.append({"model": label, **kept, "quality": quality["quality"], "as_base": same})
    return found


def cells(row: Form) -> tuple[str, ...]:
    """One row of the table."""
    quality, same = row["quality"], row["as_base"]
    solved, interval = quality["solve_rate"], quality["solve_rate_interval"]
    share = "–" if solved is None else f"{100 * solved:.1f} % of {quality['answers']}"
    share += f" ({100 * interval[0]:.1f} to {100 * interval[1]:.1f})" if interval else ""
    differs = same["equal"] < same["of"]
    return (
        row["model"],
        row["decoder"],
        str(row["block_size"] or "–"),
        f"{row['tokens_per_forward']:.2f}",
        f"{row['tokens_per_second']:.1f}",
        f"{row['speedup']:.2f}×",
        share,
        graded_parts(quality) or "–",
        f"{100 * quality['repetition_rate']:.1f} %",
        f"{row['exact']}/{row['of']}",
        f"{same['equal']}/{same['of']}" + (f" ({100 * same['prefix']:.0f} %)" if differs else ""),
    )


def verdicts(rows: Sequence[Form], task: str) -> list[str]:
    """Whether the aims were reached, whether quality held, and what limits the best: its guesses by distance."""
    trained = [row for row in rows if row["model"] != BASE and row["decoder"] != "ar"]
    if not trained:
        return ["Nothing that was trained was measured, so nothing can be said about the aims."]
    said = []
    for key, aim in AIMS.get(task, {}).items():
        best = max(trained, key=lambda row: float(row[key]))
        state = "reached" if best[key] >= aim else "missed"
        alone = [row for row in rows if row["model"] == BASE and row["decoder"] == best["decoder"]]
        beside = f"; the base alone has {alone[0][key]:.2f} with it" if alone else ""
        said.append(
            f"Aim of {key.replace('_', ' ')} {aim:g}: {state}, {best[key]:.2f} at best ({_name(best)}, "
            f"TPF {best['tokens_per_forward']:.2f}, {best['speedup']:.2f}×{beside})."
        )
    interval = rows[0]["quality"]["solve_rate_interval"]
    for label in dict.fromkeys(row["model"] for row in trained):
        rate = next(row for row in trained if row["model"] == label)["quality"]["solve_rate"]
        if interval is not None and rate is not None:
            held = "not below" if rate >= interval[0] else "BELOW"
            ends = " to ".join(f"{100 * end:.1f}" for end in interval)
            said.append(f"{label}: {100 * rate:.1f} % solved, {held} the base's interval ({ends} %).")
    for label in dict.fromkeys(row["model"] for row in trained):
        best = max((row for row in trained if row["model"] == label), key=lambda row: float(row["speedup"]))
        shown = ", ".join(f"{100 * share:.0f}" for share in best["draft_accuracy"][:8])
        said.append(f"{_name(best)}, the fastest of its model: right guesses at distances 1, 2, …: {shown} %.")
    return said


def _name(row: Form) -> str:
    return f"{row['model']}, {row['decoder']} n={row['block_size']}"


def settings_of(asked: argparse.Namespace) -> tuple[ModelConfig, EvaluationConfig]:
    """The base and how the recipe measures, with the numbers that this table asks for."""
    overrides = [f"evaluation.prompts.limit={asked.limit}", f"evaluation.speed_prompts={asked.speed_prompts}"]
    overrides += [f"model.name={asked.base}"] if asked.base else []
    overrides += [f"evaluation.prompts.source={asked.data}"] if asked.data else []
    recipe = load_recipe(asked.recipe, [*overrides, *asked.set])
    assert recipe.evaluation is not None
    return recipe.model, recipe.evaluation


def make(asked: argparse.Namespace, reporter: Reporter) -> dict[str, Any]:
    """Measure what is not measured yet, and write the table after every model."""
    base, settings = settings_of(asked)
    found, missing = entries(base, asked)
    results: list[dict[str, Any]] = []
    table: dict[str, Any] = {}
    for entry in found:
        first, second = parts_of(entry, settings)
        quality = perform(asked.output, first, partial(measure_quality, entry, settings, reporter), reporter)
        speed = perform(asked.output, second, partial(measure_speed, entry, settings, reporter), reporter)
        results.append({"label": entry.label, "quality": quality, "speed": speed})
        table = written(asked, settings, results, missing)
    return table


def written(
    asked: argparse.Namespace, settings: EvaluationConfig, results: Sequence[Form], missing: Sequence[str]
) -> dict[str, Any]:
    """The table of what is there, in its three files."""
    rows = [row for one in results for row in figures(one["label"], one["quality"], one["speed"], results[0])]
    models = [{**one["speed"]["result"], "quality": one["quality"]["quality"]} for one in results]
    said = [*verdicts(rows, settings.task), *missing, *notes(models)]
    record = provenance.collect(seed=settings.prompts.seed)
    source = {**settings.prompts.to_dict(), "source": provenance.portable(settings.prompts.source)}
    table = {"kind": "smollm2-table", "recipe": asked.recipe, "rows": rows, "notes": said, "provenance": record}
    write_json(asked.output / "table.json", table)
    text = grid(COLUMNS, [cells(row) for row in rows]) + f"\n{LEGEND}\n\n" + "".join(f"- {note}\n" for note in said)
    write_text(asked.output / "table.md", text)
    result = stamped("bench", {"models": models, "prompts": source, "provenance": record})
    write_json(asked.output / "bench.json", result)
    return table


def arguments() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("recipe", help="smollm2-orders or smollm2-gsm8k")
    parser.add_argument("--base", help="folder or hub name of the base; by default the recipe's")
    parser.add_argument("--data", help="file of held-out prompts; by default the recipe's")
    parser.add_argument("--runs", type=Path, default=Path("runs"), help="where the recipes' outputs lie")
    parser.add_argument("--adapter", type=Path, help="folder of the adapter, such as models/NAME")
    parser.add_argument("--limit", type=int, default=200, help="prompts that are graded")
    parser.add_argument("--speed-prompts", type=int, default=24, help="the first of them, which are timed")
    parser.add_argument("--block-sizes", type=int, nargs="+", default=[16], help="n; of the base's decoders the first")
    parser.add_argument("--base-decoders", nargs="+", default=["jacobi", "window", "recycle", "multiblock"])
    parser.add_argument("--decoders", nargs="+", default=["window", "recycle"], help="of what was trained")
    parser.add_argument("--threads", type=int, default=1, help="of torch")
    parser.add_argument("--set", action="append", default=[], help="key.path=value of the recipe")
    parser.add_argument("--output", type=Path, help="by default RUNS/RECIPE-table")
    return parser


def main() -> None:
    """Make the table; the last line is JSON."""
    asked = arguments().parse_args()
    asked.output = asked.output or asked.runs / f"{asked.recipe}-table"
    torch.set_num_threads(asked.threads)
    with Bars() as bars:
        table = make(asked, bars)
    print((asked.output / "table.md").read_text(encoding="utf-8"), json.dumps(table), sep="\n")


if __name__ == "__main__":
    sys.exit(guarded(main))
