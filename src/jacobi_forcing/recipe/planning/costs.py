"""What the stages of a recipe cost, however it was found out."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class CollectCost:
    """Of collecting one round.

    Attributes:
        responses: Prompts of the round.
        seconds_per_response: Wall time, sweeps and writing included.
        tokens_per_response: Mean length.
        bytes_per_response: On disk.
        memory: Peak, bytes.
        fixed_seconds: Once a stage: loading.
    """

    responses: int
    seconds_per_response: float
    tokens_per_response: float
    bytes_per_response: float
    memory: float
    fixed_seconds: float


@dataclasses.dataclass(frozen=True)
class TrainCost:
    """Of training one round.

    Attributes:
        seconds_per_step: An optimiser step, accumulation included.
        tokens_per_step: Tokens of packed rows in it, or those that are drafted on in mode adapter; 0 where not counted.
        memory: Peak, bytes.
        fixed_seconds: Once a stage: loading.
        checkpoint_seconds: Writing one.
        checkpoint_bytes: One on disk.
        model_bytes: What the stage leaves.
    """

    seconds_per_step: float
    tokens_per_step: float
    memory: float
    fixed_seconds: float
    checkpoint_seconds: float
    checkpoint_bytes: float
    model_bytes: float


@dataclasses.dataclass(frozen=True)
class MeasureCost:
    """Of measuring one model.

    Attributes:
        seconds_per_answer: Of the answers that are graded, side by side.
        seconds_per_timed: Of a prompt that every decoder answers one by one.
        memory: Peak, bytes.
        fixed_seconds: Loading, and the cost of sweeps.
        ar_seconds_per_token: Plain decoding, one row.
        cost_ratio: Time of a forward with a draft over that of one token.
    """

    seconds_per_answer: float
    seconds_per_timed: float
    memory: float
    fixed_seconds: float
    ar_seconds_per_token: float
    cost_ratio: float


@dataclasses.dataclass(frozen=True)
class Costs:
    """Of a whole recipe: rounds in order.

    Attributes:
        collect: Of each round.
        train: Of each round.
        measure: Of a model, any of them; also what the break-even is reckoned from.
        device: Where: a torch device type, or "assumed".
        assumptions: What was assumed, in sentences.
    """

    collect: tuple[CollectCost, ...]
    train: tuple[TrainCost, ...]
    measure: MeasureCost
    device: str
    assumptions: tuple[str, ...]
