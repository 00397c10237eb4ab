"""What to propose: the fill of new draft slots, and one row's state machine for each decoder.

A row asks for one sweep at a time: `propose` gives the line to sweep, `absorb` takes the predictions, commits the
accepted prefix and prepares the next draft. Slot 0 of every draft is the last token of the text so far, which is right
but whose KV is not in the cache yet; the slots behind it are guesses.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from jacobi_forcing.blocks import first_eos
from jacobi_forcing.config import DecodeConfig
from jacobi_forcing.decode.stats import RowStats
from jacobi_forcing.errors import ConfigError
from jacobi_forcing.sweep import Line


class DraftFill:
    """Endless guesses for new draft slots.

    Args:
        config: `draft_init` names the source, `draft_seed` seeds it.
        prompt: Ids of the prompt.
        vocabulary: Ids that the tokenizer has; needed for `draft_init="vocabulary"` only.

    Raises:
        ConfigError: The vocabulary is asked for and not known.
    """

    def __init__(self, config: DecodeConfig, prompt: Sequence[int], vocabulary: Sequence[int] | None = None) -> None:
        self._random = random.Random(config.draft_seed)
        if config.draft_init == "vocabulary":
            if vocabulary is None:
                raise ConfigError(
                    'draft_init="vocabulary" needs to know which ids the tokenizer has',
                    remedy="pass vocabulary=[ids] to generate, or use draft_init='prompt'",
                )
            self._source: Sequence[int] = vocabulary
        else:
            self._source = prompt

    def draw(self, count: int) -> list[int]:
        """`count` guesses."""
        return self._random.choices(self._source, k=count) if count > 0 else []


class Row:
    """One row that decodes greedily with the decoder `ar`: no guesses at all. The other decoders add guesses.

    Args:
        prompt: Ids of the prompt, at least one.
        config: The decoder's settings.
        eos_ids: Ids that end the text; may be empty.
        max_new_tokens: Budget of generated tokens, at least 1.
        fill: Where guesses for new slots come from.
    """

    def __init__(
        self, prompt: Sequence[int], config: DecodeConfig, eos_ids: Sequence[int], max_new_tokens: int, fill: DraftFill
    ) -> None:
        self.prompt = list(prompt)
        self.config = config
        self.eos_ids = list(eos_ids)
        self.max_new_tokens = max_new_tokens
        self.fill = fill
        self.generated: list[int] = []
        self.stats = RowStats()
        self.finished = False
        self.guesses = self._capped(self._first_guesses())

    # What a decoder decides ------------------------------------------------------------------------------------

    def _first_guesses(self) -> list[int]:
        """Guesses for the tokens behind the prompt; they ride along in the prefill forward."""
        return []

    def _next_guesses(self, leftover: list[int]) -> list[int]:
        """Guesses behind the last known token.

        Args:
            leftover: Predictions made behind the accepted prefix, the first one for the token after the last known.
        """
        return []

    # What all decoders share -----------------------------------------------------------------------------------

    @property
    def _offset(self) -> int:
        """Slots of the line before draft slot 0: the prompt in the first forward, none later."""
        return 0 if self.generated else len(self.prompt) - 1

    def propose(self) -> Line:
        """The line to sweep next."""
        if self.generated:
            start = len(self.prompt) + len(self.generated) - 1
            return Line([self.generated[-1], *self.guesses], start)
        return Line([*self.prompt, *self.guesses], 0)

    @property
    def first_needed(self) -> int:
        """First slot of the line whose prediction is used."""
        return self._offset

    def absorb(self, predictions: Sequence[int]) -> range:
        """Take the predictions from `first_needed` on; returns the slots of the line whose KV is to be kept.

        `generated` grows by the accepted guesses and the prediction behind them.
        """
        accepted = 0
        while accepted < len(self.guesses) and self.guesses[accepted] == predictions[accepted]:
            accepted += 1
        offset = self._offset
        new = [*self.guesses[:accepted], predictions[accepted]]
        end = first_eos(new, self.eos_ids)
        if end is not None:
            new = new[: end + 1]
        self.generated += new
        self.stats.tokens = len(self.generated)
        self.stats.accepted.append(len(new))
        self.finished = end is not None or len(self.generated) >= self.max_new_tokens
        leftover = list(predictions[accepted + 1 : len(self.guesses) + 1])
        self.guesses = [] if self.finished else self._capped(self._next_guesses(leftover))
        # Everything known but the last token, whose KV comes with the next sweep; no guess accepted behind an end.
        return range(offset + len(new))

    def _capped(self, guesses: list[int]) -> list[int]:
        """Guesses that can still be used: with g guesses a sweep adds up to g + 1 tokens."""
        return guesses[: max(self.max_new_tokens - len(self.generated) - 1, 0)]


class JacobiRow(Row):
    """Block after block of n tokens (section 2.2): a block is swept until it has converged, then a new one is drawn."""

    def _first_guesses(self) -> list[int]:
        return self.fill.draw(self.config.block_size)

    def _next_guesses(self, leftover: list[int]) -> list[int]:
        n = self.config.block_size
        known = len(self.generated)
        # The block that the last known token stands in; its remaining slots are in flight.
        missing = -known % n
        return leftover[:missing] + self.fill.draw(missing - len(leftover))


class WindowRow(Row):
    """A running window: always n slots in flight, refilled at the far end as tokens are accepted."""

    def _first_guesses(self) -> list[int]:
        return self.fill.draw(self.config.block_size)

    def _next_guesses(self, leftover: list[int]) -> list[int]:
        wanted = self.config.block_size - 1
        return leftover[:wanted] + self.fill.draw(wanted - len(leftover))


ROWS: dict[str, type[Row]] = {"ar": Row, "jacobi": JacobiRow, "window": WindowRow}
