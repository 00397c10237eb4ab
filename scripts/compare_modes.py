"""Both modes with the same core-seconds on the embedded base: tokens per forward, solve rate, agreement with the base.

    python scripts/compare_modes.py --core-seconds 150 --seeds 0 1 2

The core-seconds count collecting and training; a few steps measured first tell how many are affordable. One round at
one block size, settings those of the shipped recipes. A run that was stopped goes on where it was. The last line is
JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch

from jacobi_forcing import provenance
from jacobi_forcing.backbone import Backbone
from jacobi_forcing.config import DecodeConfig, ModelConfig, RecipeConfig
from jacobi_forcing.errors import guarded
from jacobi_forcing.evaluate.quality import answers, quality_of
from jacobi_forcing.files import read_json, write_json
from jacobi_forcing.loading import load
from jacobi_forcing.recipe.mode_costs import affordable_steps, mode_cost
from jacobi_forcing.recipe.reporter import Reporter
from jacobi_forcing.recipe.run import run_recipe
from jacobi_forcing.recipe.settings import load_recipe
from jacobi_forcing.trajectories.prompts import load_prompts

RECIPES = {"full": "quickstart", "adapter": "quickstart-adapter"}


def recipe_of(mode: str, seed: int, steps: int, asked: argparse.Namespace, output: Path) -> RecipeConfig:
    """The shipped recipe of a mode, cut to one round without evaluation."""
    first = load_recipe(RECIPES[mode]).rounds[0].to_dict()
    changed = {
        "block_size": asked.block_size,
        "steps": steps,
        "prompts_offset": 0,
        "prompts_limit": asked.responses,
        "lr_scheduler": "linear",
    }
    overrides = [f"rounds={json.dumps([{**first, **changed}])}", f"seed={seed}", "evaluation=null"]
    return load_recipe(RECIPES[mode], [*overrides, f"prompts.limit={asked.responses}"], output)


def measured(model: ModelConfig, asked: argparse.Namespace) -> tuple[list[list[int]], dict[str, Any]]:
    """Answers to the held-out problems by `window`, and what they are worth."""
    evaluation = load_recipe(RECIPES["full"]).evaluation
    assert evaluation is not None
    loaded = load(model)
    backbone = Backbone(loaded.model)
    prompts = load_prompts(evaluation.prompts, loaded.tokenizer)[: asked.problems]
    decode = DecodeConfig("window", asked.block_size)
    told, stats = answers(backbone, prompts, max_new_tokens=200, batch_size=50, decode=decode)
    quality = quality_of(told, prompts, loaded.tokenizer, backbone.eos_ids, evaluation.task)
    assert quality.solved is not None
    return told, {"tpf": stats.tokens_per_forward, "solve_rate": quality.solved.share}


def one(mode: str, seed: int, steps: int, base: list[list[int]], asked: argparse.Namespace) -> dict[str, Any]:
    """Train one mode with one seed, unless it was done before."""
    place = asked.output / f"{mode}-{seed}"
    if (place / "result.json").exists():
        return dict(read_json(place / "result.json"))
    recipe = recipe_of(mode, seed, steps, asked, place)
    whole, started = not (place / "stages").exists(), time.process_time()
    run_recipe(recipe, reporter=Reporter())
    spent = time.process_time() - started
    folder = str(place / "model")
    own = {"adapter": folder} if mode == "adapter" else {"name": folder}
    told, figures = measured(ModelConfig.from_dict({"name": recipe.model.name, **own}), asked)
    same = sum(ours == theirs for ours, theirs in zip(told, base, strict=True)) / len(base)
    # After a kill only the rest was seen.
    spent_whole = round(spent, 1) if whole else None
    result = {"mode": mode, "seed": seed, "steps": steps, **figures, "agreement": same, "core_seconds": spent_whole}
    write_json(place / "result.json", result)
    return result


def main() -> None:
    """Calibrate, train, measure, print a table and a line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--core-seconds", type=float, default=150.0, help="of each training, collecting included")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--responses", type=int, default=500)
    parser.add_argument("--problems", type=int, default=100, help="held-out problems")
    parser.add_argument("--threads", type=int, default=1, help="of torch")
    parser.add_argument("--output", type=Path, default=Path("runs/compare-modes"))
    asked = parser.parse_args()
    torch.set_num_threads(asked.threads)
    asked.output.mkdir(parents=True, exist_ok=True)
    plan = asked.output / "plan.json"
    if not plan.exists():
        steps = {}
        for mode in RECIPES:
            small = argparse.Namespace(**{**vars(asked), "responses": 24})
            cost = mode_cost(recipe_of(mode, 0, 1, small, plan), asked.output / "trial", threads=asked.threads)
            steps[mode] = affordable_steps(cost, asked.responses, asked.core_seconds)
        write_json(plan, steps)
    steps = read_json(plan)
    base, figures = measured(ModelConfig(name="builtin:word-problems"), asked)
    print(f"base: TPF {figures['tpf']:.2f}, {100 * figures['solve_rate']:.0f} % solved; steps {steps}")
    results = [one(mode, seed, steps[mode], base, asked) for seed in asked.seeds for mode in RECIPES]
    print("| mode | steps | TPF | solved | text equal to the base's | core-seconds |")
    print("| --- | --- | --- | --- | --- | --- |")
    for mode in RECIPES:
        own = [result for result in results if result["mode"] == mode]
        cells = [spread([result[key] for result in own]) for key in ("tpf", "solve_rate", "agreement")]
        cells.append(spread([result["core_seconds"] for result in own if result["core_seconds"] is not None]))
        print(f"| {mode} | {steps[mode]} | " + " | ".join(cells) + " |")
    print(json.dumps({"kind": "compare-modes", "results": results, "provenance": provenance.collect(seed=0)}))


def spread(values: list[float]) -> str:
    """Mean and, of several, the standard deviation."""
    if not values:
        return "-"
    mean = statistics.mean(values)
    return f"{mean:.2f} ± {statistics.stdev(values):.2f}" if len(values) > 1 else f"{mean:.2f}"


if __name__ == "__main__":
    sys.exit(guarded(main))
