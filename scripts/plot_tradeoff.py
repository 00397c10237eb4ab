"""Draw speed against quality over training steps, from the probes of a recipe's run.

Usage::

    pip install matplotlib
    jforce quickstart --set evaluation.probe_steps=100 --set evaluation.probe_prompts=100
    python scripts/plot_tradeoff.py runs/quickstart docs/quickstart.svg
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import matplotlib.pyplot as plt


def read_probes(folder: Path) -> list[tuple[int, float, float]]:
    """(step over all rounds, tokens per forward, solve rate) of every probe, in order."""
    points: list[tuple[int, float, float]] = []
    for path in sorted(folder.glob("round-*/probe.jsonl")):
        before = points[-1][0] if points else 0
        for line in path.read_text(encoding="utf-8").splitlines():
            entry = json.loads(line)
            points.append((before + entry["step"], entry["tokens_per_forward"], entry["solve_rate"]))
    return points


def draw(points: list[tuple[int, float, float]], out: Path) -> None:
    """Both measures over steps, and one against the other."""
    steps, tpf, solved = zip(*points, strict=True)
    percent = [100 * rate for rate in solved]
    figure, (over_steps, against) = plt.subplots(1, 2, figsize=(9, 3.6), layout="constrained")
    over_steps.plot(steps, tpf, "o-", color="tab:blue")
    over_steps.set(xlabel="training steps, both rounds", ylabel="tokens per forward (window)", ylim=(0, None))
    right = over_steps.twinx()
    right.plot(steps, percent, "s--", color="tab:orange")
    right.set(ylabel="held-out problems solved, %", ylim=(0, 103))
    over_steps.yaxis.label.set_color("tab:blue")
    right.yaxis.label.set_color("tab:orange")
    against.plot(tpf, percent, "o-", color="tab:green")
    for step, x, y in dict(zip(steps, zip(steps, tpf, percent, strict=True), strict=True)).values():
        against.annotate(str(step), (x, y), textcoords="offset points", xytext=(4, -10), fontsize=8)
    against.set(xlabel="tokens per forward (window)", ylabel="held-out problems solved, %", ylim=(0, 103))
    figure.savefig(out, facecolor="white", metadata={"Date": None} if out.suffix == ".svg" else None)


def main() -> None:
    """Read a run's probes and write the figure."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run", type=Path, help="output folder of a recipe")
    parser.add_argument("out", type=Path, help="figure to write, .svg or .png")
    args = parser.parse_args()
    points = read_probes(args.run)
    if not points:
        raise SystemExit(f"{args.run} has no probes; run its recipe with evaluation.probe_steps set")
    draw(points, args.out)


if __name__ == "__main__":
    main()
