"""Training shared out over processes: rows that come out even, and losses inside the forward of a wrapped model.

A step of P processes with batches of B rows is a step of one process with batches of P * B: process p takes the p-th
run of B rows out of each P * B, in the order in which one process would see them. Where the rows of an epoch do not
come out even, rows with nothing in them fill up the last batches; they enter no loss and no count.
"""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
from accelerate import Accelerator
from accelerate.data_loader import SeedableRandomSampler
from torch import Tensor, nn
from torch.utils.data import Dataset, Sampler, SequentialSampler
from transformers import TrainingArguments

from jacobi_forcing.errors import ConfigError

T = TypeVar("T")


class SharedRows(Protocol):
    """Rows that can be filled up."""

    def __len__(self) -> int:
        """Number of rows."""

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """One row."""

    def set_epoch(self, epoch: int) -> None:
        """Say which epoch begins."""

    def empty_row(self) -> dict[str, Tensor]:
        """A row with nothing in it."""


class EvenRows(Dataset[dict[str, Tensor]]):
    """Rows, and behind them as many empty ones as make the batches of an epoch come out even.

    Args:
        rows: The rows.
        multiple: Rows that all processes take at once.
        shuffle: Whether each epoch has an order of its own.
        seed: Of that order.
    """

    def __init__(self, rows: SharedRows, multiple: int, *, shuffle: bool, seed: int) -> None:
        self.rows = rows
        self.sampler = _EvenSampler(
            SeedableRandomSampler(rows, data_seed=seed) if shuffle else SequentialSampler(rows),
            -len(rows) % multiple,
        )

    def __len__(self) -> int:
        """Number of rows, empty ones counted."""
        return len(self.sampler)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """One row."""
        return self.rows[index] if index < len(self.rows) else self.rows.empty_row()

    def set_epoch(self, epoch: int) -> None:
        """Say which epoch begins."""
        self.rows.set_epoch(epoch)
        self.sampler.set_epoch(epoch)


class _EvenSampler(Sampler[int]):
    """The rows in the order in which one process would see them, then the empty ones."""

    def __init__(self, order: Sampler[int], empty: int) -> None:
        self.order, self.empty = order, empty

    def __iter__(self) -> Iterator[int]:
        rows = len(self) - self.empty
        yield from self.order
        yield from range(rows, rows + self.empty)

    def __len__(self) -> int:
        return len(self.order) + self.empty  # type: ignore[arg-type]  # both kinds have a length

    def set_epoch(self, epoch: int) -> None:
        if isinstance(self.order, SeedableRandomSampler):
            self.order.set_epoch(epoch)


def share_out(rows: Any, args: TrainingArguments) -> Any:
    """The data set that the library's trainer is given: the rows themselves, or `EvenRows` for several processes."""
    if args.world_size == 1 or args.dataloader_drop_last:
        return rows
    shuffle = args.train_sampling_strategy == "random"
    # The library's own order, which one process would see.
    seed = args.seed if args.data_seed is None else args.data_seed
    return EvenRows(rows, args.train_batch_size * args.world_size, shuffle=shuffle, seed=seed)


def summed(values: Tensor, accelerator: Accelerator) -> Tensor:
    """The sum over all processes, in each of them."""
    if accelerator.num_processes == 1:
        return values
    return accelerator.reduce(values.to(accelerator.device), reduction="sum").to(values.device)


def within_forward(wrapped: nn.Module, model: nn.Module, work: Callable[..., T], *args: Any) -> T:
    """Do some work as if it were the model's forward, so that what is wrapped around it takes part.

    DDP, FSDP2 and DeepSpeed prepare for the backward pass in the forward of the wrapped model, and gather its weights
    there. The losses are made of hidden states, which come from a part of the model and not from its forward; so for
    this one call the forward of this one object is the work.

    Args:
        wrapped: What the library made of the model.
        model: The model itself.
        work: What to do.
        args: What it is given.
    """

    def once(*given: Any) -> T:
        restore()
        return work(*given)

    own = vars(model).get("forward")

    def restore() -> None:
        if own is not None:
            model.forward = own
        else:
            with contextlib.suppress(AttributeError):
                del model.forward

    model.forward = once
    try:
        return wrapped(*args)
    finally:
        restore()


def check_processes(args: TrainingArguments) -> None:
    """Refuse what the losses are not made for.

    Raises:
        ConfigError: One process has several GPUs, or an option does not go with several processes.
    """
    if args.n_gpu > 1:
        raise ConfigError(
            "One process trains on one device",
            seen=f"{args.n_gpu} GPUs in one process",
            remedy=f"start one process for each: torchrun --nproc-per-node {args.n_gpu} -m jacobi_forcing train …, "
            "or set CUDA_VISIBLE_DEVICES to one of them",
        )
    if args.world_size > 1 and args.train_sampling_strategy not in ("random", "sequential"):
        raise ConfigError(
            "'train_sampling_strategy' does not go with several processes",
            seen=args.train_sampling_strategy,
            expected="random or sequential",
        )


def check_sharding(settings: Any) -> None:
    """Refuse, before the library looks at them, settings of sharding that cannot work here.

    Raises:
        ConfigError: They contradict one another or the machine, or DeepSpeed is not installed.
    """
    sharding = settings.fsdp or settings.deepspeed
    if settings.fsdp and settings.deepspeed:
        raise ConfigError("'fsdp' and 'deepspeed' exclude one another", remedy="leave one of them out")
    if settings.fsdp_config and not settings.fsdp:
        raise ConfigError("'fsdp_config' is set and 'fsdp' is not", remedy="set fsdp, or leave fsdp_config out")
    if settings.deepspeed:
        _check_deepspeed(settings.deepspeed)
    if sharding and (settings.use_cpu or not torch.cuda.is_available()):
        name = "fsdp" if settings.fsdp else "deepspeed"
        raise ConfigError(
            f"'{name}' needs GPUs",
            seen="training on the CPU",
            remedy="leave it out: several processes on the CPU each keep the whole model",
        )
    if sharding and settings.optimizer == "muon":
        raise ConfigError(
            "'optimizer: muon' does not go with weights that are shared out",
            seen="fsdp or deepspeed",
            remedy="use optimizer: adamw, or leave fsdp and deepspeed out",
        )
    if sharding and settings.states == "on_policy":
        raise ConfigError(
            "'states: on_policy' does not go with weights that are shared out",
            seen="fsdp or deepspeed: every process would have to make the same number of sweeps",
            remedy="use states: stored, or leave fsdp and deepspeed out",
        )


def _check_deepspeed(config: Any) -> None:
    if isinstance(config, str) and not Path(config).is_file():
        raise ConfigError("The DeepSpeed configuration cannot be read", seen=config, expected="a JSON file")
    if importlib.util.find_spec("deepspeed") is None:
        raise ConfigError("'deepspeed' is set and DeepSpeed is not installed", remedy="pip install deepspeed")
