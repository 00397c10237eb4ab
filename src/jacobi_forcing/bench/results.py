"""What was measured: one result for each contestant and batch size, and all of them for a model."""

from __future__ import annotations

import dataclasses
import statistics
from typing import Any

import torch

from jacobi_forcing.bench.contestants import AR, LIBRARY, Contestant, Turn
from jacobi_forcing.bench.exactness import Mismatch
from jacobi_forcing.bench.latency import latency
from jacobi_forcing.bench.overhead import Overhead
from jacobi_forcing.bench.strata import Traits, strata
from jacobi_forcing.config import DecodeConfig, Task
from jacobi_forcing.decode.stats import DecodeStats
from jacobi_forcing.evaluate.quality import Quality

SCHEMA_VERSION = 2
"""Version of the JSON form of a `ModelResult`; raised whenever a reader of the old form would misread the new one."""


@dataclasses.dataclass(frozen=True)
class DecoderResult:
    """One contestant over all prompts, in batches of one size.

    Attributes:
        contestant: Who was measured.
        batch_size: Rows side by side.
        turns: Its timed calls, one for each batch.
        pace: Those of `ar` on the same batches, the measure of its speed.
        reference: Who its ids were compared with: `ar`, or the library for `ar` itself.
        mismatches: Where they differ.
        quality: Of its own answers.
        cost_ratio: Time of a forward of `median_slots` tokens a row over that of one token a row; None for `ar` and the
            library, which never take more.
        traits: Of the requests, in order.
    """

    contestant: Contestant
    batch_size: int
    turns: list[Turn]
    pace: list[Turn]
    reference: str
    mismatches: list[Mismatch]
    quality: Quality
    cost_ratio: float | None = None
    traits: list[Traits] = dataclasses.field(default_factory=list)

    @property
    def decoder(self) -> str:
        """Its name."""
        return self.contestant.name

    @property
    def decode(self) -> DecodeConfig | None:
        """Its settings; None for the library's decoders."""
        return self.contestant.decode

    @property
    def answers(self) -> int:
        """Answers that were timed."""
        return sum(len(turn.ids) for turn in self.turns)

    @property
    def tokens(self) -> int:
        """Generated tokens, end tokens included."""
        return sum(turn.tokens for turn in self.turns)

    @property
    def forwards(self) -> int:
        """Forward passes of the model, prefill included, summed over rows."""
        return sum(turn.row_forwards for turn in self.turns)

    @property
    def seconds(self) -> float:
        """Wall time, prefill included."""
        return sum(turn.seconds for turn in self.turns)

    @property
    def tokens_per_second(self) -> float:
        """TPS, over all rows."""
        return self.tokens / self.seconds

    @property
    def tokens_per_forward(self) -> float:
        """TPF: the mean that a row on its own shows."""
        return self.tokens / self.forwards

    @property
    def speedup(self) -> float:
        """TPS over that of `ar` on the same weights and batches in the same run."""
        return self.tokens_per_second / (sum(t.tokens for t in self.pace) / sum(t.seconds for t in self.pace))

    @property
    def median_speedup(self) -> float:
        """The median of that ratio over batches."""
        return statistics.median(
            (turn.tokens / turn.seconds) / (other.tokens / other.seconds)
            for turn, other in zip(self.turns, self.pace, strict=True)
        )

    @property
    def exact(self) -> int:
        """Answers whose ids equal the reference's, token for token."""
        return self.answers - len(self.mismatches)

    @property
    def near_ties(self) -> int:
        """Answers that differ, and rounding explains it."""
        return sum(mismatch.near_tie for mismatch in self.mismatches)

    @property
    def faults(self) -> int:
        """Answers that differ, and nothing explains it."""
        return len(self.mismatches) - self.near_ties

    @property
    def slots(self) -> list[int]:
        """Tokens a row of every forward behind the prefills; that of `ar` where there is none."""
        return [width for turn in self.turns for width in turn.widths[1:]] or [1]

    @property
    def median_slots(self) -> int:
        """The size of forward that this decoder runs."""
        return round(statistics.median(self.slots))

    def to_dict(self) -> dict[str, Any]:
        """For JSON: speed, exactness and quality together."""
        stats = DecodeStats([row for turn in self.turns for row in turn.rows or []])
        size = self.decode.block_size if self.decode is not None and self.decoder != AR else None
        return {
            "decoder": self.decoder,
            "block_size": size,
            "settings": self.contestant.settings,
            "label": self.contestant.label,
            "batch_size": self.batch_size,
            "tokens": self.tokens,
            "forwards": self.forwards,
            "model_forwards": sum(len(turn.widths) for turn in self.turns),
            "assistant_forwards": sum(turn.assistant_forwards for turn in self.turns),
            "tokens_per_forward": self.tokens_per_forward,
            "seconds": self.seconds,
            "tokens_per_second": self.tokens_per_second,
            "speedup": self.speedup,
            "median_speedup": self.median_speedup,
            "exact": self.exact,
            "near_ties": self.near_ties,
            "faults": self.faults,
            "of": self.answers,
            "exact_against": self.reference,
            "mismatches": [mismatch.to_dict() for mismatch in self.mismatches],
            "quality": self.quality.to_dict(),
            "mean_slots": round(statistics.mean(self.slots), 2),
            "median_slots": self.median_slots,
            "cost_ratio": self.cost_ratio,
            "accepted": {str(length): count for length, count in stats.histogram.items()},
            "lines_won": {str(line): count for line, count in stats.lines_won.items()},
            "draft_accuracy": [round(share, 4) for share in stats.draft_accuracy],
            "latency": latency(self.turns),
            "strata": strata(self.turns, self.pace, self.traits, [mismatch.prompt for mismatch in self.mismatches]),
            "requests": {
                "tokens": [len(ids) for turn in self.turns for ids in turn.ids],
                "forwards": [forwards for turn in self.turns for forwards in turn.each],
                "seconds": [turn.seconds for turn in self.turns for _ in turn.ids],
            },
        }


@dataclasses.dataclass(frozen=True)
class Cost:
    """What a forward costs on this machine.

    Attributes:
        batch_size: Rows.
        slots: Tokens a row.
        context: Committed tokens before them.
        seconds: Median wall time.
        ratio: Over that of one token a row.
    """

    batch_size: int
    slots: int
    context: int
    seconds: float
    ratio: float


@dataclasses.dataclass(frozen=True)
class ModelResult:
    """All contestants on one model, and what forwards cost on this machine."""

    label: str
    model: str
    dtype: str
    device: str
    max_new_tokens: int
    task: Task
    prompts: int
    decoders: list[DecoderResult]
    cost: list[Cost]
    overhead: list[Overhead] = dataclasses.field(default_factory=list)
    traits: list[Traits] = dataclasses.field(default_factory=list)
    packed_weights: bool = False

    def __getitem__(self, decoder: str) -> DecoderResult:
        """The first result of a decoder."""
        return next(result for result in self.decoders if result.decoder == decoder)

    def to_dict(self) -> dict[str, Any]:
        """For JSON, with the schema's version."""
        return {
            "version": SCHEMA_VERSION,
            "label": self.label,
            "model": self.model,
            "dtype": self.dtype,
            "device": self.device,
            "threads": torch.get_num_threads() if self.device == "cpu" else None,
            "packed_weights": self.packed_weights,
            "max_new_tokens": self.max_new_tokens,
            "task": self.task,
            "prompts": self.prompts,
            "decoders": [result.to_dict() for result in self.decoders],
            "cost": [dataclasses.asdict(entry) for entry in self.cost],
            "overhead": [entry.to_dict() for entry in self.overhead],
            "items": [traits.to_dict() for traits in self.traits],
        }


def never_drafts(contestant: Contestant) -> bool:
    """Whether it takes one token a forward, whatever its settings."""
    return contestant.name in (AR, LIBRARY)
