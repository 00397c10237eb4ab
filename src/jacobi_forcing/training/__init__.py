"""Training on packed trajectories with the library's own trainer. Needs the extra `train`."""

from __future__ import annotations

import importlib.util

from jacobi_forcing.errors import MissingExtraError

if importlib.util.find_spec("accelerate") is None:
    raise MissingExtraError("accelerate", "train")

from jacobi_forcing.training.adapter_config import AdapterConfig
from jacobi_forcing.training.adapter_trainer import AdapterTrainer
from jacobi_forcing.training.collator import Collator
from jacobi_forcing.training.config import JacobiForcingConfig
from jacobi_forcing.training.trainer import JacobiForcingTrainer, last_checkpoint

__all__ = [
    "AdapterConfig",
    "AdapterTrainer",
    "Collator",
    "JacobiForcingConfig",
    "JacobiForcingTrainer",
    "last_checkpoint",
]
