from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from collecting import PROMPTS, N, assert_plain, collected, plain_response, run, shards, some_prompts
from jacobi_forcing.backbone import Backbone
from jacobi_forcing.errors import ConfigError, DataError
from jacobi_forcing.trajectories import states as states_module
from jacobi_forcing.trajectories.prompts import Prompt
from jacobi_forcing.trajectories.responses import greedy_responses
from jacobi_forcing.trajectories.states import draw_state
from jacobi_forcing.trajectories.store import Trajectory, TrajectoryWriter
from tiny_models import ARCHITECTURES, VOCAB, shared_model, tiny_model

pytest.importorskip("pyarrow")


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_every_state_equals_that_of_a_block_swept_alone_without_a_cache(arch: str, tmp_path: Path) -> None:
    model = shared_model(arch)
    for trajectory, prompt in zip(collected(model, tmp_path), PROMPTS, strict=True):
        assert trajectory.prompt_ids == prompt.ids
        assert trajectory.response_ids == plain_response(model, prompt.ids, 14)
        assert [len(states[0]) for states in trajectory.states] == [4, 4, 4, 2]
        assert_plain(model, trajectory)


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_responses_equal_the_librarys_greedy_generation(arch: str) -> None:
    model = tiny_model(arch)
    ids = [prompt.ids for prompt in PROMPTS]
    # The library would let these change what is generated; a fixed point is the plain argmax.
    model.generation_config.repetition_penalty = 1.7
    found = greedy_responses(Backbone(model), ids, [20] * len(ids), [])
    model.generation_config.repetition_penalty = 1.0
    for prompt, response in zip(ids, found, strict=True):
        expected = model.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=20)[0, len(prompt) :]
        assert response == expected.tolist()


@pytest.mark.parametrize("offset", range(2 * N + 2))
def test_a_response_ends_with_the_first_end_token_wherever_it_stands(offset: int, tmp_path: Path) -> None:
    model = shared_model("llama")
    free = plain_response(model, PROMPTS[0].ids, 14)
    # A second end token that comes first in other rows: rows end at different steps and leave the batch.
    eos_ids = [free[offset], plain_response(model, PROMPTS[2].ids, 14)[3]]
    for trajectory, prompt in zip(collected(model, tmp_path, eos_ids=eos_ids), PROMPTS, strict=True):
        expected = plain_response(model, prompt.ids, 14, eos_ids)
        assert trajectory.response_ids == expected
        assert trajectory.finished == (expected[-1] in eos_ids)
        assert sum(len(states[-1]) for states in trajectory.states) == len(expected)


def test_the_models_own_end_tokens_are_used(tmp_path: Path) -> None:
    model = tiny_model("llama")
    model.generation_config.eos_token_id = plain_response(model, PROMPTS[0].ids, 14)[2:4]
    first = collected(model, tmp_path)[0]
    assert first.finished
    assert len(first.response_ids) == 3


@pytest.mark.parametrize("block_size", [1, 2, 13, 14, 15, 64])
def test_any_block_size_covers_the_response(block_size: int, tmp_path: Path) -> None:
    for trajectory in collected(shared_model("qwen2"), tmp_path, PROMPTS[:2], block_size=block_size):
        assert list(itertools.chain(*(states[-1] for states in trajectory.states))) == trajectory.response_ids
        assert all(len(states) <= max(len(states[0]), 1) for states in trajectory.states)


@pytest.mark.parametrize("arch", ["llama", "gemma3", "gpt2"])
def test_neither_the_batch_nor_its_order_changes_a_byte(arch: str, tmp_path: Path) -> None:
    model = shared_model(arch)
    for size in (1, 2, 5):
        run(model, tmp_path / str(size), batch_size=size)
    assert shards(tmp_path / "1") == shards(tmp_path / "2") == shards(tmp_path / "5")


def test_shards_do_not_change_the_trajectories(tmp_path: Path) -> None:
    model = shared_model("llama")
    assert collected(model, tmp_path / "a", shard_size=1) == collected(model, tmp_path / "b", shard_size=99)


def test_a_small_budget_of_logits_takes_more_forwards_to_the_same_states(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = shared_model("llama")
    whole = run(model, tmp_path / "a")
    for budget in (0, 6 * 3 * VOCAB):
        monkeypatch.setattr(states_module, "LOGITS_PER_FORWARD", budget)
        cut = run(model, tmp_path / str(budget))
        assert cut.forwards > whole.forwards
        assert cut.sweeps == whole.sweeps
        assert shards(tmp_path / str(budget)) == shards(tmp_path / "a")


def test_the_first_state_is_the_draft_as_drawn(tmp_path: Path) -> None:
    trajectories = collected(shared_model("llama"), tmp_path, seed=3)
    changed = 0
    for trajectory in trajectories:
        for block, states in enumerate(trajectory.states):
            context = [*trajectory.prompt_ids, *trajectory.response_ids[: block * N]]
            assert states[0] == draw_state(states[-1], context, seed=3, sample=trajectory.sample, block=block)
            assert set(states[0][1:]) <= set(context)
            changed += states[0] != states[-1]
    assert changed > 12  # a random draft of four tokens is hardly ever the answer


def test_states_share_no_memory_while_they_are_collected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[Trajectory] = []
    real = TrajectoryWriter.write_shard

    def write_shard(self: TrajectoryWriter, shard: int, trajectories: Sequence[Trajectory], *rest: Any) -> Path:
        written.extend(trajectories)
        return real(self, shard, trajectories, *rest)

    monkeypatch.setattr(TrajectoryWriter, "write_shard", write_shard)
    run(shared_model("llama"), tmp_path)
    lists = [state for trajectory in written for states in trajectory.states for state in states]
    lists += [t.response_ids for t in written] + [t.prompt_ids for t in written]
    assert len({id(item) for item in lists}) == len(lists)


def test_drafts_differ_between_seeds_samples_and_blocks_and_never_move_the_response(tmp_path: Path) -> None:
    model, twins = shared_model("llama"), [Prompt(i, "", PROMPTS[0].ids) for i in range(2)]
    a = collected(model, tmp_path / "a", twins, seed=0)
    b = collected(model, tmp_path / "b", twins, seed=1)
    assert a[0].response_ids == a[1].response_ids == b[0].response_ids
    assert len({str([states[0][1:] for states in t.states]) for t in (*a, *b)}) == 4


def test_each_of_seed_sample_and_block_changes_the_draw() -> None:
    base = {"seed": 0, "sample": 0, "block": 0}
    draws = [
        draw_state([7] * 9, range(60), **{**base, **change})
        for change in ({}, {"seed": 1}, {"sample": 1}, {"block": 1})
    ]
    assert len({tuple(draw) for draw in draws}) == 4
    assert draws[0] == draw_state([7] * 9, range(60), **base)


def test_responses_of_very_unequal_lengths_leave_the_batch_one_by_one(tmp_path: Path) -> None:
    model, prompts = shared_model("llama"), some_prompts([5] * 6)
    texts = [plain_response(model, prompt.ids, 14) for prompt in prompts]
    eos_ids = [text[at] for text, at in zip(texts[::2], (2, 6, 9), strict=True)]
    trajectories = collected(model, tmp_path, prompts, eos_ids=eos_ids, batch_size=6, shard_size=6)
    assert len(trajectories) == 6
    assert len({len(t.response_ids) for t in trajectories}) >= 3
    for trajectory in trajectories:
        assert_plain(model, trajectory)


def test_a_row_that_has_ended_and_waits_is_not_fed_past_the_context(tmp_path: Path) -> None:
    model = tiny_model("gpt2", max_position_embeddings=20)
    prompts = some_prompts([19, 4, 5, 4, 5, 4])
    trajectories = collected(model, tmp_path, prompts, batch_size=6, shard_size=6)
    assert [len(t.response_ids) for t in trajectories] == [1, 14, 14, 14, 14, 14]


def test_drafts_from_the_vocabulary_hold_only_ids_of_the_tokenizer(tmp_path: Path) -> None:
    model, known = shared_model("llama"), [50, 52, 54]
    for trajectory in collected(model, tmp_path, draft_init="vocabulary", vocabulary=known):
        assert {token for states in trajectory.states for token in states[0][1:]} <= set(known)
    with pytest.raises(ConfigError, match="ids that the tokenizer has"):
        run(model, tmp_path / "none", draft_init="vocabulary")


def test_a_context_that_is_nearly_full_cuts_the_response(tmp_path: Path) -> None:
    model = tiny_model("gpt2", max_position_embeddings=20)
    prompts = some_prompts([19, 16, 4])
    trajectories = collected(model, tmp_path, prompts)
    assert [len(t.response_ids) for t in trajectories] == [1, 4, 14]
    assert [t.response_ids for t in trajectories] == [
        plain_response(model, prompt.ids, limit) for prompt, limit in zip(prompts, (1, 4, 14), strict=True)
    ]
    with pytest.raises(DataError, match=r"Prompt 0 cannot be continued.*20 tokens.*context of 20"):
        run(model, tmp_path / "full", some_prompts([20]))


def test_a_model_in_training_mode_is_collected_without_dropout_and_stays_in_it(tmp_path: Path) -> None:
    model = tiny_model("gpt2", attn_pdrop=0.5, resid_pdrop=0.5, embd_pdrop=0.5)
    run(model, tmp_path / "a")
    run(model.train(), tmp_path / "b")
    assert model.training
    assert shards(tmp_path / "a") == shards(tmp_path / "b")
