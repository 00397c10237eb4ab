"""Models that cannot verify a draft are refused, before the first forward."""

from __future__ import annotations

import inspect
from typing import Any

from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from jacobi_forcing.errors import CacheError, ModelError

_NEEDED = ("position_ids", "attention_mask", "cache", "use_cache")
_EXPECTED = "a decoder-only causal LM"
_MASKED_ATTENTION = ("sdpa", "eager")
_MASKED_LAYERS = ("full_attention", "sliding_attention")


def refuse_unfit(model: PreTrainedModel) -> None:
    """Refuse a model that cannot verify a draft.

    Raises:
        CacheError: Its layers keep a state that cannot be rolled back, or its attention takes no mask of ours.
        ModelError: It is an encoder-decoder, looks ahead, has no head, or its attention kernel takes no mask.
    """
    name, config = type(model).__name__, model.config.get_text_config(decoder=True)
    if model.config.is_encoder_decoder:
        raise ModelError(f"{name} is an encoder-decoder", expected=_EXPECTED)
    # Some causal models say so too, but none of their layers does.
    if getattr(config, "is_decoder", True) is False and any(
        vars(module).get(flag) is False for module in model.modules() for flag in ("is_decoder", "is_causal")
    ):
        raise ModelError(f"{name} looks ahead in its text", seen="is_decoder=False", expected=_EXPECTED)
    if model.get_output_embeddings() is None:
        raise ModelError(f"{name} has no language-modelling head", expected="a model loaded by AutoModelForCausalLM")
    takes = inspect.signature(model.base_model.forward).parameters
    missing = [argument for argument in _NEEDED if argument not in takes]
    if missing:
        raise CacheError(
            f"{name} cannot verify a draft: its forward takes no {', '.join(missing)}",
            expected="positions, a 4-D mask and a key-value cache that can be rolled back",
        )
    kernel = getattr(model.config, "_attn_implementation", None)
    if kernel not in _MASKED_ATTENTION:
        raise ModelError(
            f"{name} runs an attention kernel that takes no mask",
            seen=kernel,
            expected=" or ".join(_MASKED_ATTENTION),
            remedy='load it with attn_implementation="sdpa"',
        )
    unfit = _unfit_layers(config)
    if not unfit:
        layers = DynamicCache(config=model.config).layers
        unfit = {
            type(layer).__name__ for layer in layers if type(layer) not in (DynamicLayer, DynamicSlidingWindowLayer)
        }
    if unfit:
        raise CacheError(
            f"{name} has layers whose state cannot be rolled back or whose attention takes no mask",
            seen=", ".join(sorted(unfit)),
            expected="full or sliding-window attention in every layer",
        )


def _unfit_layers(config: Any) -> set[str]:
    """Kinds of layer that a config names and that a mask of ours, or a roll-back, would get wrong."""
    unfit = {kind for kind in getattr(config, "layer_types", None) or [] if kind not in _MASKED_LAYERS}
    # The library keeps the KV of chunked layers like that of sliding ones, but another mask goes with it.
    if getattr(config, "attention_chunk_size", None):
        unfit.add("chunked_attention")
    if getattr(config, "alibi", False):
        unfit.add("alibi")
    # Local layers have a window of their own, counted in slots of the cache: wrong where rows are of unequal length.
    return unfit | ({"local"} & set(getattr(config, "attention_layers", None) or []))
