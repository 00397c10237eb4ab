"""Counts of a decoding run: exact tokens and forwards, prefill included."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field


@dataclass
class RowStats:
    """What decoding one row took.

    Attributes:
        tokens: Generated tokens, the end-of-text token included.
        accepted: For each forward pass, how many tokens it added to the text (prefill first).
    """

    tokens: int = 0
    accepted: list[int] = field(default_factory=list)

    @property
    def forwards(self) -> int:
        """Forward passes, prefill included."""
        return len(self.accepted)

    @property
    def tokens_per_forward(self) -> float:
        """TPF: generated tokens / forward passes. Greedy AR is exactly 1.0."""
        return self.tokens / self.forwards if self.forwards else 0.0

    @property
    def histogram(self) -> dict[int, int]:
        """How many forwards added 1, 2, 3, … tokens."""
        return dict(sorted(Counter(self.accepted).items()))


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
