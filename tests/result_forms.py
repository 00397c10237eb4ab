"""Results made by hand, small and whole, for the tests of what reads them."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

from jacobi_forcing.config import DecodeConfig, RecipeConfig
from jacobi_forcing.formats import stamped

Form = dict[str, Any]
MADE: Form = {
    "argv": ["jforce", "run"],
    "commit": {"hash": "0123456789abcdef", "dirty": False},
    "versions": {"python": "3.11", "torch": "2.13"},
    "seed": 0,
    "created": "2026-01-01T00:00:00+00:00",
}
PROMPTS: Form = {
    "source": "prompts.jsonl",
    "subset": None,
    "split": "test",
    "field": "prompt",
    "answer_field": "answer",
    "template": "raw",
    "offset": 0,
    "limit": 20,
    "seed": 0,
}


def quality(solved: int | None = 18, of: int = 20, repeating: int = 1) -> Form:
    """Quality of `of` answers."""
    share = None if solved is None else solved / of
    return {
        "answers": of,
        "mean_tokens": 50.0,
        "finished_rate": 1.0,
        "repetition_rate": repeating / of,
        "solved": solved,
        "solve_rate": share,
        "solve_rate_interval": None if share is None else [max(share - 0.2, 0.0), min(share + 0.1, 1.0)],
    }


def decoder(name: str, size: int | None = None, *, tpf: float = 1.0, tps: float = 100.0, **changes: Any) -> Form:
    """What one decoder did on 20 prompts of 50 tokens; `ar` has 100 tokens a second."""
    tokens = 1000
    cost = changes.pop("cost", None)
    return {
        "decoder": name,
        "block_size": size,
        "settings": {} if name == "library" else DecodeConfig(decoder=name, block_size=size or 16).to_dict(),
        "label": "",
        "batch_size": 1,
        "tokens": tokens,
        "forwards": round(tokens / tpf),
        "model_forwards": round(tokens / tpf),
        "assistant_forwards": 0,
        "tokens_per_forward": tpf,
        "seconds": tokens / tps,
        "tokens_per_second": tps,
        "speedup": tps / 100.0,
        "median_speedup": tps / 100.0,
        "exact": 20,
        "near_ties": 0,
        "faults": 0,
        "of": 20,
        "exact_against": "library" if name == "ar" else "ar",
        "mismatches": [],
        "quality": quality(),
        "mean_slots": float(size or 1),
        "median_slots": size or 1,
        "cost_ratio": cost,
        "accepted": {} if name == "library" else {"1": 10, "4": 5} if size else {"1": 1000},
        "lines_won": {} if name == "library" else {"0": 15},
        "draft_accuracy": [0.5, 0.25] if size else [],
        **changes,
    }


def model(label: str, *drafting: Form, **changes: Any) -> Form:
    """One measured model: the library, `ar` and the given decoders."""
    return {
        "version": 2,
        "label": label,
        "model": label,
        "dtype": "float32",
        "device": "cpu",
        "threads": 2,
        "max_new_tokens": 64,
        "task": "gsm8k",
        "prompts": 20,
        "decoders": [decoder("library", tps=90.0), decoder("ar"), *copy.deepcopy(list(drafting))],
        "cost": [{"batch_size": 1, "slots": 1, "context": 60, "seconds": 0.01, "ratio": 1.0}],
        "overhead": [],
        **changes,
    }


def bench(*models: Form, **changes: Any) -> Form:
    """A file of `jforce bench`."""
    return stamped("bench", {"models": list(models), "prompts": PROMPTS, "provenance": MADE, **changes})


def run(*models: Form, **changes: Any) -> Form:
    """A report of `jforce run`, whose training took 120 seconds on two threads."""
    recipe = RecipeConfig.from_dict(
        {
            "model": {"name": "owner/base"},
            "prompts": {"source": "owner/prompts"},
            "rounds": [{"block_size": 16, "steps": 30}],
        }
    )
    stages = {"collect-1": {"seconds": 20.0}, "train-1": {"seconds": 100.0}}
    values = {"model": "model", "models": list(models), "stages": stages, "seconds": 150.0, "recipe": recipe.to_dict()}
    return stamped("run", {**values, "provenance": MADE, **changes})


def save_run(folder: Path, report: Form) -> Path:
    """A run's folder: its report, log and probes of one round."""
    place = folder / "round-1"
    place.mkdir(parents=True)
    (folder / "report.json").write_text(json.dumps(report))
    log = [{"step": step, "loss": 9.0 / step, "consistency_loss": 8.0 / step, "ar_loss": 0.1} for step in (10, 20, 30)]
    log.append({"step": 30, "train_loss": 3.0})
    probes = [
        {"step": step, "tokens_per_forward": tpf, **quality(), "decoder": "window", "block_size": 16}
        for step, tpf in ((0, 1.1), (30, 2.5))
    ]
    for name, kind, lines in (("log.jsonl", "train-log", log), ("probe.jsonl", "probe", probes)):
        (place / name).write_text("".join(json.dumps(stamped(kind, line)) + "\n" for line in lines))
    return folder


def evaluation(right: int, *, tps: float = 20.0, **changes: Any) -> Form:
    """A file of `jforce eval`: `ar` and a window on 10 items of one task."""
    each = {"tokens": 500, "seconds": 500 / tps, "median_seconds": 2.0, "median_slots": 1, "cost_ratio": None}
    each |= {"quality": quality(right, 10, 0), "failures": {}, "label": "", "paired": None}
    ar = {**each, "decoder": "ar", "block_size": None, "settings": DecodeConfig(decoder="ar").to_dict()}
    ar |= {"forwards": 500, "tokens_per_forward": 1.0, "tokens_per_second": tps, "speedup": 1.0}
    paired = {"exact": 10, "near_ties": 0, "faults": 0, "of": 10, "differ": [], "mismatches": [], "only_this": 1}
    paired |= {"only_ar": 0, "graded_otherwise": [], "mcnemar_p": 1.0, "difference": 0.1, "median_speedup": 2.0}
    window = {**ar, "decoder": "window", "block_size": 16, "settings": DecodeConfig(block_size=16).to_dict()}
    window |= {"forwards": 250, "tokens_per_forward": 2.0, "tokens_per_second": 2 * tps, "speedup": 2.0}
    window |= {"median_slots": 16, "cost_ratio": 1.5, "paired": {**paired, "difference_interval": [0.0, 0.3]}}
    task = {"task": "gsm8k", "items": 10, "max_new_tokens": 64, "fewshot": 0, "stop_strings": []}
    task |= {"decoders": [ar, window], "isolation": None, "data": {"source": "test.jsonl", "sha256": "0" * 64}}
    values = {"model": "m", "adapter": None, "fingerprint": "f", "dtype": "float32", "device": "cpu", "threads": 2}
    values |= {"chat": False, "batch_size": 1, "fewshot": 0, "max_new_tokens": None, "data": {}, "tasks": [task]}
    return stamped("eval", {**values, "provenance": MADE, **changes})


def evaluation_items(right: list[bool]) -> list[Form]:
    """Lines of the `items.jsonl` beside `evaluation`."""
    lines = []
    for name, size, forwards in (("ar", 16, 50), ("window", 16, 25)):
        settings = DecodeConfig(decoder=name, block_size=size).to_dict()  # type: ignore[arg-type]  # a name of ours
        for item, good in enumerate(right):
            line = {"task": "gsm8k", "item": item, "id": str(item), "decoder": name, "settings": settings}
            line |= {"prompt": "0" * 16, "prompt_tokens": 5, "limit": 64, "ids": [1] * 50, "text": "", "tokens": 50}
            line |= {"forwards": forwards, "slots": {}, "seconds": 1.0, "rows": 1, "finished": True, "repeats": False}
            lines.append(stamped("eval-item", {**line, "answer": "1", "right": good, "detail": ""}))
    return lines


def profile(**changes: Any) -> Form:
    """A file of `jforce profile`."""
    points = [
        {"tokens": size, "seconds": 0.01 * ratio, "low": 0.009 * ratio, "high": 0.011 * ratio, "ratio": ratio}
        | {
            "bytes": 1,
            "flops": 1,
            "bandwidth_share": 0.5,
            "compute_share": 0.1,
            "bound_seconds": 0.005,
            "limit": "bandwidth",
        }
        for size, ratio in ((1, 1.0), (16, 1.5), (64, 4.0))
    ]
    fitted = {"tokens": 8.0, "flat": 0.01, "slope": 0.001, "error": 0.1}
    context = {"context": 64, "points": points, "knee": {"tokens": 8, "fitted": fitted}, "ridge": None}
    limits = {"bytes_per_second": 2e10, "flops_per_second": 5e10, "working_set": 1, "width": 1}
    names = ("weights", "matmul", "adapter", "kv", "attention", "vocabulary", "itemsize")
    values = {"label": "m", "model": "m", "dtype": "float32", "device": "cpu", "device_name": "a CPU", "threads": 2}
    values |= {"batch_size": 1, "adapter": False, "tolerance": 0.2, "repeats": 5, "limits": limits}
    values |= {"work": dict.fromkeys(names, 1), "contexts": [context]}
    values["recommended"] = {"tokens": 8, "settings": [{"decoder": "window", "block_size": 8, "tokens": 8}]}
    return stamped("profile", {**values, "provenance": MADE, **changes})


def ablation() -> Form:
    """A file of `jforce ablate`: two variants, the first with two seeds."""

    def figure(*values: float) -> Form:
        mean = sum(values) / len(values)
        spread = None if len(values) == 1 else abs(values[0] - values[1]) / 2**0.5
        return {"mean": mean, "sd": spread, "low": min(values), "high": max(values), "values": list(values)}

    def variant(name: str, *tpf: float) -> Form:
        seeds = list(range(len(tpf)))
        took = {key: figure(*[100.0] * len(tpf)) for key in ("steps", "train_tokens", "train_core_seconds")}
        shares = {"solve_rate": figure(*[0.9] * len(tpf)), "repetition_rate": figure(*[0.0] * len(tpf))}
        rates = {"variant": name, "seeds": seeds, "tokens_per_forward": {"window n=16": figure(*tpf)}}
        return {**rates, "exact": 4, "of": 4, **shares, **took, "collect_core_seconds": None}

    counted = {"decoders": {"window n=16": {"tokens_per_forward": 1.1, "exact": 2, "of": 2}}, "quality": quality()}
    runs = [{"variant": "a", "seed": 0, **counted}]
    values = {"base": counted, "variants": [variant("a", 2.0, 3.0), variant("b", 2.5)], "runs": runs, "unfinished": 1}
    return stamped("ablation", {**values, "grid": {}, "recipe": {}, "provenance": MADE})
