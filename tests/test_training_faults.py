"""Faults that users met in training tools of this kind: one row, one or more tests.

| fault | test |
|---|---|
| pad is EOS, or there is no pad | here; test_trainer: the end token is learnt whatever the pad token is |
| no chat template | test_prompts: auto without a chat template is raw and one line says so |
| training text differs from generated text | here |
| packing leaks | here |
| accumulation changes the loss | test_trainer: four batches of one row and one batch of four rows … |
| resume differs | test_trainer: ten steps equal five and five to the bit (in epoch 2 as well) |
| tied embeddings lost on save | test_trainer: tied embeddings survive saving and load without this package |
| nothing to learn from | test_packing: sample without a response …, nothing to train on … |
| memory by vocabulary | test_losses: loss does not depend on the size of a chunk; no tensor of length … |
| collection killed | test_collect_folder: a killed collection goes on to the same bytes |
| stored first state is the answer | test_collect: the first state is the draft as drawn; states share no memory … |
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from jacobi_forcing import DecodeConfig, generate
from jacobi_forcing.backbone import Backbone
from jacobi_forcing.config import CollectConfig, ModelConfig, PromptsConfig, RecipeConfig, RoundConfig
from jacobi_forcing.mask import KINDS, visible
from jacobi_forcing.packing import PackedRows
from jacobi_forcing.recipe import run_recipe
from jacobi_forcing.tags import Kind, Tags
from jacobi_forcing.trajectories.store import TrajectoryReader
from reference_losses import random_trajectory
from tiny_folder import EOS, byte_tokenizer, save_prompts, save_tiny
from tiny_models import VOCAB, tiny_model

THINKING = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'].split('</think>')[-1] }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant><think>\n{% endif %}"
)


def recipe(folder: Path) -> RecipeConfig:
    return RecipeConfig(
        model=ModelConfig(str(folder / "model"), device="cpu"),
        prompts=PromptsConfig(str(folder / "prompts.jsonl"), field="question", limit=3),
        rounds=(RoundConfig(4, 2, window_size=2, learning_rate=1e-3, max_length=128, batch_size=2),),
        collect=CollectConfig(max_new_tokens=9, batch_size=3, shard_size=2),
        output=str(folder / "run"),
    )


@pytest.mark.parametrize("pad", ["<eos>", None])
def test_a_model_that_pads_with_its_end_token_or_with_none_is_collected_trained_and_decoded(
    tmp_path: Path, pad: str | None
) -> None:
    save_prompts(tmp_path / "prompts.jsonl", 3)
    tokenizer = byte_tokenizer()
    tokenizer.pad_token = pad
    model = tiny_model("llama", vocab_size=258, eos_token_id=EOS, pad_token_id=None if pad is None else EOS)
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    run_recipe(recipe(tmp_path))
    trained = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "model")
    loaded = AutoTokenizer.from_pretrained(tmp_path / "run" / "model")
    assert loaded.pad_token == pad
    inputs = loaded("What is 1 + 7?", return_tensors="pt", return_token_type_ids=False)
    expected = trained.generate(**inputs, max_new_tokens=11, do_sample=False)
    assert torch.equal(generate(trained, **inputs, decode=DecodeConfig(block_size=4), max_new_tokens=11), expected)


def test_what_is_trained_on_are_the_generated_ids_behind_the_templates_own_never_text_tokenised_again(
    tmp_path: Path,
) -> None:
    save_tiny(tmp_path / "model")
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = THINKING
    tokenizer.save_pretrained(tmp_path / "model")
    save_prompts(tmp_path / "prompts.jsonl", 3)
    run_recipe(recipe(tmp_path))
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    trajectories = list(TrajectoryReader(tmp_path / "run" / "round-1" / "trajectories"))
    rows = PackedRows(trajectories, max_length=128, window_size=2)
    trained = [rows[index] for index in range(len(rows))]
    for line, trajectory in zip((tmp_path / "prompts.jsonl").read_text().splitlines(), trajectories, strict=True):
        messages = [{"role": "user", "content": json.loads(line)["question"]}]
        text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        assert text.endswith("<think>\n")  # a template would drop this block, were the answer put through it again
        prompt = tokenizer(text, add_special_tokens=False)["input_ids"]
        ids = torch.tensor([prompt])
        out = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=9)
        generated = out[0, len(prompt) :].tolist()
        assert any(_samples(row).count((prompt, generated)) for row in trained)
        # Random bytes are no text that a tokenizer would give back.
        assert trajectory.response_ids == generated
    assert any(
        tokenizer(tokenizer.decode(one.response_ids), add_special_tokens=False)["input_ids"] != one.response_ids
        for one in trajectories
    )


def _samples(row: dict[str, torch.Tensor]) -> list[tuple[list[int], list[int]]]:
    """Prompt and clean tokens of each sample of a row."""
    tags, ids = Tags.of(row["tags"]), row["input_ids"]
    return [
        (
            ids[(tags.sample == sample) & (tags.kind == Kind.PROMPT)].tolist(),
            ids[(tags.sample == sample) & (tags.kind == Kind.CLEAN)].tolist(),
        )
        for sample in range(int(tags.sample.max()) + 1)
    ]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("arch", ["llama", "gpt2"])
def test_clean_logits_stay_to_the_bit_whatever_noisy_blocks_and_other_samples_hold(arch: str, kind: str) -> None:
    model = tiny_model(arch)
    backbone = Backbone(model)
    rows = PackedRows([random_trajectory(s, 3 + s, 7 + s, 4) for s in range(2)], max_length=64, window_size=2)
    assert len(rows) == 1
    ids, tags = rows[0]["input_ids"][None], Tags.of(rows[0]["tags"][None])
    mask = backbone.attention_mask(visible(tags, tags, kind), tags.position, tags.position)

    def logits(changed: torch.Tensor) -> torch.Tensor:
        other = torch.where(changed, (ids + 17) % VOCAB, ids)
        with torch.no_grad():
            return backbone.logits(backbone.hidden(other, tags.position, mask))

    before = logits(torch.zeros_like(ids, dtype=torch.bool))
    clean = (tags.kind == Kind.CLEAN) | (tags.kind == Kind.PROMPT)
    noisy, first = tags.kind == Kind.NOISY, tags.sample == 0
    for changed, kept in ((noisy, clean), (~first, first), (first, ~first)):
        after = logits(changed)
        assert torch.equal(after[kept], before[kept])
        assert not torch.equal(after[changed], before[changed])
