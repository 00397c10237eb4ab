"""Answering one prompt, and saying what it took."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import torch

from jacobi_forcing.backbone import Backbone
from jacobi_forcing.cli.options import DEFAULT_BUDGET
from jacobi_forcing.cli.sweeps import SweepView
from jacobi_forcing.config import DecodeConfig
from jacobi_forcing.decode.generate import GenerateOutput
from jacobi_forcing.decode.generate import generate as decode_ids
from jacobi_forcing.evaluate.quality import budget, loops
from jacobi_forcing.loading import GREEDY, Loaded


def answer(
    loaded: Loaded,
    ids: list[int],
    decode: DecodeConfig,
    max_new_tokens: int | None,
    *,
    show_sweeps: bool,
    sampling: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Decode one prompt and say what it took; two tokens are decoded and thrown away first, as warm-up.

    Args:
        loaded: Model and tokenizer.
        ids: The prompt.
        decode: The decoder and its settings.
        max_new_tokens: Longest answer, tokens; None for a default within the model's context.
        show_sweeps: Show every sweep on standard error.
        sampling: What the library's generate is told beside the greedy settings; may be empty.
    """
    backbone = Backbone(loaded.model)
    limit = budget(backbone, len(ids), DEFAULT_BUDGET) if max_new_tokens is None else max_new_tokens
    prompt = torch.tensor([ids], device=backbone.device)
    settings: dict[str, Any] = {
        **GREEDY,
        **(sampling or {}),
        "attention_mask": torch.ones_like(prompt),
        "decode": decode,
        "tokenizer": loaded.tokenizer,
        "return_dict_in_generate": True,
    }
    decode_ids(loaded.model, prompt, max_new_tokens=min(2, limit), **settings)
    if show_sweeps:
        with SweepView(loaded.tokenizer) as view:
            started = time.perf_counter()
            out = decode_ids(loaded.model, prompt, max_new_tokens=limit, streamer=view, **settings)
    else:
        started = time.perf_counter()
        out = decode_ids(loaded.model, prompt, max_new_tokens=limit, **settings)
    assert isinstance(out, GenerateOutput) and out.sequences is not None and out.stats is not None
    new = out.sequences[0, len(ids) :].tolist()  # waits for the device
    seconds = time.perf_counter() - started
    return {
        "text": loaded.tokenizer.decode(new, skip_special_tokens=True),
        "tokens": len(new),
        "forwards": out.stats.forwards,
        "tokens_per_forward": round(out.stats.tokens_per_forward, 4),
        "seconds": round(seconds, 4),
        "tokens_per_second": round(len(new) / seconds, 2),
        "decoder": decode.decoder,
        "block_size": decode.block_size,
        "temperature": (sampling or {}).get("temperature", 0.0),
        "model": loaded.config.name,
        **({} if loaded.config.adapter is None else {"adapter": loaded.config.adapter}),
        "prompt_tokens": len(ids),
        "finished": new[-1] in backbone.eos_ids,
        "repeats": loops(new, backbone.eos_ids),
    }


def describe(result: dict[str, Any]) -> str:
    """One line about an answer: speed never without what it is worth."""
    how = result["decoder"] + ("" if result["decoder"] == "ar" else f", n={result['block_size']}")
    how += f", temperature {result['temperature']:g}" if result["temperature"] else ""
    state = "ends in a loop" if result["repeats"] else "finished" if result["finished"] else "met the token limit"
    return (
        f"{result['tokens']} tokens in {result['forwards']} forwards: {result['tokens_per_forward']:.2f} tokens "
        f"a forward, {result['seconds']:.2f} s, {result['tokens_per_second']:.0f} tokens/s ({how}; {state})"
    )
