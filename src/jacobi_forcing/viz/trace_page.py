"""A trace as one page of HTML that needs nothing else: no network, no script of others, light and dark."""

from __future__ import annotations

import importlib.resources
import json
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from jacobi_forcing.viz.page import fill
from jacobi_forcing.viz.trace import STATES

Trace = Mapping[str, Any]
_SETTINGS = ("block_size", "candidates", "num_blocks", "spawn_ratio", "draft_init")


def page(trace: Trace) -> str:
    """The page of a trace."""
    sweeps = trace["sweeps"]
    template = (importlib.resources.files(__package__) / "trace.html").read_text(encoding="utf-8")
    return fill(
        template,
        title=escape(title(trace)),
        figures=escape(figures(trace)),
        settings=escape(settings(trace)),
        most=str(max(sweep["accepted"] for sweep in sweeps)),
        forwards=str(len(sweeps)),
        legend=_legend(used_states(trace)),
        all="\n".join(_line(trace, number, sweep) for number, sweep in enumerate(sweeps, 1)),
        prompt=escape(_text(trace, trace["prompt"])),
        answer=escape(_text(trace, trace["generated"])),
        # What ends a script element, or opens a comment in one, stands in no token then.
        data=json.dumps(trace, ensure_ascii=False).replace("<", "\\u003c"),
    )


def title(trace: Trace) -> str:
    """Decoder and model."""
    decode = trace["decode"]
    size = "" if decode["decoder"] == "ar" else f" n={decode['block_size']}"
    beside = f" + {trace['adapter']}" if trace["adapter"] else ""
    return f"{decode['decoder']}{size} on {trace['model']}{beside}"


def figures(trace: Trace) -> str:
    """What it took, never without what the answer is worth."""
    state = "ends in a loop" if trace["repeats"] else "ends by itself" if trace["finished"] else "met the token limit"
    return (
        f"{trace['tokens']} tokens in {trace['forwards']} forward passes, the prompt's included: "
        f"{trace['tokens_per_forward']:.2f} tokens a forward. The answer {state}."
    )


def settings(trace: Trace) -> str:
    """The decoder's settings that a reader may look for."""
    return ", ".join(f"{name} {trace['decode'][name]}" for name in _SETTINGS if name in trace["decode"])


def used_states(trace: Trace) -> list[str]:
    """States that some slot has, in the order of `STATES`."""
    seen = {trace["states"][state] for sweep in trace["sweeps"] for _, state in sweep["slots"]}
    return [state for state in STATES if state in seen]


def _legend(states: Sequence[str]) -> str:
    return "\n".join(
        f'<dt><span class="slot {state}">{state}</span></dt><dd>{escape(STATES[state])}</dd>' for state in states
    )


def _line(trace: Trace, number: int, sweep: Mapping[str, Any]) -> str:
    """One sweep in the list of all."""
    text, spans = trace["generated"], []
    for slot, (token, state) in enumerate(sweep["slots"]):
        place = sweep["known"] + slot
        right = slot >= sweep["accepted"] and place < len(text) and text[place] == token
        spans.append(
            f'<span class="slot {trace["states"][state]}{" right" if right else ""}">'
            f"{escape(trace['texts'][str(token)])}</span>"
        )
    return (
        f'<div class="number">sweep {number}</div><div class="number">+{sweep["accepted"]}</div>'
        f'<div class="text">{"".join(spans)}</div>'
    )


def _text(trace: Trace, ids: Sequence[int]) -> str:
    return "".join(trace["texts"][str(token)] for token in ids).replace("⏎", "⏎\n")
