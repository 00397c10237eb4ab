"""What ends a text: end tokens, the length, and the library's other stopping criteria, asked about every new token.

Several tokens become known at once here. A criterion must still see the text as it would have grown one by one, or the
text would end later than the library's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import StoppingCriteria, StoppingCriteriaList
from transformers.generation.stopping_criteria import (
    ConfidenceCriteria,
    EosTokenCriteria,
    MaxLengthCriteria,
    MaxTimeCriteria,
    StopStringCriteria,
)

from jacobi_forcing.backbone import as_ids
from jacobi_forcing.decode.rows import Stop
from jacobi_forcing.errors import ConfigError

UNSUPPORTED = (ConfidenceCriteria,)
"""Criteria that look at scores, which a verified guess leaves none of."""
_HOST = (StopStringCriteria, MaxTimeCriteria)
"""Criteria that may be asked on the CPU, where no token costs a synchronisation with the device."""


@dataclass(frozen=True)
class Ends:
    """What ends the rows of one call.

    Attributes:
        eos_ids: Ids that end a text; may be empty.
        budget: Most generated tokens, at least 1.
        stop: All other criteria, or None where there are none.
    """

    eos_ids: list[int]
    budget: int
    stop: Stop | None

    @classmethod
    def of(cls, criteria: Sequence[StoppingCriteria], columns: int, device: torch.device) -> Ends:
        """Sort out the criteria that the library has prepared.

        Args:
            criteria: Those of the settings and of the caller.
            columns: Length of the prompts with their padding, tokens; `max_length` counts it.
            device: Where the caller's own criteria expect ids to be.
        """
        # Their own types only: what is derived from them may do anything.
        ends = [criterion for criterion in criteria if type(criterion) is EosTokenCriteria]
        lengths = [criterion for criterion in criteria if type(criterion) is MaxLengthCriteria]
        others = [criterion for criterion in criteria if type(criterion) not in (EosTokenCriteria, MaxLengthCriteria)]
        eos_ids = sorted({token for criterion in ends for token in as_ids(criterion.eos_token_id)})
        budget = min(int(criterion.max_length) for criterion in lengths) - columns
        # The library too asks about the length behind a token, never before the first.
        return cls(eos_ids, max(budget, 1), _asking(others, device) if others else None)


def _asking(criteria: Sequence[StoppingCriteria], device: torch.device) -> Stop:
    """One question for all criteria: each is asked each time, as the library does."""
    asked: list[tuple[Callable[..., Any], torch.device]] = [
        (criterion, torch.device("cpu") if type(criterion) in _HOST else device) for criterion in criteria
    ]

    def stop(ids: Sequence[int]) -> bool:
        # A criterion may keep what it is shown: no tensor that is forbidden outside inference mode.
        with torch.inference_mode(False), torch.no_grad():
            rows = {place: torch.tensor([ids], device=place) for place in {place for _, place in asked}}
            answers = [criterion(rows[place], None) for criterion, place in asked]
            return any(bool(torch.as_tensor(answer).any()) for answer in answers)

    return stop


def with_stop_strings(
    criteria: Sequence[StoppingCriteria] | None, strings: str | list[str], tokenizer: Any
) -> StoppingCriteriaList:
    """The criteria, and the library's own for stop strings.

    Raises:
        ConfigError: There is no tokenizer.
    """
    if tokenizer is None:
        raise ConfigError(
            "Stop strings need the tokenizer", seen=f"stop_strings={strings!r}", remedy="pass tokenizer=tokenizer"
        )
    return StoppingCriteriaList([*(criteria or ()), StopStringCriteria(tokenizer, strings)])
