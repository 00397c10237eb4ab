"""What ends a training that has gone wrong, and what hands its figures to tensorboard or wandb."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from jacobi_forcing import processes
from jacobi_forcing.config import ReportTo
from jacobi_forcing.errors import CollapseError, MissingExtraError
from jacobi_forcing.files import link_folder, remove

GOOD = "good"
"""Folder, among the checkpoints, of the one that the last good probe was taken of."""
_REMEDY = "lower learning_rate or raise ar_weight, and train anew (jforce run: --redo)"


class FiniteLosses(TrainerCallback):
    """Ends a training whose losses are no numbers any more: no later step could mend its weights."""

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        """Look at what was logged.

        Raises:
            CollapseError: A loss is not finite.
        """
        for name in ("loss", "consistency_loss", "ar_loss", "grad_norm", "train_loss"):
            value = (logs or {}).get(name)
            if value is not None and not math.isfinite(value):
                raise _not_finite(f"{name} is {value}", state.global_step)

    def on_train_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        """Look at the trained weights: the steps since the last log may have spoilt them.

        Raises:
            CollapseError: One is not finite.
        """
        for name, weight in model.named_parameters() if model is not None else ():
            own = weight.to_local() if hasattr(weight, "to_local") else weight
            if weight.requires_grad and not bool(own.isfinite().all()):
                raise _not_finite(f"the weights of {name} are not finite", state.global_step)


def _not_finite(what: str, step: int) -> CollapseError:
    return CollapseError(f"Training has collapsed: {what} at step {step}", remedy=_REMEDY)


def verdict(
    repetition: float, at_start: float, ar_loss: float | None, vocab_size: int, limit: float | None
) -> str | None:
    """Why a probed model has collapsed, or None.

    It has where the share of answers that loop is `limit` above that at step 0, or where its AR loss is above ln V: it
    then knows less than one that takes every token to be equally likely.

    Args:
        repetition: Share of the probed answers that loop, training and held-out ones together.
        at_start: The same at step 0.
        ar_loss: The AR loss last logged, nats a token; None where there is none.
        vocab_size: V.
        limit: `evaluation.halt_repetition`; None never halts.
    """
    if limit is None:
        return None
    if repetition - at_start >= limit:
        return f"{repetition:.0%} of the probed answers loop, {at_start:.0%} did at step 0"
    if ar_loss is not None and ar_loss > math.log(vocab_size):
        return f"AR loss {ar_loss:.3g}, more than a guess would have ({math.log(vocab_size):.3g})"
    return None


def keep_good(checkpoints: Path, step: int) -> None:
    """Keep the checkpoint of a good probe beside the others, which come and go."""
    link_folder(checkpoints / f"checkpoint-{step}", checkpoints / GOOD)


def halt(checkpoints: Path, step: int, good: int, reason: str) -> CollapseError:
    """Throw away checkpoints later than the last good probe, so that nobody goes on from them.

    Every process calls it; the main one throws away.

    Returns:
        The error to raise.
    """
    for path in checkpoints.glob("checkpoint-*") if processes.is_main() else ():
        if int(path.name.removeprefix("checkpoint-")) > good:
            remove(path)
    kept = checkpoints / GOOD
    where = f"the model of step {good} is kept in {kept}; " if kept.is_dir() else ""
    return CollapseError(
        f"Training has collapsed at step {step}: {reason}",
        remedy=f"{where}{_REMEDY}, or set evaluation.halt_repetition to null",
    )


def loggers(report_to: ReportTo, folder: Path) -> list[TrainerCallback]:
    """The library's callbacks that hand on every logged figure; tensorboard's files go to `folder/tensorboard`.

    Raises:
        MissingExtraError: tensorboard or wandb is not installed.
    """
    if report_to == "none" or not processes.is_main():
        return []
    try:
        if report_to == "tensorboard":
            from torch.utils.tensorboard import SummaryWriter
            from transformers.integrations import TensorBoardCallback

            return [TensorBoardCallback(SummaryWriter(str(folder / "tensorboard")))]
        from transformers.integrations import WandbCallback

        return [WandbCallback()]
    except (ImportError, RuntimeError) as error:  # the library raises the second where wandb is missing
        raise MissingExtraError(report_to, "train") from error
