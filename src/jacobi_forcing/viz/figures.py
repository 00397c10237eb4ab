"""The figures of a report. Each takes figures out of results and gives a drawing, or None where there is nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from jacobi_forcing.viz.style import SERIES, SOFT, Figure, drawing, look

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Form = Mapping[str, Any]
Lines = Mapping[int, Sequence[Form]]
_DECADE = 10
"""Greatest over least value from which on a loss is drawn on a logarithmic axis."""


def series_name(model: Form, decoder: Form) -> str:
    """What a legend calls a decoder of a model, its block size apart."""
    label = f" ({decoder['label']})" if decoder.get("label") else ""
    return f"{model['label']}: {decoder['decoder']}{label}"


def over_block_size(models: Sequence[Form], key: str, name: str, title: str, unit: str) -> Figure | None:
    """A figure of decoders over block size (paper, Fig. 5b), batches of one.

    Args:
        models: `ModelResult.to_dict()` of each.
        key: Of a decoder's result, such as `tokens_per_forward`.
        name: For ids.
        title: What is shown.
        unit: Label of the upright axis.
    """
    found: dict[str, dict[int, float]] = {}
    for model in models:
        for decoder in model["decoders"]:
            if decoder["block_size"] and decoder.get("batch_size", 1) == 1:
                found.setdefault(series_name(model, decoder), {})[int(decoder["block_size"])] = float(decoder[key])
    if not found:
        return None
    sizes = sorted({size for points in found.values() for size in points})
    text = "; ".join(
        f"{label}: " + ", ".join(f"{value:.2f} at n={size}" for size, value in sorted(points.items()))
        for label, points in found.items()
    )
    with drawing(title, text, name, found) as (axes, done):
        for index, points in enumerate(found.values()):
            axes.plot(*zip(*sorted(points.items()), strict=True), **look(index))
        axes.axhline(1, color=SOFT, linewidth=1)
        _doubling(axes, sizes)
        axes.set(xlabel="block size n (tokens)", ylabel=unit)
        axes.set_ylim(0, 1.08 * max(1.0, *(value for points in found.values() for value in points.values())))
    return done[0]


def over_tokens(
    found: Mapping[str, Sequence[tuple[int, float]]],
    name: str,
    title: str,
    unit: str,
    along: str = "parallel tokens in a forward pass",
) -> Figure | None:
    """A figure over a number of tokens, one line for each name."""
    found = {label: points for label, points in found.items() if points}
    if not found:
        return None
    text = "; ".join(
        f"{label}: {points[0][1]:.3g} at {points[0][0]}, {points[-1][1]:.3g} at {points[-1][0]}"
        for label, points in found.items()
    )
    with drawing(title, text, name, found) as (axes, done):
        for index, points in enumerate(found.values()):
            axes.plot(*zip(*points, strict=True), **look(index))
        _doubling(axes, sorted({size for points in found.values() for size, _ in points}))
        axes.set(xlabel=along, ylabel=unit)
        axes.set_ylim(bottom=0)
    return done[0]


def _doubling(axes: Axes, sizes: Sequence[int]) -> None:
    """An axis on which sizes double; of many, every second is named."""
    axes.set_xscale("log", base=2)
    named = sizes if len(sizes) < 10 else sizes[::2]
    axes.set_xticks(named, [str(size) for size in named])
    axes.minorticks_off()
    if len(sizes) == 1:
        axes.set_xlim(sizes[0] / 2, sizes[0] * 2)


def over_steps(rounds: Lines, key: str, name: str, title: str, unit: str, *, log: bool = False) -> Figure | None:
    """A logged figure over training steps, the rounds one behind the other."""
    steps, values, ends, before = [], [], [], 0
    for number in sorted(rounds):
        lines = [line for line in rounds[number] if line.get(key) is not None]
        steps += [before + int(line["step"]) for line in lines]
        values += [float(line[key]) for line in lines]
        before += max((int(line["step"]) for line in rounds[number]), default=0)
        ends.append(before)
    if not values:
        return None
    text = f"{values[0]:.4g} at step {steps[0]}, {values[-1]:.4g} at step {steps[-1]}, least {min(values):.4g}"
    with drawing(title, text, name) as (axes, done):
        axes.plot(steps, values, color=SERIES[0], marker="o", markersize=3)
        for end in ends[:-1]:
            axes.axvline(end, color=SOFT, linestyle=":", linewidth=1)
        if log and max(values) > _DECADE * min(values) > 0:
            axes.set_yscale("log")
        else:
            axes.set_ylim(bottom=0)
        axes.set(
            xlabel="training steps" + (", all rounds (dotted: a round ends)" if len(ends) > 1 else ""), ylabel=unit
        )
    return done[0]


def accepted(decoders: Sequence[tuple[str, Form]], name: str) -> Figure | None:
    """How many tokens a forward added: share of forwards, for a few decoders."""
    found = {label: _shares(decoder["accepted"]) for label, decoder in decoders if decoder["accepted"]}
    if not found:
        return None
    text = "; ".join(
        f"{label}: {100 * shares.get(1, 0):.0f} % of forwards added one token, the most {max(shares)}"
        for label, shares in found.items()
    )
    with drawing("Tokens that a forward pass added", text, name, found) as (axes, done):
        for index, shares in enumerate(found.values()):
            lengths = range(1, max(shares) + 1)
            axes.plot(lengths, [100 * shares.get(n, 0) for n in lengths], **look(index))
        axes.set(xlabel="tokens added by a forward pass", ylabel="share of forward passes (%)")
        axes.set_ylim(bottom=0)
    return done[0]


def _shares(counts: Mapping[str, int]) -> dict[int, float]:
    total = sum(counts.values())
    return {int(length): count / total for length, count in counts.items()}


def accuracy(decoders: Sequence[tuple[str, Form]], name: str) -> Figure | None:
    """Share of right guesses by distance from the accepted text, for a few decoders."""
    found = {label: decoder["draft_accuracy"] for label, decoder in decoders if decoder["draft_accuracy"]}
    if not found:
        return None
    text = "; ".join(f"{label}: {100 * shares[0]:.0f} % at distance 1" for label, shares in found.items())
    with drawing("Right guesses by distance behind the accepted text", text, name, found) as (axes, done):
        for index, shares in enumerate(found.values()):
            style = {**look(index), "markersize": 3}
            axes.plot(range(1, len(shares) + 1), [100 * share for share in shares], **style)
        axes.set(xlabel="distance behind the accepted text (tokens)", ylabel="guesses that are right (%)")
        axes.set_ylim(0, 103)
    return done[0]


def latency(decoders: Sequence[tuple[str, Form]], name: str) -> Figure | None:
    """Seconds a request: share of requests that took no longer, for a few decoders."""
    found = {
        label: sorted(decoder["requests"]["seconds"])
        for label, decoder in decoders
        if decoder.get("requests") and decoder["requests"]["seconds"]
    }
    if not found:
        return None
    text = "; ".join(
        f"{label}: half of {len(seconds)} within {seconds[(len(seconds) - 1) // 2]:.3g} s, all in {seconds[-1]:.3g} s"
        for label, seconds in found.items()
    )
    with drawing("Seconds a request", text, name, found) as (axes, done):
        for index, seconds in enumerate(found.values()):
            shares = [100 * (place + 1) / len(seconds) for place in range(len(seconds))]
            style = look(index)
            axes.step([0, *seconds], [0, *shares], where="post", color=style["color"], ls=style["linestyle"])
        axes.set(xlabel="wall time of a request (seconds)", ylabel="requests that took no longer (%)")
        axes.set_ylim(0, 103)
        axes.set_xlim(left=0)
    return done[0]
