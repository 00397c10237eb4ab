"""Counts of a decoding run: exact tokens and forwards, prefill included, and what became of every draft."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class SweepStats:
    """One forward pass of one row.

    Attributes:
        proposed: Guesses in all lines, tokens.
        accepted: Tokens that it added to the text: accepted guesses and the prediction behind them.
        line: Index of the line that won: 0 the draft, 1, 2, … candidates.
        slots: Tokens that went through the model, the prompt's in the prefill included.
    """

    proposed: int
    accepted: int
    line: int
    slots: int


@dataclass
class RowStats:
    """What decoding one row took.

    Attributes:
        tokens: Generated tokens, the end-of-text token included.
        sweeps: Every forward pass, prefill first.
        right: How many draft guesses at each distance from the accepted prefix (0 is next to it) the final text has.
        tried: How many draft guesses were made at each distance, those beyond the end of the text not counted.
    """

    tokens: int = 0
    sweeps: list[SweepStats] = field(default_factory=list)
    right: list[int] = field(default_factory=list)
    tried: list[int] = field(default_factory=list)

    def __repr__(self) -> str:
        return f"RowStats(tokens={self.tokens}, forwards={self.forwards}, TPF={self.tokens_per_forward:.2f})"

    @property
    def accepted(self) -> list[int]:
        """For each forward pass, how many tokens it added to the text (prefill first)."""
        return [sweep.accepted for sweep in self.sweeps]

    @property
    def forwards(self) -> int:
        """Forward passes, prefill included."""
        return len(self.sweeps)

    @property
    def tokens_per_forward(self) -> float:
        """TPF: generated tokens / forward passes. Greedy AR is exactly 1.0."""
        return self.tokens / self.forwards if self.forwards else 0.0

    @property
    def histogram(self) -> dict[int, int]:
        """How many forwards added 1, 2, 3, … tokens."""
        return dict(sorted(Counter(self.accepted).items()))

    @property
    def lines_won(self) -> dict[int, int]:
        """How many forwards each line won: 0 the draft, 1, 2, … candidates."""
        return dict(sorted(Counter(sweep.line for sweep in self.sweeps).items()))

    @property
    def draft_accuracy(self) -> list[float]:
        """Share of right guesses by distance from the accepted prefix, whether or not they were accepted there."""
        return shares(self.right, self.tried)

    def grade(self, text: Sequence[int], drafts: Sequence[tuple[int, Sequence[int]]]) -> None:
        """Fill `right` and `tried`.

        Args:
            text: The final generated tokens.
            drafts: For each forward pass the length of the accepted text, and the guesses behind it.
        """
        longest = max((len(guesses) for _, guesses in drafts), default=0)
        self.right, self.tried = [0] * longest, [0] * longest
        for start, guesses in drafts:
            for distance, (guess, token) in enumerate(zip(guesses, text[start:], strict=False)):
                self.tried[distance] += 1
                self.right[distance] += guess == token
        while self.tried and not self.tried[-1]:
            self.tried.pop()
            self.right.pop()


@dataclass
class DecodeStats:
    """Counts of a batch; `rows` has them apart.

    A batched forward serves several rows at once: `forwards` counts each row's own, so that `tokens_per_forward` is
    the mean that a batch of one would show.
    """

    rows: list[RowStats]

    @property
    def tokens(self) -> int:
        """Generated tokens of all rows."""
        return sum(row.tokens for row in self.rows)

    @property
    def forwards(self) -> int:
        """Forward passes, summed over rows."""
        return sum(row.forwards for row in self.rows)

    @property
    def tokens_per_forward(self) -> float:
        """TPF over all rows."""
        return self.tokens / self.forwards if self.forwards else 0.0

    @property
    def histogram(self) -> dict[int, int]:
        """How many forwards added 1, 2, 3, … tokens to their row."""
        counts: Counter[int] = Counter()
        for row in self.rows:
            counts.update(row.histogram)
        return dict(sorted(counts.items()))

    @property
    def lines_won(self) -> dict[int, int]:
        """How many forwards each line won: 0 the draft, 1, 2, … candidates."""
        counts: Counter[int] = Counter()
        for row in self.rows:
            counts.update(row.lines_won)
        return dict(sorted(counts.items()))

    @property
    def draft_accuracy(self) -> list[float]:
        """Share of right guesses by distance from the accepted prefix, over all rows."""
        return shares(_summed([row.right for row in self.rows]), _summed([row.tried for row in self.rows]))


def _summed(counts: Sequence[Sequence[int]]) -> list[int]:
    longest = max(map(len, counts), default=0)
    return [sum(row[place] for row in counts if place < len(row)) for place in range(longest)]


def one_by_one(tokens: int) -> RowStats:
    """Counts of a row that was decoded by the library, one token a forward."""
    return RowStats(tokens, [SweepStats(0, 1, 0, 1)] * tokens)


def shares(right: Sequence[int], tried: Sequence[int]) -> list[float]:
    """Element by element right / tried; 0 where nothing was tried."""
    return [good / all_ if all_ else 0.0 for good, all_ in zip(right, tried, strict=True)]
