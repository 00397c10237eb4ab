"""Two results of one kind against each other: what differs, how surely, and whether it stays within bounds."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from jacobi_forcing.errors import ConfigError
from jacobi_forcing.evaluate.statistics import mcnemar, paired_bootstrap
from jacobi_forcing.formats import Result
from jacobi_forcing.viz.entries import Entry, Form, common_ground, entries

METRICS: Mapping[str, str] = {
    "tpf": "TPF of the second over that of the first",
    "tps": "TPS of the second over that of the first",
    "speedup": "speed-up of the second over that of the first",
    "solved": "solve rate of the second less that of the first",
    "exact": "share of the second's answers that are exact",
}
"""What may be held against a bound."""


@dataclasses.dataclass(frozen=True)
class Change:
    """One decoder in both results.

    Attributes:
        first: In the first.
        second: In the second.
        paired: Whether both have figures of the same requests, one by one.
    """

    first: Entry
    second: Entry
    paired: bool

    def value(self, metric: str) -> float | None:
        """One of `METRICS`; None where one of both does not know it."""
        if metric == "exact":
            return self.second.exact / self.second.of if self.second.of else None
        if metric == "solved":
            one, other = self.first.solve_rate, self.second.solve_rate
            return None if one is None or other is None else other - one
        one, other = getattr(self.first, metric), getattr(self.second, metric)
        return None if not one or other is None else other / one

    def quality(self) -> str:
        """What the difference in solve rate is worth; empty where there is none to tell of."""
        bounds_ = self.solved_interval()
        if bounds_ is None:
            return ""
        low, high = (100 * bound for bound in bounds_)
        how = "item by item" if self._graded else "as of independent samples"
        verdict = "no difference is shown" if low <= 0 <= high else "a difference"
        points = 100 * (self.value("solved") or 0.0)
        said = f"solve rate {points:+.1f} points, 95 % {low:+.1f} to {high:+.1f} ({how}): {verdict}"
        if self._graded:
            pairs = list(zip(self.first.right or [], self.second.right or [], strict=True))
            won, lost = sum(new and not old for old, new in pairs), sum(old and not new for old, new in pairs)
            said += f"; {won} items newly right, {lost} newly wrong, p = {mcnemar(lost, won):.3f} (McNemar)"
        return said + "."

    def pace(self) -> str:
        """Speed request by request; empty where requests are not known one by one."""
        if not self.paired:
            return ""
        pairs = list(zip(self.first.requests, self.second.requests, strict=True))
        ratios = [(new.tokens / new.seconds) / (old.tokens / old.seconds) for old, new in pairs]
        gains = [[request.tokens / request.forwards for request in side] for side in zip(*pairs, strict=True)]
        low, high = paired_bootstrap(gains[1], gains[0], resamples=2000)
        return (
            f"request by request: TPS {statistics.median(ratios):.2f}× in the median of {len(ratios)}, faster in "
            f"{sum(ratio > 1 for ratio in ratios)}; TPF {statistics.mean(gains[1]) - statistics.mean(gains[0]):+.2f} "
            f"(95 %: {low:+.2f} to {high:+.2f})."
        )

    @property
    def _graded(self) -> bool:
        one, other = self.first.right, self.second.right
        return bool(one and other and len(one) == len(other))

    def solved_interval(self) -> tuple[float, float] | None:
        """95 % interval of the difference in solve rate.

        Paired bootstrap where items are known one by one; else Newcombe's interval out of both Wilson intervals
        (Statistics in Medicine 17, 1998, method 10).
        """
        if self._graded:
            one, other = self.first.right or [], self.second.right or []
            return paired_bootstrap([float(right) for right in other], [float(right) for right in one], resamples=2000)
        change, old, new = self.value("solved"), self.first.solve_interval, self.second.solve_interval
        if change is None or old is None or new is None:
            return None
        before, after = self.first.solve_rate or 0.0, self.second.solve_rate or 0.0
        low = ((after - new[0]) ** 2 + (old[1] - before) ** 2) ** 0.5
        high = ((new[1] - after) ** 2 + (before - old[0]) ** 2) ** 0.5
        return change - low, change + high

    def to_dict(self) -> dict[str, Any]:
        """For JSON: names, both sides' figures, and every metric."""
        interval = self.solved_interval()
        return {
            "model": self.first.model,
            "compared_with": self.second.model,
            "decoder": self.first.decoder,
            "block_size": self.first.block_size,
            "label": self.first.label,
            "batch_size": self.first.batch_size,
            "first": self.first.to_dict(),
            "second": self.second.to_dict(),
            **{metric: self.value(metric) for metric in METRICS},
            "solved_interval": None if interval is None else list(interval),
            "paired": self.paired,
        }


@dataclasses.dataclass(frozen=True)
class Comparison:
    """Two results side by side.

    Attributes:
        changes: What both have.
        notes: What only one has, and what makes figures hard to compare.
    """

    changes: list[Change]
    notes: list[str]


def compare(first: Result, second: Result, items: tuple[Sequence[Form], Sequence[Form]] = ((), ())) -> Comparison:
    """Set two results against each other.

    Args:
        first: What was before.
        second: What is now.
        items: Lines of `items.jsonl` beside each, of evaluations.

    Raises:
        DataError: They are of unlike kinds, were measured on different prompts or tasks, or have nothing in common.
    """
    notes = common_ground(first, second)
    old, new, more = entries(first, second, items)
    notes += more
    by_key = {entry.key: entry for entry in new}
    changes = []
    for entry in old:
        other = by_key.pop(entry.key, None)
        if other is None:
            notes.append(f"{entry.name} is in the first only.")
        else:
            paired = bool(entry.requests) and entry.batch_size == 1 and entry.asked == other.asked
            changes.append(Change(entry, other, paired and len(entry.requests) == len(other.requests)))
    notes += [f"{entry.name} is in the second only." for entry in by_key.values()]
    notes.append(
        "TPS of two runs tells of the machine's load too; speed-ups are ratios within one run. Without --fail-below "
        "nothing here passes or fails."
    )
    return Comparison(changes, notes)


COLUMNS = ("model", "decoder", "n", "solved", "repeats", "exact", "TPF", "TPS", "speed-up")


def rows(comparison: Comparison) -> list[tuple[str, ...]]:
    """Cells under `COLUMNS`: first → second. Speed never stands without quality."""
    return [_row(change.first, change.second, change) for change in comparison.changes]


def remarks(comparison: Comparison) -> list[str]:
    """Sentences under the table: quality of each model, once where its decoders agree; then speeds; then notes."""
    said: dict[str, None] = {}
    for change in comparison.changes:
        same = {other.quality() for other in comparison.changes if other.first.model == change.first.model}
        if change.quality():
            said[f"{change.first.model if len(same) == 1 else change.first.name}: {change.quality()}"] = None
    said |= dict.fromkeys(f"{change.first.name}, {change.pace()}" for change in comparison.changes if change.paired)
    return [*said, *comparison.notes]


def _row(one: Entry, other: Entry, change: Change) -> tuple[str, ...]:
    model = one.model if one.model == other.model else f"{one.model} → {other.model}"
    return (
        model,
        one.decoder
        + (f" ({one.label})" if one.label else "")
        + (f", batch {one.batch_size}" if one.batch_size > 1 else ""),
        "–" if one.block_size is None else str(one.block_size),
        _arrow(_share(one.solve_rate), _share(other.solve_rate)),
        _arrow(_share(one.repetition_rate), _share(other.repetition_rate)),
        _arrow(_exact(one), _exact(other)),
        _arrow(f"{one.tpf:.2f}", f"{other.tpf:.2f}"),
        _arrow(_rate(one.tps), _rate(other.tps)) + _ratio(change.value("tps")),
        _arrow(_times(one.speedup), _times(other.speedup)),
    )


def _share(value: float | None) -> str:
    return "–" if value is None else f"{100 * value:.1f} %"


def _arrow(one: str, other: str) -> str:
    return one if one == other else f"{one} → {other}"


def _rate(value: float) -> str:
    return f"{value:.0f}" if value >= 10 else f"{value:.1f}"


def _exact(entry: Entry) -> str:
    return f"{entry.exact}/{entry.of}" if entry.of else "–"


def _times(speedup: float) -> str:
    return f"{speedup:.2f}×" if speedup else "–"


def _ratio(ratio: float | None) -> str:
    return "" if ratio is None else f" ({ratio:.2f}×)"


def bounds(texts: Sequence[str]) -> dict[str, float]:
    """Bounds out of `metric=least` texts.

    Raises:
        ConfigError: One has no such form, or names another metric.
    """
    found = {}
    for text in texts:
        metric, _, least = text.partition("=")
        try:
            found[metric] = float(least)
        except ValueError as error:
            raise ConfigError(
                "A bound has a wrong form", seen=text, expected="metric=number, such as tps=0.9"
            ) from error
        if metric not in METRICS:
            raise ConfigError(f"There is no metric '{metric}'", expected="one of " + ", ".join(METRICS))
    return found


def failures(comparison: Comparison, least: Mapping[str, float]) -> list[str]:
    """What lies below its bound, or cannot be held against it: a check that does not know has not passed."""
    said = []
    for change in comparison.changes:
        for metric, bound in least.items():
            value = change.value(metric)
            if value is None:
                said.append(f"{change.first.name}: {metric} is not known, at least {bound:g} is asked for")
            elif value < bound:
                said.append(
                    f"{change.first.name}: {metric} is {value:.4g}, at least {bound:g} is asked for ({METRICS[metric]})"
                )
    return said
