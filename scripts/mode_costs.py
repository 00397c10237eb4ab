"""What training costs a response in mode full and in mode adapter, in one run: core-seconds and peak memory.

    python scripts/mode_costs.py --model FOLDER --source train.jsonl --field question

Both modes get the same prompts, block size and longest response; a step is one response (mode adapter) or one packed
row (mode full). The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from jacobi_forcing import provenance
from jacobi_forcing.config import RecipeConfig
from jacobi_forcing.errors import guarded
from jacobi_forcing.recipe.mode_costs import mode_cost


def main() -> None:
    """Measure, print a table and a line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--model", required=True, help="folder or hub name")
    parser.add_argument("--source", default="builtin:word-problems", help="prompts, as in a recipe")
    parser.add_argument("--field", default="prompt", help="key that holds the prompt")
    parser.add_argument("--responses", type=int, default=8, help="responses to collect")
    parser.add_argument("--steps", type=int, default=6, help="training steps to count")
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--lines", type=int, default=8, help="draft lines of a response, mode adapter")
    parser.add_argument("--states", default="every", help="of a line that are learnt from, mode adapter")
    parser.add_argument("--rank", type=int, default=32, help="of the adapter")
    parser.add_argument("--threads", type=int, default=1, help="of torch")
    parser.add_argument("--output", type=Path, default=Path("runs/mode-costs"), help="thrown away at the end")
    asked = parser.parse_args()
    costs = []
    for mode in ("full", "adapter"):
        own = {"window_size": 8, "mask": "noise_conditioned_window", "schedule_phase": "random", "ar_weight": 100.0}
        values = {
            "model": {"name": asked.model},
            "prompts": {"source": asked.source, "field": asked.field, "limit": asked.responses},
            "collect": {"max_new_tokens": asked.max_new_tokens, "batch_size": asked.responses},
            "rounds": [
                {
                    "block_size": asked.block_size,
                    "steps": asked.steps,
                    "batch_size": 1,
                    "max_length": 1024,
                    "learning_rate": 3e-5 if mode == "full" else 1e-3,
                    **(own if mode == "full" else {}),
                }
            ],
            "output": str(asked.output),
        }
        if mode == "adapter":
            values |= {
                "mode": mode,
                "adapter": {"rank": asked.rank, "lines_per_response": asked.lines, "states": asked.states},
            }
        recipe = RecipeConfig.from_dict(values)
        costs.append(mode_cost(recipe, asked.output / mode, steps=asked.steps, threads=asked.threads))
    heads = ("mode", "collect, core-s a response", "train, core-s a response", "slots learnt from", "core-ms a slot")
    print("| " + " | ".join(heads) + " | peak memory, GB |")
    print("| --- " * (len(heads) + 1) + "|")
    for cost in costs:
        slot = 1e3 * cost.train / cost.slots
        cells = [f"{cost.collect:.2f}", f"{cost.train:.2f}", f"{cost.slots:.0f}", f"{slot:.2f}"]
        print(f"| {cost.mode} | " + " | ".join(cells) + f" | {cost.memory / 1e9:.2f} |")
    full, adapter = costs
    ratios = {name: getattr(adapter, name) / getattr(full, name) for name in ("collect", "train", "memory")}
    print(", ".join(f"{name}: adapter {ratio:.2f} of full" for name, ratio in ratios.items()))
    record = provenance.collect(seed=0, model=asked.model)
    report = {"kind": "mode-costs", "modes": [c.to_dict() for c in costs], "ratios": ratios, "provenance": record}
    print(json.dumps(report))


if __name__ == "__main__":
    sys.exit(guarded(main))
