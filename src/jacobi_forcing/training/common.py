"""What both trainers and their settings share."""

from __future__ import annotations

import typing
from collections.abc import Mapping
from typing import Any, Protocol

from transformers import TrainerCallback

from jacobi_forcing.backbone import Backbone
from jacobi_forcing.errors import ConfigError, DataError

# Each would be accepted by the library and then do nothing, or the wrong thing, here.
UNSUPPORTED: dict[str, str] = {
    "label_smoothing_factor": "the consistency loss has distributions for targets",
    "torch_compile": "the loss does not go through the compiled forward",
    "parallelism_config": "a row and a layer stay on one device; processes share the rows, and with fsdp the weights",
}


class Rows(Protocol):
    """A data set whose rows depend on the epoch."""

    @property
    def max_token(self) -> int:
        """The largest token id, which the model must have."""

    @property
    def max_positions(self) -> int:
        """Positions that the longest text takes, tokens."""

    def set_epoch(self, epoch: int) -> None:
        """Say which epoch begins."""


class EpochSetter(TrainerCallback):
    """Tells the data set which epoch begins.

    The data loader would do so too, but not in the epoch in which a run is resumed: there its sampler is wrapped, and
    it then passes the data set over.
    """

    def __init__(self, rows: Any) -> None:
        self.rows = rows

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Tell."""
        self.rows.set_epoch(int(state.epoch))


def check_settings(
    settings: object, least: Mapping[str, float], choices: Mapping[str, Any], unsupported: Mapping[str, str]
) -> None:
    """Check what this package adds to the library's settings, and what it cannot do.

    Args:
        settings: Whose attributes are looked at.
        least: Lowest value of each.
        choices: The `Literal` type of each.
        unsupported: What must stay off, and why.

    Raises:
        ConfigError: One is out of range, or on.
    """
    for name, low in least.items():
        if getattr(settings, name) < low:
            raise ConfigError(f"'{name}' is too small", seen=getattr(settings, name), expected=f"at least {low}")
    for name, kind in choices.items():
        known = typing.get_args(kind)
        if getattr(settings, name) not in known:
            seen, expected = repr(getattr(settings, name)), "one of " + ", ".join(known)
            raise ConfigError(f"'{name}' has a wrong value", seen=seen, expected=expected)
    for name, reason in unsupported.items():
        if getattr(settings, name):
            raise ConfigError(f"'{name}' is not supported here: {reason}", remedy="leave it at its default")


def refuse_foreign_rows(rows: Rows, backbone: Backbone, what: str, other_ids: str, other_lengths: str) -> None:
    """Refuse rows that the model cannot read.

    Args:
        rows: The data set.
        backbone: The model.
        what: What an error calls them.
        other_ids: Remedy where a token id is unknown to the model.
        other_lengths: Remedy where a text is longer than its context.

    Raises:
        DataError: They have ids or positions that the model does not have.
    """
    limits = (
        ("token id", rows.max_token + 1, backbone.vocab_size, other_ids),
        ("position", rows.max_positions, backbone.context_length, other_lengths),
    )
    for name, needed, limit, remedy in limits:
        if limit is not None and needed > limit:
            raise DataError(
                f"The {what} have a {name} that the model has not",
                seen=needed - 1,
                expected=f"below {limit}",
                remedy=remedy,
            )
