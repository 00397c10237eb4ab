"""One row's state machine for each decoder.

A row asks for one sweep at a time: `propose` gives the lines to sweep, `absorb` takes the predictions, keeps the line
of which most was accepted, and prepares the next draft. Slot 0 of every line is the last token of the text so far,
which is right but whose KV is not in the cache yet; the slots behind it are guesses. The first line is the draft; any
others are candidates out of the n-gram pool.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Sequence
from typing import ClassVar

from jacobi_forcing.blocks import common_prefix, first_eos
from jacobi_forcing.config import DecodeConfig
from jacobi_forcing.decode.drafts import DraftFill
from jacobi_forcing.decode.ngrams import NgramPool
from jacobi_forcing.decode.stats import RowStats, SweepStats
from jacobi_forcing.sweep import Line

VERIFY = 0.1
"""Least chance, as the draft sees it, of being right together with all before it, for a guess to be verified."""
SKIP = 0.9
"""Least such chance for a guess to be left out of the line that drafts: the slots behind build on the verified copy."""

Stop = Callable[[Sequence[int]], bool]
"""Whether a text (prompt and generated ids) ends with its last token, for another reason than an end token."""


class Row:
    """One row that decodes with the decoder `ar`: no guesses at all. The other decoders add guesses.

    Args:
        prompt: Ids of the prompt, at least one.
        config: The decoder's settings.
        eos_ids: Ids that end the text; may be empty.
        max_new_tokens: Budget of generated tokens, at least 1.
        fill: Where guesses for new slots come from.
        pool: Where candidates come from, for the decoders that have any.
        stop: What else ends the text, asked about every new token.

    Attributes:
        drafts_apart: Whether the model has a gated adapter: then the base verifies lines, and the draft's next state is
            predicted on a gated line of its own. To be set before the first `propose`.
        guesses: The draft: guesses for the tokens behind the text.
        hopeful: How many leading ones are worth verifying where drafts have a line of their own, see `VERIFY`; of fresh
            fill none is. Without such a line all are verified, for the sake of what is predicted.
        skipped: How many leading ones are so likely right that the line that drafts begins behind them, see `SKIP`.
        padding: Left padding that the row had in the caller's batch, tokens.
        sample: Which sample of its prompt this is; rows of one prompt differ in it.
        recycles: Whether the decoder verifies candidates beside the draft.
    """

    recycles: ClassVar[bool] = False

    def __init__(
        self,
        prompt: Sequence[int],
        config: DecodeConfig,
        eos_ids: Sequence[int],
        max_new_tokens: int,
        fill: DraftFill,
        pool: NgramPool | None = None,
        stop: Stop | None = None,
    ) -> None:
        self.config = config
        self.eos_ids = list(eos_ids)
        self.max_new_tokens = max_new_tokens
        self.fill = fill
        self.pool = pool
        self.stop = stop
        self.drafts_apart = False
        self.padding, self.sample = 0, 0
        self.text = list(prompt)
        self.prompt_length = len(self.text)
        self.known = 0
        self.stats = RowStats()
        self.finished = False
        self._drafts: list[tuple[int, list[int]]] = []
        if pool is not None and config.prompt_ngrams:
            pool.add(self.text)
        self.guesses = self._capped(self._first_guesses())
        self.hopeful, self.skipped = 0, 0
        self.candidates: list[list[int]] = []

    # What a decoder decides ------------------------------------------------------------------------------------

    def _first_guesses(self) -> list[int]:
        """Guesses for the tokens behind the prompt; they ride along in the prefill forward."""
        return []

    def _refined(self, predictions: list[int], start: int) -> None:
        """Told of the draft's predictions once the text has grown, `guesses` being those that were swept.

        Args:
            predictions: Index i is for the generated token at `start + i`.
            start: Number of generated tokens before the sweep.
        """

    def _next_guesses(self, leftover: list[int]) -> list[int]:
        """Guesses behind the last known token.

        Args:
            leftover: Predictions made behind the accepted prefix, the first one for the token after the last known.
        """
        return []

    # What all decoders share -----------------------------------------------------------------------------------

    @property
    def prompt(self) -> list[int]:
        """Ids of the prompt."""
        return self.text[: self.prompt_length]

    @property
    def generated(self) -> list[int]:
        """Generated ids."""
        return self.text[self.prompt_length :]

    @property
    def pseudo_accepted(self) -> list[tuple[int, int]]:
        """Of each block behind the first the guesses that the last sweep agreed with: first generated token, count."""
        return []

    @property
    def first_needed(self) -> int:
        """First slot whose prediction is used: the prompt's last in the first forward, else 0."""
        return 0 if self.known else self.prompt_length - 1

    def propose(self) -> list[Line]:
        """The lines to sweep next: those to verify, then the one that drafts if that is apart."""
        start = len(self.text) - 1
        if self.known:
            lines = [Line([self.text[-1], *guesses], start) for guesses in self._verified_lines]
        else:
            lines = [Line([*self.text, *self._verified_lines[0]], 0)]
        if self.drafts_apart and self.guesses:
            k = self.skipped
            ids = [self.text[-1], *self.guesses][k:]
            lines.append(Line(ids, start + k, True, not self.known or k > 0, self.guesses[: max(k - 1, 0)]))
        return lines

    def absorb(self, predictions: Sequence[int], sure: Sequence[float] = ()) -> range:
        """Take the predictions at the lines' slots, from `first_needed` on; returns the slots whose KV is to be kept.

        The text grows by the accepted guesses of the best line and the prediction behind them.

        Args:
            predictions: One for each slot.
            sure: How clear each was, from 0 to 1; looked at where drafts have a line of their own.
        """
        lines, told = self._verified_lines, []
        end = 0
        for guesses in lines:
            begin, end = end, end + len(guesses) + 1
            told.append(list(predictions[begin:end]))
        drafted = self.drafts_apart and bool(self.guesses)
        drafting = slice(end, end + len(self.guesses) + 1 - self.skipped)
        state = told[0][: self.skipped] + list(predictions[drafting]) if drafted else told[0]
        surely = [*sure[: self.skipped], *sure[drafting]] if drafted else []
        offset, start = self.first_needed, self.known
        won, accepted = self._best(lines, told)
        base = sum(len(line) for line in told[:won])
        winner = lines[won]
        new = self._ended([*winner[:accepted], told[won][accepted]])
        self._count(won, len(new), offset + sum(map(len, told)) + (len(state) - self.skipped if drafted else 0))
        self._grow(new)
        if self.finished:
            self.guesses, self.candidates = [], []
            self.stats.grade(self.generated, self._drafts)
        else:
            # A candidate that wins moves the frontier only: the draft's own predictions go on converging behind it.
            self._refined(state, start)
            self._prepare((state + told[won][len(state) :])[accepted + 1 :], surely[accepted + 1 :])
        # Everything known but the last token, whose KV comes with the next sweep; no guess accepted behind an end.
        return range(base, base + offset + len(new))

    @property
    def _verified_lines(self) -> list[list[int]]:
        """The guesses of each line that decides what is accepted: the draft's, then the candidates."""
        return [self.guesses[: self.hopeful] if self.drafts_apart else self.guesses, *self.candidates]

    def _best(self, lines: Sequence[Sequence[int]], told: Sequence[Sequence[int]]) -> tuple[int, int]:
        """The line of which most was accepted (of equals the first, so the draft), and how many of its guesses were."""
        accepted = [common_prefix(guesses, line) for guesses, line in zip(lines, told, strict=True)]
        won = max(range(len(accepted)), key=accepted.__getitem__)
        return won, accepted[won]

    def _ended(self, new: list[int]) -> list[int]:
        """New tokens up to the one that ends the text, if any does; sets `finished`."""
        end = first_eos(new, self.eos_ids)
        if end is not None:
            new = new[: end + 1]
        if self.stop is not None:
            met = (length for length in range(1, len(new) + 1) if self.stop(self.text + new[:length]))
            stopped = next(met, None)
            if stopped is not None:
                new, end = new[:stopped], stopped
        self.finished = end is not None or self.known + len(new) >= self.max_new_tokens
        return new

    def _count(self, won: int, accepted: int, slots: int) -> None:
        proposed = sum(map(len, self._verified_lines))
        self.stats.sweeps.append(SweepStats(proposed, accepted, won, slots))
        self.stats.tokens += accepted
        self._drafts.append((self.known, self.guesses))

    def _grow(self, new: Sequence[int]) -> None:
        self.text += new
        self.known += len(new)
        if self.pool is not None and self.config.prompt_ngrams:
            self.pool.add(self.text, len(self.text) - len(new))

    def _prepare(self, leftover: list[int], sure: Sequence[float]) -> None:
        """The next sweep's draft and candidates."""
        self.guesses = self._capped(self._next_guesses(leftover))
        chances = list(itertools.accumulate(sure[: len(self.guesses)], operator.mul))
        self.hopeful = sum(chance >= VERIFY for chance in chances)
        self.skipped = sum(chance >= SKIP for chance in chances)
        if self.pool is None:
            return
        if leftover:
            # Behind the last right token there is a rejected draft: what was predicted on it.
            self.pool.add([self.text[-1], *leftover])
        if self.recycles:
            length = min(self.config.block_size - 1, self._room)
            found = self.pool.look_up(self.text, self.config.candidates, length, [self.guesses])
            # A run that begins with the whole draft takes its place: beside it, it would cost the same slots twice.
            longer = next((run for run in found if run[: len(self.guesses)] == self.guesses), None)
            if longer:
                self.guesses, self.hopeful = longer, len(longer)
            self.candidates = [run for run in found if run is not longer]

    @property
    def _room(self) -> int:
        """Guesses that can still be used: with g guesses a sweep adds up to g + 1 tokens."""
        return max(self.max_new_tokens - self.known - 1, 0)

    def _capped(self, guesses: list[int]) -> list[int]:
        """Without those that no text can have: past the budget, or behind a guess that ends it."""
        end = first_eos(guesses, self.eos_ids)
        return guesses[: self._room if end is None else min(end + 1, self._room)]

    def _filled(self, guesses: list[int], count: int) -> list[int]:
        """`count` guesses: the given ones, and new ones behind them."""
        wanted = max(min(count, self._room) - len(guesses), 0)
        return guesses[:count] + (self.fill.draw(wanted, [*self.text[-8:], *guesses]) if wanted else [])


class JacobiRow(Row):
    """Block after block of n tokens (section 2.2): a block is swept until it has converged, then a new one is drawn."""

    def _first_guesses(self) -> list[int]:
        return self._filled([], self.config.block_size)

    def _next_guesses(self, leftover: list[int]) -> list[int]:
        # The block that the last known token stands in; its remaining slots are in flight.
        return self._filled(leftover, -self.known % self.config.block_size)


class WindowRow(Row):
    """A running window: always n slots in flight, refilled at the far end as tokens are accepted."""

    def _first_guesses(self) -> list[int]:
        return self._filled([], self.config.block_size)

    def _next_guesses(self, leftover: list[int]) -> list[int]:
        return self._filled(leftover, self.config.block_size - 1)


class RecycleRow(WindowRow):
    """The running window, and runs out of the n-gram pool beside it (section 3.4.6)."""

    recycles = True
