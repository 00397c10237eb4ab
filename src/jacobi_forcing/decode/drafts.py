"""What to fill new draft slots with. No fill ever changes the text, only how soon a draft is right."""

from __future__ import annotations

import random
from collections.abc import Sequence

from jacobi_forcing.config import DecodeConfig
from jacobi_forcing.decode.ngrams import NgramPool
from jacobi_forcing.errors import ConfigError


class DraftFill:
    """Endless guesses for new draft slots, all of them ids that the text, the model's predictions or the tokenizer has.

    Args:
        config: `draft_init` names the source, `draft_seed` seeds it.
        prompt: Ids of the prompt.
        vocabulary: Ids that the tokenizer has; needed for `draft_init="vocabulary"` only.
        pool: Needed for `draft_init="pool"` only.

    Raises:
        ConfigError: The vocabulary is asked for and not known.
    """

    def __init__(
        self,
        config: DecodeConfig,
        prompt: Sequence[int],
        vocabulary: Sequence[int] | None = None,
        pool: NgramPool | None = None,
    ) -> None:
        self._random = random.Random(config.draft_seed)
        self._init = config.draft_init
        self._pool = pool
        self._source = prompt
        if config.draft_init == "vocabulary":
            if not vocabulary:
                raise ConfigError(
                    'draft_init="vocabulary" needs to know which ids the tokenizer has',
                    remedy="pass vocabulary=[ids] to generate, or use draft_init='prompt'",
                )
            self._source = vocabulary

    def draw(self, count: int, behind: Sequence[int]) -> list[int]:
        """`count` guesses for the slots behind a run of known, predicted or guessed tokens, which is not empty."""
        if count <= 0:
            return []
        if self._init == "last":
            return [behind[-1]] * count
        drawn: list[int] = []
        while self._pool is not None and self._init == "pool" and len(drawn) < count:
            found = self._pool.look_up([*behind, *drawn], 1, count - len(drawn))
            if not found:
                break
            drawn += found[0]
        return drawn + self._random.choices(self._source, k=count - len(drawn))
