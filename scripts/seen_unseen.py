"""What limits a training: tokens per forward on prompts that it learnt from, and on the held-out ones.

    python scripts/seen_unseen.py runs/smollm2-orders-adapter --limit 24 --block-size 8

Where both are alike, more prompts would not help: what lacks is steps, or weights to learn with. Where the first is far
above the second, it is prompts. TPF is a count, so the load of the machine does not matter.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

from jacobi_forcing.backbone import Backbone
from jacobi_forcing.config import DecodeConfig, ModelConfig, PromptsConfig, RecipeConfig
from jacobi_forcing.errors import ArtefactError, ConfigError, guarded
from jacobi_forcing.evaluate.quality import answers, quality_of
from jacobi_forcing.loading import load
from jacobi_forcing.recipe.settings import round_prompts
from jacobi_forcing.trajectories.prompts import load_prompts
from jacobi_forcing.viz.gather import gather


def recipe_of(asked: argparse.Namespace) -> RecipeConfig:
    """The recipe of a finished run, with this machine's base and prompts in the place of those that it names.

    Raises:
        ArtefactError: There is no report.
        ConfigError: The recipe measures nothing, so it has no held-out prompts.
    """
    run = gather(asked.run).run
    if run is None:
        raise ArtefactError(f"'{asked.run}' is no finished run", expected="a folder with report.json")
    recipe = RecipeConfig.from_dict(run["recipe"])
    if recipe.evaluation is None:
        raise ConfigError("The recipe has no evaluation, so it names no held-out prompts")
    model = dataclasses.replace(recipe.model, name=asked.base or recipe.model.name)
    prompts = dataclasses.replace(recipe.prompts, source=asked.seen or recipe.prompts.source)
    unseen = recipe.evaluation.prompts
    unseen = dataclasses.replace(unseen, source=asked.unseen or unseen.source)
    evaluation = dataclasses.replace(recipe.evaluation, prompts=unseen)
    return dataclasses.replace(recipe, model=model, prompts=prompts, evaluation=evaluation)


def measure(recipe: RecipeConfig, asked: argparse.Namespace) -> list[dict[str, Any]]:
    """One line for the prompts of the first round and one for the held-out ones."""
    assert recipe.evaluation is not None
    made = str(asked.run / "model")
    change: dict[str, Any] = {"adapter": made} if recipe.mode == "adapter" else {"name": made}
    settings: ModelConfig = dataclasses.replace(recipe.model, **change)
    loaded = load(settings)
    backbone = Backbone(loaded.model)
    decode = DecodeConfig(decoder=asked.decoder, block_size=asked.block_size)
    sources: dict[str, PromptsConfig] = {"seen": round_prompts(recipe, 0), "unseen": recipe.evaluation.prompts}
    told = []
    for name, source in sources.items():
        source = dataclasses.replace(source, limit=asked.limit)
        found = load_prompts(source, loaded.tokenizer, context_length=backbone.context_length)
        ids, stats = answers(
            backbone, found, max_new_tokens=recipe.evaluation.max_new_tokens, batch_size=4, decode=decode
        )
        quality = quality_of(ids, found, loaded.tokenizer, backbone.eos_ids, "none").to_dict()
        line = {"prompts": name, "answers": len(found), "tokens_per_forward": round(stats.tokens_per_forward, 4)}
        told.append({**line, "repetition_rate": quality["repetition_rate"]})
    return told


def main() -> None:
    """Measure both; the last line is JSON."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("run", type=Path, help="output folder of a recipe with an evaluation")
    parser.add_argument("--base", help="folder or name of the base on this machine; by default the run's")
    parser.add_argument("--seen", help="file of the prompts that it learnt from; by default the recipe's")
    parser.add_argument("--unseen", help="file of the held-out prompts; by default the recipe's")
    parser.add_argument("--limit", type=int, default=24, help="prompts of each")
    parser.add_argument("--decoder", default="window")
    parser.add_argument("--block-size", type=int, default=8)
    asked = parser.parse_args()
    told = measure(recipe_of(asked), asked)
    for line in told:
        print(f"{line['prompts']}: TPF {line['tokens_per_forward']:.2f} on {line['answers']} prompts, ", end="")
        print(f"{100 * line['repetition_rate']:.1f} % of the answers end in a loop")
    print(json.dumps({"kind": "seen-unseen", "run": asked.run.name, "lines": told}))


if __name__ == "__main__":
    sys.exit(guarded(main))
