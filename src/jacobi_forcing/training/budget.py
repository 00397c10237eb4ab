"""How long training goes on: steps out of a budget of tokens, and an end when a budget of core-seconds is spent."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR
from transformers import TrainerCallback, TrainingArguments, get_scheduler
from transformers.trainer_callback import ExportableState

from jacobi_forcing.errors import ConfigError
from jacobi_forcing.tags import Kind, Tags

_ENDLESS = 10**9
_PARTS = 1000
"""Steps of the learning-rate schedule that is stretched over a budget of core-seconds."""


def steps_for(tokens: int, lengths: Sequence[int], batch_size: int, accumulation: int) -> int:
    """Optimiser steps that take about as many training tokens as a budget has.

    A training token is a token of a packed row that goes forward and backward: prompt, noisy and clean ones count,
    padding does not. Masks, schedules and losses leave it as it is, and so does the block size: a response of m tokens
    behind a prompt of p is p + 2 m of them.

    Args:
        tokens: The budget.
        lengths: Length of each row of the data set, tokens.
        batch_size: Rows per batch, on all devices together.
        accumulation: Batches per step.

    Returns:
        The nearest number of steps, at least 1; a step has the mean number of tokens of those of an epoch.
    """
    batches = -(-len(lengths) // batch_size)
    per_epoch = -(-batches // accumulation)
    return max(1, round(tokens * per_epoch / sum(lengths)))


def endless(processes: int) -> int:
    """Steps of a run that ends when its core-seconds are spent.

    Raises:
        ConfigError: There are several processes: each would end at a step of its own.
    """
    if processes > 1:
        raise ConfigError("'core_seconds' is for one process", seen=f"{processes} processes", remedy="set steps")
    return _ENDLESS


def check_lengths(max_steps: int, train_tokens: int | None, core_seconds: float | None) -> None:
    """Check that at most one setting says how long a run is; without any, `num_train_epochs` does.

    Raises:
        ConfigError: Two of them are set, or one is not above 0.
    """
    budgets = {"train_tokens": train_tokens, "core_seconds": core_seconds}
    given = {name: value for name, value in budgets.items() if value is not None}
    for name, value in given.items():
        if value <= 0:
            raise ConfigError(f"'{name}' is too small", seen=value, expected="more than 0")
    names = [*(["max_steps"] if max_steps > 0 else []), *given]
    if len(names) > 1:
        raise ConfigError("How long training goes on is said twice", seen=" and ".join(names), expected="one of them")


def sizes(batches: Sequence[dict[str, Tensor]]) -> list[int]:
    """Tokens of some batches without padding, noisy ones of them, and those that count in the consistency loss."""
    tags = [Tags.of(batch["tags"]) for batch in batches]
    return [
        sum(int((one.sample >= 0).sum()) for one in tags),
        sum(int((one.kind == Kind.NOISY).sum()) for one in tags),
        sum(int(batch["has_student"].sum()) for batch in batches),
    ]


class Pace:
    """What the steps since the last log took and taught."""

    def __init__(self) -> None:
        self._tokens = self._noisy = self._taught = 0
        self._since = time.perf_counter()

    def restart(self) -> None:
        """Start the clock."""
        self._since = time.perf_counter()

    def count(self, tokens: int, noisy: int, taught: int) -> None:
        """Add tokens: all of them, noisy ones, and those of the latter that count in the consistency loss."""
        self._tokens, self._noisy, self._taught = self._tokens + tokens, self._noisy + noisy, self._taught + taught

    def rates(self) -> dict[str, float]:
        """Tokens a second of wall time and the trained share of noisy tokens, since the last call."""
        now = time.perf_counter()
        rates = {
            "tokens_per_second": self._tokens / max(now - self._since, 1e-9),
            "trained_share": self._taught / max(self._noisy, 1),
        }
        self._tokens = self._noisy = self._taught = 0
        self._since = now
        return rates


class Meter(TrainerCallback, ExportableState):
    """Counts what training takes, checkpoints included, and ends it when its core-seconds are spent.

    Core-seconds are those of this process on all of its threads, from the begin of training on, probes and
    checkpoints included. A resumed run goes on counting at its checkpoint.

    Args:
        core_seconds: Where training ends; None: at its last step.

    Attributes:
        tokens: Training tokens so far, see `steps_for`.
        spent: Core-seconds so far.
        pace: Of the steps since the last log.
    """

    def __init__(self, core_seconds: float | None = None) -> None:
        self.budget = core_seconds
        self.tokens = 0
        self.pace = Pace()
        self._before = 0.0
        self._started: float | None = None

    @property
    def spent(self) -> float:
        """Core-seconds so far."""
        return self._before + (0.0 if self._started is None else time.process_time() - self._started)

    @property
    def share(self) -> float:
        """Spent part of the budget, 0 to 1; 0 without one."""
        return min(1.0, self.spent / self.budget) if self.budget else 0.0

    def count(self, tokens: int, noisy: int, taught: int) -> None:
        """Add the tokens of a step, see `sizes`."""
        self.tokens += tokens
        self.pace.count(tokens, noisy, taught)

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps. Called by the library."""
        return {"args": {}, "attributes": {"tokens": self.tokens, "spent": self.spent}}

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Start, or go on where the checkpoint was written."""
        kept = state.stateful_callbacks.get(type(self).__name__) if state.global_step else None
        attributes = kept["attributes"] if kept else {"tokens": 0, "spent": 0.0}
        self.tokens, self._before = int(attributes["tokens"]), float(attributes["spent"])
        self._started = time.process_time()
        self.pace.restart()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """End when the budget is spent."""
        if self.budget is not None and self.spent >= self.budget:
            control.should_training_stop = True


def paced_scheduler(optimizer: Optimizer, args: TrainingArguments, share: Callable[[], float]) -> LambdaLR:
    """The library's learning-rate schedule, warm-up included, over a budget instead of a number of steps.

    Args:
        optimizer: What it drives.
        args: Name the schedule and its warm-up.
        share: Tells the spent part of the budget, 0 to 1.

    Raises:
        ConfigError: The schedule is not a function of the step alone.
    """
    plan = get_scheduler(
        args.lr_scheduler_type,
        optimizer=optimizer,
        num_warmup_steps=args.get_warmup_steps(_PARTS),
        num_training_steps=_PARTS,
        scheduler_specific_kwargs=args.lr_scheduler_kwargs,  # type: ignore[arg-type]  # text is parsed by now
    )
    if not isinstance(plan, LambdaLR):
        raise ConfigError(
            "The learning-rate schedule cannot be stretched over core-seconds",
            seen=str(args.lr_scheduler_type),
            expected="one that is a function of the step, such as linear, cosine or constant",
        )

    def at_share(rate: Callable[[int], float]) -> Callable[[int], float]:
        return lambda step: rate(round(_PARTS * share()))

    return LambdaLR(optimizer, [at_share(rate) for rate in plan.lr_lambdas])
