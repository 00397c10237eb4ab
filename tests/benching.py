"""What the tests of the bench share: a loaded tiny model, prompts of unequal length, and the library's own answers."""

from __future__ import annotations

from pathlib import Path

import torch

from jacobi_forcing.bench import ModelResult
from jacobi_forcing.config import DecodeConfig, ModelConfig
from jacobi_forcing.loading import Loaded, load
from jacobi_forcing.trajectories.prompts import Prompt
from tiny_folder import EOS, byte_tokenizer, save_tiny
from tiny_models import tiny_model

TEXTS = ("one", "twenty-two", "three hundred and three", "four", "fifty-five", "six hundred")
WINDOW = DecodeConfig(decoder="window", block_size=4)
JACOBI = DecodeConfig(decoder="jacobi", block_size=8)
RECYCLE = DecodeConfig(decoder="recycle", block_size=4, candidates=2)
MULTIBLOCK = DecodeConfig(decoder="multiblock", block_size=4, candidates=2)


def load_tiny(folder: Path, arch: str = "llama", seed: int = 0) -> Loaded:
    """A tiny model with a byte tokenizer, by way of a folder, as a user would load it."""
    return load(ModelConfig(str(save_tiny(folder, arch, seed)), device="cpu"))


def load_forgetful(folder: Path) -> Loaded:
    """A model whose next token depends on the last one alone: its texts run in circles, so that look-ups hit."""
    model = tiny_model("llama", vocab_size=258, eos_token_id=None, pad_token_id=0)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
    model.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return load(ModelConfig(str(folder), device="cpu"))


def prompts_for(loaded: Loaded, count: int = 3) -> list[Prompt]:
    """The first prompts, with an answer that can be graded."""
    return [Prompt(n, text, loaded.tokenizer(text)["input_ids"], "#### 1") for n, text in enumerate(TEXTS[:count])]


def library_answer(loaded: Loaded, prompt: Prompt, tokens: int) -> list[int]:
    """What the library's greedy generate adds to a prompt on its own, up to the end token."""
    out = loaded.model.generate(torch.tensor([prompt.ids]), do_sample=False, max_new_tokens=tokens)
    ids = out[0, len(prompt.ids) :].tolist()
    return ids[: ids.index(EOS) + 1] if EOS in ids else ids


def names(result: ModelResult) -> list[tuple[str, int]]:
    """Who was measured at which batch size, in order."""
    return [(decoder.decoder, decoder.batch_size) for decoder in result.decoders]
