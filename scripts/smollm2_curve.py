"""What training bought: TPF over training tokens of all rounds, the cost in core-hours, and when it has paid.

    python scripts/smollm2_curve.py runs/smollm2-orders runs/smollm2-orders-cllm runs/smollm2-orders-adapter \
        --table runs/smollm2-orders-table/table.json --output docs/experiments/smollm2-orders

Points are the probes of each run (`evaluation.probe_steps`), placed by the training tokens that its log tells. A token
of the paper's mode is one of a packed row, prompt included; one of an adapter's is a slot of a line at one of its
states: compare the shapes, and the core-hours, not the widths. Where collecting was killed and went on, its core-hours
are those of the last attempt. Break-even is core-seconds of collecting and training over what
a generated token saves against the base's fastest decoder, one request at a time on one thread. Writes OUTPUT.json and
OUTPUT.svg; the last line is JSON.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jacobi_forcing import provenance
from jacobi_forcing.errors import guarded
from jacobi_forcing.files import read_json, write_file, write_json
from jacobi_forcing.viz.gather import Found, gather

Form = Mapping[str, Any]
BASE, LAST_ROUND = "base", "round 2"


def tokens_at(log: Sequence[Form], step: int) -> float:
    """Training tokens at a step of a round: between two lines of the log as if steps were alike.

    Raises:
        SystemExit: The log tells of none: it was written before logs did.
    """
    known = [(0, 0)] + [(int(line["step"]), int(line["train_tokens"])) for line in log if "train_tokens" in line]
    if len(known) < 2:
        raise SystemExit("a log tells no train_tokens; train again with this version")
    for (before, less), (after, more) in itertools.pairwise(known):
        if before <= step <= after:
            return less + (more - less) * (step - before) / max(after - before, 1)
    (before, less), (after, more) = known[-2:]
    return more + (more - less) * (step - after) / max(after - before, 1)


def points(found: Found) -> list[dict[str, Any]]:
    """Every probe of a run, in order: `round`, `step`, training tokens since the first round began, TPF, quality."""
    told, before = [], 0.0
    for number, probe in sorted(found.probes.items()):
        log = found.logs[number]
        for line in probe:
            tokens = round(before + tokens_at(log, int(line["step"])))
            kept = {name: line[name] for name in ("step", "tokens_per_forward", "solve_rate", "repetition_rate")}
            told.append({"round": number, "tokens": tokens, **kept})
        before += tokens_at(log, max(int(line["step"]) for line in log))
    return told


def cost(found: Found) -> dict[str, Any]:
    """Core-hours of every stage of a run that collects or trains, and of all of them."""
    assert found.run is not None
    stages = {name: result["core_seconds"] / 3600 for name, result in found.run["stages"].items()}
    return {"stages": {name: round(hours, 4) for name, hours in stages.items()}, "core_hours": sum(stages.values())}


def label_of(folder: Path) -> str:
    """What the table calls the last model of a run."""
    ends = {"-adapter": "adapter", "-cllm": "CLLM-style"}
    return next((label for end, label in ends.items() if folder.name.endswith(end)), LAST_ROUND)


def fastest(table: Form, label: str) -> Form | None:
    """The row of a model with the greatest speed-up over `ar` of the same run: loads differ between runs."""
    rows = [row for row in table["rows"] if row["model"] == label]
    return max(rows, key=lambda row: float(row["speedup"]), default=None)


def break_even(core_hours: float, table: Form, label: str) -> dict[str, Any]:
    """Generated tokens after which training has paid; `tokens` is None where it never does, or is not known.

    A token takes the base's `ar` the time that was measured, and every decoder that time over its speed-up.
    """
    before, after = fastest(table, BASE), fastest(table, label)
    plain = next((row for row in table["rows"] if (row["model"], row["decoder"]) == (BASE, "ar")), None)
    if before is None or after is None or plain is None:
        return {"tokens": None, "why": "not measured"}
    rates = {"ar_tokens_per_second": plain["tokens_per_second"], "before": before["speedup"], "after": after["speedup"]}
    saved = (1 / before["speedup"] - 1 / after["speedup"]) / plain["tokens_per_second"]
    if saved <= 0:
        return {"tokens": None, "why": "nothing is faster after the training than before it", **rates}
    names = {"decoder_before": before["decoder"], "decoder_after": after["decoder"]}
    return {"tokens": round(core_hours * 3600 / saved), "saved_seconds_a_token": saved, **rates, **names}


def draw(curves: Sequence[Form], out: Path) -> None:
    """TPF over training tokens, and over core-hours as if they were spent evenly over a run's tokens."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.6), layout="constrained")
    over_tokens, over_hours = figure.subplots(1, 2)
    for curve, marker in zip(curves, "osD^vP", strict=False):
        tokens = [point["tokens"] for point in curve["points"]]
        tpf = [point["tokens_per_forward"] for point in curve["points"]]
        hours = [curve["core_hours"] * count / max(*tokens, 1) for count in tokens]
        name = "paper's mode" if curve["label"] == LAST_ROUND else curve["label"]
        (line,) = over_tokens.plot([count / 1000 for count in tokens], tpf, marker=marker, label=name)
        over_hours.plot(hours, tpf, marker=marker, color=line.get_color(), label=name)
        for before, after in itertools.pairwise(curve["points"]):
            if before["round"] != after["round"]:
                over_tokens.axvline(after["tokens"] / 1000, color=line.get_color(), linestyle=":", linewidth=1)
    over_tokens.set(
        xlabel="training tokens, thousands (dotted: a round ends)", ylabel="tokens per forward", ylim=(0, None)
    )
    over_hours.set(xlabel="core-hours, collecting and training", ylabel="tokens per forward", ylim=(0, None))
    over_tokens.legend()
    write_file(out, lambda path: figure.savefig(path, format="svg", facecolor="white", metadata={"Date": None}))


def main() -> None:
    """Read the runs, write both files, print JSON."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("runs", type=Path, nargs="+", help="output folders of recipes")
    parser.add_argument("--table", type=Path, help="table.json of scripts/smollm2_table.py, for the break-even")
    parser.add_argument("--output", type=Path, required=True, help="both files, without their endings")
    asked = parser.parse_args()
    table: Form = read_json(asked.table) if asked.table else {"rows": []}
    curves = []
    for folder in asked.runs:
        found = gather(folder)
        if found.run is None or not found.probes:
            raise SystemExit(f"{folder} is no finished run with probes (evaluation.probe_steps)")
        spent, label = cost(found), label_of(folder)
        even = break_even(spent["core_hours"], table, label)
        curves.append({"run": folder.name, "label": label, **spent, "break_even": even, "points": points(found)})
    value = {"kind": "smollm2-curve", "curves": curves, "provenance": provenance.collect()}
    write_json(asked.output.with_suffix(".json"), value)
    draw(curves, asked.output.with_suffix(".svg"))
    print(json.dumps(value))


if __name__ == "__main__":
    sys.exit(guarded(main))
