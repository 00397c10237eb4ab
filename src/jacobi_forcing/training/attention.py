"""Which attention kernel a training run takes."""

from __future__ import annotations

import logging

import torch

from jacobi_forcing.backbone import Backbone
from jacobi_forcing.errors import ConfigError

logger = logging.getLogger(__name__)


def takes_flex(attention: str, device: torch.device, backbone: Backbone) -> bool:
    """Whether packed rows go through FlexAttention.

    Args:
        attention: "auto", "flex" or "sdpa".
        device: Where training runs.
        backbone: The model.

    Raises:
        ConfigError: "flex" on a device without a backward pass for it, or for a model that cannot run it.
    """
    if attention == "sdpa":
        return False
    able = backbone.runs_flex and not _drops_attention(backbone)
    if attention == "auto":
        if device.type == "cuda" and not able:
            logger.info("The model cannot run FlexAttention: its rows get an additive mask, length squared")
        return device.type == "cuda" and able
    if device.type != "cuda":
        raise ConfigError(
            "FlexAttention has no backward pass on this device",
            seen=f"attention: flex on {device.type}",
            expected="a CUDA device",
            remedy="set attention to auto or sdpa",
        )
    if not able:
        raise ConfigError(
            f"{type(backbone.model).__name__} cannot run FlexAttention",
            seen="dropout in its attention" if backbone.runs_flex else "attention: flex",
            remedy="set attention to auto or sdpa",
        )
    return True


def _drops_attention(backbone: Backbone) -> bool:
    """Whether attention weights are dropped in training, which the kernel cannot do."""
    return any(getattr(backbone.config, name, 0) for name in ("attention_dropout", "attn_pdrop"))
