"""A trace in the terminal: one line a sweep, one colour a state."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.text import Text

from jacobi_forcing.viz.trace import STATES
from jacobi_forcing.viz.trace_page import figures, title, used_states

_STYLES = {
    "accepted": "bold white on dark_green",
    "recycled": "bold white on purple4",
    "predicted": "bold white on blue3",
    "pseudo": "black on khaki1",
    "converged": "black on light_salmon1",
    "waiting": "black on pale_green1",
    "noisy": "dim",
    "beyond": "dim strike",
}
_MARKS = {
    "accepted": ("[", "]"),
    "recycled": ("«", "»"),
    "predicted": ("(", ")"),
    "pseudo": ("<", ">"),
    "converged": ("{", "}"),
    "waiting": ("*", "*"),
    "beyond": ("~", "~"),
}
"""Where there are no colours, each run of slots of one state stands between these; noise stands alone."""
_NONE = ("", "")


def show(trace: Mapping[str, Any], *, to_stderr: bool = False) -> None:
    """Print every sweep, then what the marks mean and what the answer took."""
    file = sys.stderr if to_stderr else sys.stdout
    console = Console(file=file, highlight=False, soft_wrap=True)
    coloured = console.is_terminal and console.color_system is not None
    console.print(Text(title(trace), style="bold"))
    for number, sweep in enumerate(trace["sweeps"], 1):
        console.print(Text.assemble((f"{number:4d}  +{sweep['accepted']:<3d} ", "dim"), line(trace, sweep, coloured)))
        for index, candidate in enumerate(sweep["candidates"], 1):
            won = " won" if index == sweep["line"] else ""
            text = "".join(trace["texts"][str(token)] for token in candidate)
            console.print(Text(f"      pool {index}{won}: {text}", style="bold" if won else "dim"))
    for state in used_states(trace):
        left, right = _MARKS.get(state, _NONE)
        sample = (f" {state} ", _STYLES[state]) if coloured else f"{left}{state}{right}"
        console.print(Text.assemble(sample, f"  {STATES[state]}"))
    console.print(Text(figures(trace)))


def line(trace: Mapping[str, Any], sweep: Mapping[str, Any], coloured: bool) -> Text:
    """The slots of one sweep, by colour or between marks."""
    text, last = Text(), ""
    for token, index in sweep["slots"]:
        state, piece = trace["states"][index], trace["texts"][str(token)]
        if coloured:
            text.append(piece, _STYLES[state])
            continue
        if state != last:
            text.append(_MARKS.get(last, _NONE)[1] + _MARKS.get(state, _NONE)[0])
        text.append(piece)
        last = state
    return text.append(_MARKS.get(last, _NONE)[1]) if not coloured else text
