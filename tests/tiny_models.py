"""Tiny random models of the architectures that the gates run on."""

from __future__ import annotations

import functools
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

ARCHITECTURES = ("llama", "qwen2", "qwen3", "mistral", "gemma3", "gpt2", "gpt_neox")
VOCAB = 61

_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 256,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
_OWN: dict[str, dict[str, Any]] = {
    "llama": {"num_key_value_heads": 2},
    "qwen2": {"num_key_value_heads": 2},
    "qwen3": {"num_key_value_heads": 2, "head_dim": 8},
    "mistral": {"num_key_value_heads": 2, "sliding_window": None, "head_dim": 8},
    # Both kinds of layer, and a window far shorter than the texts.
    "gemma3": {
        "num_key_value_heads": 2,
        "head_dim": 8,
        "sliding_window": 6,
        "tie_word_embeddings": False,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "gpt2": {"n_inner": 48},
    "gpt_neox": {},
}
_MODEL_TYPE = {"gemma3": "gemma3_text"}


def tiny_model(arch: str, seed: int = 0, **overrides: Any) -> PreTrainedModel:
    """A fresh random fp32 model of an architecture, in eval mode.

    Weights are drawn wide, so that greedy texts wander instead of repeating one token.
    """
    settings = {**_COMMON, **_OWN[arch], **overrides}
    config = AutoConfig.for_model(_MODEL_TYPE.get(arch, arch), **settings)
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=overrides.get("attn_implementation", "sdpa"))
    for parameter in model.parameters():
        if parameter.ndim >= 2:
            torch.nn.init.normal_(parameter, std=0.35)
    return model.eval()


@functools.cache
def shared_model(arch: str) -> PreTrainedModel:
    """The same model for every test that does not change it."""
    return tiny_model(arch)
