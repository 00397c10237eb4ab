"""Whether it pays: what a speed-up is to be expected of, and how many tokens earn the training back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

Form = Mapping[str, Any]
_UNDRAFTED = ("ar", "library")
MARGIN = 1.05
"""A gain below this share of the cost is within what a machine's load does."""


def drafting(model: Form) -> list[Form]:
    """The decoders of ours that draft, one row at a time, whose forwards have a price."""
    return [d for d in model["decoders"] if d.get("cost_ratio") and d.get("batch_size", 1) == 1 and "tokens" in d]


def name_of(decoder: Form) -> str:
    """What sentences call a decoder."""
    size, label = decoder["block_size"], decoder.get("label")
    return decoder["decoder"] + ("" if size is None else f" n={size}") + (f" ({label})" if label else "")


def expected(decoder: Form) -> float:
    """The speed-up that tokens and price of a forward promise: TPF / (cost(n)/cost(1))."""
    return float(decoder["tokens_per_forward"]) / float(decoder["cost_ratio"])


def verdict(model: Form) -> str:
    """One sentence: whether a speed-up is to be expected of a model on this machine, and why."""
    ours = drafting(model)
    if not ours:
        return f"{model['label']}: nothing that drafts was measured, so nothing can be said about a speed-up."
    best = max(ours, key=expected)
    slots, cost, gain = best["median_slots"], best["cost_ratio"], best["tokens_per_forward"]
    hope = "no speed-up" if expected(best) < MARGIN else f"about {expected(best):.1f}×"
    return (
        f"{model['label']}: {hope} is to be expected. With {name_of(best)}, the best here, a forward of {slots} tokens "
        f"costs {cost:.2f} times one of 1 on this machine and brings {gain:.2f} tokens "
        f"(measured: {best['speedup']:.2f}×; {_worth(model, best)})."
    )


def _worth(model: Form, decoder: Form) -> str:
    """Quality beside speed."""
    quality = model.get("quality") or decoder["quality"]
    solved = quality["solve_rate"]
    share = "" if solved is None else f"{100 * solved:.1f} % of {quality['answers']} solved, "
    return (
        f"{share}{100 * quality['repetition_rate']:.1f} % end in a loop, "
        f"exact {decoder['exact']}/{decoder['of']} against {decoder['exact_against']}"
    )


def payback(run: Form) -> list[tuple[str, str]]:
    """What the training took and when it has paid, as rows of a table: what, how much.

    The fastest decoder after is set against the fastest before, which need not be one that drafts. Beside an adapter
    the base is as it was, so there it is the fastest that does not draft, in the same measurement. Where the fastest
    afterwards does not draft, only the clock's noise was gained. Times are those of the run's own stages; core-seconds
    too, or, where an older run did not count them, time on the threads that its measurements ran on.
    """
    stages = {name: float(result["seconds"]) for name, result in run["stages"].items()}
    rows = [(f"{name.replace('-', ', round ')}", f"{seconds:.0f} s") for name, seconds in stages.items()]
    total = sum(stages.values())
    rows.append(("collecting and training together", f"{total:.0f} s{_cores(run, total)}"))
    adapted = run.get("recipe", {}).get("mode", "full") == "adapter"
    if not run["models"] or (len(run["models"]) < 2 and not adapted):
        return [*rows, ("break-even", "not known: only one model was measured")]
    after = _fastest(run["models"][-1]["decoders"])
    undrafted = [one for one in run["models"][-1]["decoders"] if one["decoder"] in _UNDRAFTED]
    before = _fastest(undrafted if adapted else run["models"][0]["decoders"])
    rate, gained = before["tokens_per_second"], after["tokens_per_second"]
    for when, decoder in (("before", before), ("after", after)):
        rows.append((f"fastest {when}: {name_of(decoder)}", f"{1000 / decoder['tokens_per_second']:.3f} ms a token"))
    if gained <= rate or after["decoder"] in _UNDRAFTED:
        return [*rows, ("break-even", "never: nothing is faster after the training than before it")]
    saved = 1 / rate - 1 / gained
    return [
        *rows,
        ("saved", f"{1000 * saved:.3f} ms a token"),
        ("break-even", f"{total / saved:,.0f} generated tokens, one request at a time"),
    ]


def _cores(run: Form, total: float) -> str:
    counted = [result.get("core_seconds") for result in run["stages"].values()]
    if counted and all(seconds is not None for seconds in counted):
        return f" ({sum(counted):.0f} core-seconds)"
    threads = next((model["threads"] for model in run["models"] if model.get("threads")), None)
    return f" ({total * threads:.0f} core-seconds on {threads} thread{'' if threads == 1 else 's'})" if threads else ""


def _fastest(decoders: Sequence[Form]) -> Form:
    alone = [decoder for decoder in decoders if decoder.get("batch_size", 1) == 1]
    return max(alone, key=lambda decoder: float(decoder["tokens_per_second"]))
