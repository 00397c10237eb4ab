"""What the tests of decoding share: prompts, the library's answers, rows that are told the truth, and a fake model."""

from __future__ import annotations

import functools
import random
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

from jacobi_forcing import DecodeConfig, generate
from jacobi_forcing.decode.drafts import DraftFill
from jacobi_forcing.decode.engine import ROWS
from jacobi_forcing.decode.ngrams import NgramPool
from jacobi_forcing.decode.rows import Row
from jacobi_forcing.decode.stats import RowStats
from tiny_models import VOCAB, shared_model

DECODERS = ("ar", "jacobi", "window", "recycle", "multiblock")


def prompt(length: int = 11, seed: int = 0) -> list[int]:
    """A random prompt, without the 0 that pads."""
    rng = random.Random(f"{length} {seed}")
    return [rng.randrange(1, VOCAB) for _ in range(length)]


def prompt_tensor(length: int = 11, seed: int = 0) -> torch.Tensor:
    """The prompt as a batch of one."""
    return torch.tensor([prompt(length, seed)])


def library(model: PreTrainedModel, ids: Sequence[int], max_new_tokens: int, **kwargs: Any) -> list[int]:
    """What the library's own greedy generate adds to a prompt."""
    out = model.generate(torch.tensor([ids]), do_sample=False, max_new_tokens=max_new_tokens, **kwargs)
    return out[0, len(ids) :].tolist()


def ours(model: PreTrainedModel, ids: Sequence[int], max_new_tokens: int, **kwargs: Any) -> list[int]:
    """What we add to it; keywords of `DecodeConfig` go there, the others to `generate`."""
    decode = DecodeConfig(**{name: kwargs.pop(name) for name in DecodeConfig.__dataclass_fields__ if name in kwargs})
    out = generate(model, torch.tensor([ids]), decode=decode, max_new_tokens=max_new_tokens, **kwargs)
    return out[0, len(ids) :].tolist()


@functools.cache
def reference(arch: str, length: int = 11, seed: int = 0, max_new_tokens: int = 40) -> list[int]:
    """The library's greedy text of a shared model, without an end token."""
    return library(shared_model(arch), prompt(length, seed), max_new_tokens)


def first_met_at(arch: str, offset: int) -> tuple[list[int], int]:
    """A prompt, and a token that its greedy text has at `offset` and not before: an end token that ends it there."""
    for seed in range(30):
        text = reference(arch, seed=seed)
        if text[offset] not in text[:offset]:
            return prompt(seed=seed), text[offset]
    raise AssertionError(f"no text of {arch} has a new token at offset {offset}")


def told_row(
    ids: Sequence[int],
    truth: Sequence[int],
    config: DecodeConfig,
    max_new_tokens: int,
    eos_ids: Sequence[int] = (),
    wrong: float = 0.2,
) -> Row:
    """A row whose guesses are the true text, but for a share of wrong tokens: runs of all lengths are accepted."""
    rng = random.Random(0)

    class Told(ROWS[config.decoder]):  # type: ignore[misc]  # the base is chosen at run time
        def _first_guesses(self) -> list[int]:
            return self._told(len(super()._first_guesses()))

        def _next_guesses(self, leftover: list[int]) -> list[int]:
            return self._told(len(super()._next_guesses(leftover)))

        def _told(self, count: int) -> list[int]:
            right = truth[len(self.generated) :][:count]
            return [rng.randrange(VOCAB) if rng.random() < wrong else token for token in right]

    pool = NgramPool() if config.candidates else None
    return Told(ids, config, eos_ids, max_new_tokens, DraftFill(config, ids), pool)


SCRIPT = list(range(20, 60))
"""Tokens that no draft drawn from the prompt 1, 2, 3 can hit."""


class ScriptedModel(LlamaForCausalLM):
    """Predicts the script's token at every position, whatever the tokens: a draft converges in one sweep.

    `fed` lists the ids that each forward was given.
    """

    def __init__(self, script: Sequence[int], prompt_length: int, vocab_size: int = 64, **config: Any) -> None:
        heads = {"num_attention_heads": 1, "hidden_size": 2, "intermediate_size": 2, "num_hidden_layers": 1}
        ends = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
        super().__init__(LlamaConfig(vocab_size=vocab_size, **heads, **(ends | config)))
        self.script = torch.tensor(script)
        self.prompt_length = prompt_length
        self.fed: list[list[list[int]]] = []

    def forward(  # type: ignore[override]  # fewer arguments than the library's
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        attention_mask: Tensor | None = None,
        cache: Any = None,
        use_cache: bool = True,
        logits_to_keep: int | Tensor = 0,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        rows, slots = input_ids.shape
        self.fed.append(input_ids.tolist())
        blank = torch.zeros(rows, 1, slots, 2)
        cache.update(blank, blank, 0)
        told = self.script[(position_ids + 1 - self.prompt_length).clamp(0, len(self.script) - 1)]
        logits = torch.nn.functional.one_hot(told, self.config.vocab_size).float()
        columns = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        return CausalLMOutputWithPast(logits=logits[:, columns], cache=cache)


def run_script(decoder: str, **options: Any) -> tuple[list[int], RowStats, list[int]]:
    """Decode 12 tokens of the script in blocks of 4; returns ids, counts, and how many slots each forward had."""
    model = ScriptedModel(SCRIPT, prompt_length=3)
    decode = DecodeConfig(decoder=decoder, block_size=4)
    options = {"max_new_tokens": 12, "return_dict_in_generate": True} | options
    out = generate(model, torch.tensor([[1, 2, 3]]), decode=decode, **options)
    return out.sequences[0, 3:].tolist(), out.stats.rows[0], [len(fed[0]) for fed in model.fed]
