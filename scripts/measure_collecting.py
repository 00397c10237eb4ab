"""Side by side or block after block: how fast trajectories are collected, in one process, with the same states.

    python scripts/measure_collecting.py --model FOLDER --prompts FILE.jsonl --field question --template chat --limit 8

Three ways, on the same prompts:

    block after block   one prompt at a time, one block at a time: the whole block is swept until it no longer changes,
                        on the KV of what stands before it. So the authors' release collects.
    side by side        `collect`: greedy responses in a batch, then all their blocks in the same forwards.
    needed only         the same, each block only until the state that the schedule asks for has been seen.

Seconds are wall time; core seconds, which other work on the machine disturbs less, are processor time. Each way
collects the first prompt once beforehand, and that is thrown away. The states of the first two ways are compared token
for token; where they differ, the exit status is 1. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from jacobi_forcing.backbone import Backbone
from jacobi_forcing.config import CollectConfig, ModelConfig, PromptsConfig
from jacobi_forcing.errors import guarded
from jacobi_forcing.loading import load
from jacobi_forcing.schedule import NoiseSchedule
from jacobi_forcing.sweep import Line, Lines, sweep
from jacobi_forcing.trajectories.collect import collect
from jacobi_forcing.trajectories.prompts import Prompt, load_prompts
from jacobi_forcing.trajectories.states import draw_state
from jacobi_forcing.trajectories.store import Trajectory, TrajectoryReader


@torch.inference_mode()
def block_after_block(
    backbone: Backbone, prompt: Prompt, *, block_size: int, max_new_tokens: int, seed: int
) -> tuple[list[list[list[int]]], int]:
    """The states of each block of one response, and how many forward passes they took."""
    cache = backbone.new_cache(1)

    def run(ids: Sequence[int]) -> list[int]:
        return [
            int(token) for token in sweep(backbone, cache, Lines.pack([[Line(ids, cache.width)]], backbone.device))[0]
        ]

    upcoming, forwards = run(prompt.ids)[-1], 1
    cache.commit([range(len(prompt.ids))])
    text = list(prompt.ids)
    blocks: list[list[list[int]]] = []
    ends, limit = set(backbone.eos_ids), len(prompt.ids) + max_new_tokens
    while True:
        state = draw_state([upcoming] * block_size, text, seed=seed, sample=prompt.index, block=len(blocks))
        states = [state]
        while True:
            predicted = run(state)
            forwards += 1
            state = [upcoming, *predicted[:-1]]
            if state == states[-1]:
                break
            states.append(state)
            cache.forget()
        cache.commit([range(block_size)])
        upcoming = predicted[-1]
        size = next((slot + 1 for slot, token in enumerate(state) if token in ends), block_size)
        size = min(size, limit - len(text))
        fixed_point = state[:size]
        # What stands behind the end of the text takes no part.
        kept = [earlier[:size] for earlier in states]
        blocks.append(kept[: kept.index(fixed_point) + 1])
        text += fixed_point
        if fixed_point[-1] in ends or len(text) == limit:
            return blocks, forwards


def main() -> int:
    """Measure, print a table and one JSON line."""
    args = _arguments()
    torch.set_num_threads(args.threads)
    loaded = load(ModelConfig(args.model, device=args.device))
    backbone = Backbone(loaded.model)
    source = PromptsConfig(
        args.prompts, subset=args.subset, split=args.split, field=args.field, template=args.template, limit=args.limit
    )
    prompts = load_prompts(source, loaded.tokenizer, context_length=backbone.context_length)
    noise = NoiseSchedule(args.schedule, args.window_size, schedule_phase=args.schedule_phase)
    results: dict[str, Any] = {}

    def alone(chosen: list[Prompt]) -> tuple[dict[int, list[list[list[int]]]], dict[str, Any]]:
        states, forwards = {}, 0
        for prompt in chosen:
            states[prompt.index], count = block_after_block(
                backbone, prompt, block_size=args.block_size, max_new_tokens=args.max_new_tokens, seed=args.seed
            )
            forwards += count
        return states, {"forwards": forwards}

    def together(needed_only: bool) -> Callable[[list[Prompt]], tuple[dict[int, Any], dict[str, Any]]]:
        def work(chosen: list[Prompt]) -> tuple[dict[int, Any], dict[str, Any]]:
            config = CollectConfig(
                max_new_tokens=args.max_new_tokens,
                batch_size=args.batch_size,
                shard_size=max(64, args.batch_size),
                seed=args.seed,
                needed_only=needed_only,
            )
            with tempfile.TemporaryDirectory() as folder:
                options: dict[str, Any] = {"config": config, "block_size": args.block_size, "needed": noise}
                report = collect(backbone, chosen, folder=folder, **options).to_dict()
                found: list[Trajectory] = list(TrajectoryReader(folder))
            return {trajectory.sample: trajectory.states for trajectory in found}, report

        return work

    ways = {"block after block": alone, "side by side": together(False), "needed only": together(True)}
    states: dict[str, dict[int, list[list[list[int]]]]] = {}
    for name, way in ways.items():
        way(prompts[:1])
        started, busy = time.perf_counter(), time.process_time()
        states[name], report = way(prompts)
        results[name] = {
            "seconds": time.perf_counter() - started,
            "core_seconds": time.process_time() - busy,
            **_counts(states[name]),
            **{key: value for key, value in report.items() if key.endswith(("forwards", "seconds", "ties"))},
        }
    return _print(args, results, same=states["block after block"] == states["side by side"])


def _counts(states: dict[int, list[list[list[int]]]]) -> dict[str, int]:
    blocks = [block for of_sample in states.values() for block in of_sample]
    return {
        "responses": len(states),
        "tokens": sum(len(block[-1]) for block in blocks),
        "blocks": len(blocks),
        "sweeps": sum(len(block) - 1 for block in blocks),
    }


def _print(args: argparse.Namespace, results: dict[str, Any], *, same: bool) -> int:
    first = results["block after block"]
    rows = []
    for name, result in results.items():
        result["tokens_per_second"] = result["tokens"] / result["seconds"]
        result["ratio"] = first["seconds"] / result["seconds"] * result["tokens"] / first["tokens"]
        result["core_ratio"] = first["core_seconds"] / result["core_seconds"] * result["tokens"] / first["tokens"]
        rows.append(
            [
                name,
                f"{result['seconds']:.1f}",
                f"{result['tokens_per_second']:.1f}",
                f"{result['ratio']:.2f}",
                f"{result['core_ratio']:.2f}",
                f"{result['seconds'] / result['responses'] * 1000:.0f}",
                str(result["forwards"]),
                f"{result['sweeps'] / result['blocks']:.2f}",
            ]
        )
    headings = ("way", "seconds", "tokens/s", "ratio", "core ratio", "ms a response", "forwards", "sweeps a block")
    widths = [max(len(row[column]) for row in [headings, *rows]) for column in range(len(headings))]
    for row in [headings, *rows]:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    whole, needed = results["side by side"]["sweeps"], results["needed only"]["sweeps"]
    saved = 1 - needed / whole if whole else 0.0
    print(f"same states: {'yes' if same else 'NO'}; sweeps spared by needed_only: {saved:.1%}")
    figures = {"settings": vars(args), "same_states": same, "sweeps_spared": saved, "ways": results}
    print(json.dumps(figures))
    return 0 if same else 1


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Measure how fast trajectories are collected.")
    parser.add_argument("--model", default="builtin:word-problems")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--prompts", default="builtin:word-problems")
    parser.add_argument("--subset", default=None)
    parser.add_argument("--split", default="train")
    parser.add_argument("--field", default="prompt")
    parser.add_argument("--template", default="auto")
    parser.add_argument("--limit", type=int, default=8)
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--schedule", default="progressive")
    parser.add_argument("--window-size", type=int, default=16)
    parser.add_argument("--schedule-phase", default="fixed")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(guarded(main))
