"""Several processes at one piece of work, as torchrun and `accelerate launch` start them.

Process 0, the main one, alone writes and decides; the others do their share and wait for its word. All of them see the
same files. Started in the ordinary way there is one process, and everything here does nothing.
"""

from __future__ import annotations

import datetime
import functools
import os
from typing import Any, TypeVar

T = TypeVar("T")

_WAIT = datetime.timedelta(days=2)
"""How long a process waits for word from another. Long: the main one may measure for hours, and a process that has died
is noticed by the launcher, which ends the others."""


def count() -> int:
    """Processes at work."""
    return int(os.environ["WORLD_SIZE"]) if {"RANK", "WORLD_SIZE", "LOCAL_RANK"} <= os.environ.keys() else 1


def rank() -> int:
    """The number of this process, from 0."""
    return int(os.environ["RANK"]) if count() > 1 else 0


def local_rank() -> int:
    """The number of this process on its machine, from 0; which of its GPUs it has."""
    return int(os.environ["LOCAL_RANK"]) if count() > 1 else 0


def is_main() -> bool:
    """Whether this is the process that writes."""
    return rank() == 0


def from_main(value: T) -> T:
    """What the main process passes, in every process; others wait for it. Anything that can be pickled."""
    if count() == 1:
        return value
    from torch import distributed

    box = [value]
    distributed.broadcast_object_list(box, src=0, group=_group())
    return box[0]


def gathered(value: T) -> list[T]:
    """What each process passes, in order, in every process."""
    if count() == 1:
        return [value]
    from torch import distributed

    values: list[Any] = [None] * count()
    distributed.all_gather_object(values, value, group=_group())
    return values


def wait() -> None:
    """Until all processes have come here."""
    gathered(None)


@functools.cache
def _group() -> Any:
    """A group of its own for messages: the libraries' groups have time limits made for single sums of gradients."""
    import torch
    from torch import distributed

    if not distributed.is_initialized():
        backend = "gloo"
        if torch.cuda.is_available():
            torch.cuda.set_device(local_rank())
            backend = "cpu:gloo,cuda:nccl"
        distributed.init_process_group(backend)
    return distributed.new_group(backend="gloo", timeout=_WAIT)
