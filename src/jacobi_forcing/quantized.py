"""Weights in 4 bits, by the library and bitsandbytes, where there is a CUDA device."""

from __future__ import annotations

import importlib.util
from typing import Any

import torch

from jacobi_forcing.config import Quantization
from jacobi_forcing.errors import ConfigError


def quantization_options(quantization: Quantization, device: torch.device) -> dict[str, Any]:
    """What `from_pretrained` is to be given for quantised weights; nothing for plain ones.

    4 bits are NormalFloat with quantised scales (Dettmers et al. 2023, QLoRA); products are computed in bfloat16, or in
    float16 where the device does not have it.

    Raises:
        ConfigError: The device is no CUDA device, or bitsandbytes is not installed.
    """
    if quantization == "none":
        return {}
    if device.type != "cuda":
        raise ConfigError(
            "Weights in 4 bits need a CUDA device: the kernels of bitsandbytes are made for it",
            seen=device.type,
            remedy="set model.quantization to none, or name a CUDA device",
        )
    if importlib.util.find_spec("bitsandbytes") is None:
        raise ConfigError(
            "The package 'bitsandbytes' is not installed", remedy="install it with: pip install bitsandbytes"
        )
    from transformers import BitsAndBytesConfig

    config = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.bfloat16 if torch.cuda.is_bf16_supported() else torch.float16,
    )
    return {"quantization_config": config, "device_map": {"": device}}
