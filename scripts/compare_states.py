"""Stored against on-policy states at equal core seconds, collecting included, on the embedded model.

    OMP_NUM_THREADS=1 python scripts/compare_states.py --budget 300 --output runs/states

For each seed and each way, in one folder that a killed run goes on in:

    stored      collects trajectories, then trains on their states
    needed      collects only the states that the schedule asks for (`needed_only`), then trains on them
    on_policy   collects responses alone, then trains on states that the model makes as it learns

Collecting is timed, then a few steps of training that are thrown away; from these follows how many steps the rest of
the budget pays for, so that the learning rate can fall to zero at its end. What was really spent is told beside the
result. Seconds are processor time of this process: other work on the machine hardly changes them. The settings are
those of a recipe's first round; the last line is JSON.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch

from jacobi_forcing.config import DecodeConfig, EvaluationConfig, RecipeConfig, RoundConfig
from jacobi_forcing.files import read_json, remove, write_json
from jacobi_forcing.recipe import Reporter, load_recipe
from jacobi_forcing.recipe.collecting import collect_trajectories
from jacobi_forcing.recipe.measuring import measure_model
from jacobi_forcing.recipe.run import trainer
from jacobi_forcing.recipe.settings import round_noise, round_prompts

WAYS: dict[str, dict[str, Any]] = {
    "stored": {},
    "needed": {"needed_only": True},
    "on_policy": {"states": "on_policy"},
}


def one(recipe: RecipeConfig, way: str, seed: int, budget: float, calibration: int, folder: Path) -> dict[str, Any]:
    """Collect, train and measure one model."""
    states = WAYS[way].get("states", "stored")
    settings = dataclasses.replace(recipe.rounds[0], states=states, save_steps=10**6)
    collect = dataclasses.replace(recipe.collect, seed=seed, needed_only=WAYS[way].get("needed_only", False))
    started = time.process_time()
    counts = collect_trajectories(
        recipe.model,
        round_prompts(recipe, 0),
        collect,
        block_size=settings.block_size,
        folder=folder / "trajectories",
        reporter=Reporter(),
        states=states == "stored",
        needed=round_noise(settings),
    )
    collecting = time.process_time() - started

    def train(name: str, steps: int) -> float:
        begun = time.process_time()
        trainer()(
            recipe.model,
            folder / "trajectories",
            dataclasses.replace(settings, steps=steps),
            folder / name,
            seed=seed,
            reporter=Reporter(),
        )
        return time.process_time() - begun

    # Two lengths, so that what does not grow with the steps is not counted as if it did.
    short, long = train("calibration-1", calibration), train("calibration-2", 3 * calibration)
    step = (long - short) / (2 * calibration)
    fixed = max(short - step * calibration, 0.0)
    steps = max(int((budget - collecting - fixed) / step), 1)
    training = train("training", steps)
    model = dataclasses.replace(recipe.model, name=str((folder / "training" / "model").absolute()))
    result = measure_model(model, _evaluation(recipe, settings), label=way, reporter=Reporter())
    window = next(decoder for decoder in result["decoders"] if decoder["decoder"] == "window")
    log = [json.loads(line) for line in (folder / "training" / "log.jsonl").read_text(encoding="utf-8").splitlines()]
    logged = [entry for entry in log if "loss" in entry]
    return {
        "way": way,
        "seed": seed,
        "steps": steps,
        "collecting_seconds": collecting,
        "training_seconds": training,
        "seconds_a_step": training / steps,
        "sweeps": counts["sweeps"],
        "tokens_per_forward": window["tokens_per_forward"],
        "solve_rate": result["quality"]["solve_rate"],
        "repetition_rate": result["quality"]["repetition_rate"],
        "state_seconds_a_step": statistics.mean(entry.get("state_seconds", 0.0) for entry in logged) if logged else 0.0,
        "drifted_share": _drifted(logged),
    }


def _drifted(logged: list[dict[str, Any]]) -> float | None:
    """Share of the swept blocks in which the model no longer goes on as the response does, over the last tenth."""
    last = [entry for entry in logged[-max(len(logged) // 10, 1) :] if entry.get("swept_blocks")]
    return statistics.mean(entry["drifted_blocks"] / entry["swept_blocks"] for entry in last) if last else None


def _evaluation(recipe: RecipeConfig, settings: RoundConfig) -> EvaluationConfig:
    assert recipe.evaluation is not None, "the recipe must say what is measured"
    decoder = DecodeConfig(decoder="window", block_size=settings.block_size)
    return dataclasses.replace(recipe.evaluation, decode=(decoder,))


def main() -> None:
    """Run what is not done yet, print a table and one JSON line."""
    parser = argparse.ArgumentParser(description="Compare stored and on-policy states at equal core seconds.")
    parser.add_argument("--recipe", default="quickstart")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="override a key of the recipe")
    parser.add_argument("--budget", type=float, default=300.0, help="core seconds of collecting and training")
    parser.add_argument("--calibration", type=int, default=10, help="steps of the shorter trial run")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--ways", nargs="+", choices=list(WAYS), default=list(WAYS))
    parser.add_argument("--output", type=Path, default=Path("runs/states"))
    args = parser.parse_args()
    torch.set_num_threads(1)
    recipe = load_recipe(args.recipe, args.set)
    results = []
    for seed in args.seeds:
        for way in args.ways:
            folder = args.output / f"{way}-{seed}"
            if not (folder / "result.json").is_file():
                remove(folder)
                folder.mkdir(parents=True)
                write_json(folder / "result.json", one(recipe, way, seed, args.budget, args.calibration, folder))
            results.append(read_json(folder / "result.json"))
            print(json.dumps(results[-1]), flush=True)
    heading = f"{'states':10} {'steps':>14} {'collect s':>10} {'train s':>10} {'TPF n=16':>16} {'solved %':>14}"
    print("\n" + heading)
    for way in args.ways:
        mine = [result for result in results if result["way"] == way]
        cells = [
            _spread([result[name] * scale for result in mine], digits)
            for name, scale, digits in (
                ("steps", 1, 0),
                ("collecting_seconds", 1, 0),
                ("training_seconds", 1, 0),
                ("tokens_per_forward", 1, 2),
                ("solve_rate", 100, 1),
            )
        ]
        print(f"{way:10} {cells[0]:>14} {cells[1]:>10} {cells[2]:>10} {cells[3]:>16} {cells[4]:>14}")
    print(json.dumps({"budget": args.budget, "recipe": args.recipe, "set": args.set, "results": results}))


def _spread(values: list[float], digits: int) -> str:
    mean = statistics.mean(values)
    return f"{mean:.{digits}f}" + (f" ± {statistics.stdev(values):.{digits}f}" if len(values) > 1 else "")


if __name__ == "__main__":
    main()
