"""A tiny model with a byte tokenizer in a folder, as a user would have one, and prompts for it."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tiny_models import tiny_model

PAD, EOS = 0, 1


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token a byte, two special ones; any text can be encoded and nothing is learnt."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {"<pad>": PAD, "<eos>": EOS, **{letter: index + 2 for index, letter in enumerate(alphabet)}}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", model_max_length=256, padding_side="left"
    )


def save_tiny(folder: Path, arch: str = "llama", seed: int = 0) -> Path:
    """Write model and tokenizer into `folder`."""
    model = tiny_model(arch, seed=seed, vocab_size=258, eos_token_id=EOS, pad_token_id=PAD)
    model.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


def save_prompts(path: Path, count: int = 12) -> Path:
    """Write JSON lines with the keys `question` and `answer`."""
    lines = [{"question": f"What is {n} + {n * 7 % 10}?", "answer": f"#### {n + n * 7 % 10}"} for n in range(count)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return path
