from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from collecting import PROMPTS, N, next_tokens, plain_states, run
from jacobi_forcing.backbone import Backbone
from jacobi_forcing.config import CollectConfig
from jacobi_forcing.errors import ConfigError
from jacobi_forcing.packing import PackedRows
from jacobi_forcing.schedule import nearest_state, noise_ratios
from jacobi_forcing.tags import Kind, Tags
from jacobi_forcing.training import Collator
from jacobi_forcing.training.on_policy import make_states
from jacobi_forcing.trajectories.collect import collect
from jacobi_forcing.trajectories.store import Trajectory, TrajectoryReader
from tiny_models import VOCAB, shared_model, tiny_model

pytest.importorskip("pyarrow")


def responses(model: PreTrainedModel, folder: Path) -> list[Trajectory]:
    """Responses alone, as a recipe with states on policy collects them."""
    settings = CollectConfig(max_new_tokens=18, batch_size=3, shard_size=4)
    collect(Backbone(model), PROMPTS, folder=folder, config=settings, block_size=N, states=False)
    return list(TrajectoryReader(folder))


def on_policy_rows(trajectories: list[Trajectory], **changes) -> PackedRows:
    options = {"max_length": 130, "window_size": 4, "schedule_phase": "random", "seed": 3, **changes}
    return PackedRows(trajectories, states="on_policy", **options)


def batch_of(rows: PackedRows, indices) -> dict[str, torch.Tensor]:
    return Collator(states="on_policy")([rows[index] for index in indices])


def noisy_blocks(batch: dict[str, torch.Tensor]) -> list[list[int]]:
    """Every noisy block in the order of rows, samples and blocks."""
    tags = Tags.of(batch["tags"])
    found: dict[tuple[int, int, int], list[int]] = {}
    for row, column in (tags.kind == Kind.NOISY).nonzero().tolist():
        key = (row, int(tags.sample[row, column]), int(tags.block[row, column]))
        found.setdefault(key, []).append(int(batch["input_ids"][row, column]))
    return [found[key] for key in sorted(found)]


def contexts(rows: PackedRows, trajectories: list[Trajectory]) -> list[tuple[list[int], list[int]]]:
    """(text before it, fixed point) of every block, in the same order."""
    by_number = {t.sample: t for t in trajectories}
    found = []
    for row in rows._rows:
        for member in row:
            t = by_number[rows._samples[member].number]
            for start in range(0, len(t.response_ids), N):
                found.append(([*t.prompt_ids, *t.response_ids[:start]], t.response_ids[start : start + N]))
    return found


def forced_states(model: PreTrainedModel, context, draft, fixed_point) -> list[list[int]]:
    """One block alone, no cache, the whole of it each time; what is right stays, and the next slot is made right."""
    states = [draft]
    while states[-1] != fixed_point:
        right = next(i for i, (a, b) in enumerate(zip(states[-1], fixed_point, strict=True)) if a != b)
        predicted = next_tokens(model, [*context, *states[-1]])[len(context) : -1]
        states.append([*fixed_point[: right + 1], *predicted[right:]])
    return states


@pytest.mark.parametrize("arch", ["llama", "qwen3", "gemma3", "gpt2"])
def test_states_are_those_that_a_stored_trajectory_from_the_same_draft_would_give(arch: str, tmp_path: Path) -> None:
    model = shared_model(arch)
    trajectories = responses(model, tmp_path)
    rows = on_policy_rows(trajectories)
    assert len(rows) > 1
    batch = batch_of(rows, range(len(rows)))
    made, counts = make_states(Backbone(model), batch)
    expected, ratios = [], []
    drafts = noisy_blocks(batch)
    for (context, _), draft, wanted in zip(contexts(rows, trajectories), drafts, batch["wanted"].tolist(), strict=True):
        states = plain_states(model, context, draft)
        of_block = noise_ratios(states)
        pick = nearest_state(of_block, wanted)
        expected.append(states[pick])
        ratios.append(of_block[pick])
    assert noisy_blocks(made) == expected
    assert made["noise_ratios"].tolist() == pytest.approx(ratios)
    assert counts.drifted == 0
    assert expected != drafts
    assert len(set(ratios)) > 2
    # Only noisy slots have changed.
    clean = Tags.of(batch["tags"]).kind != Kind.NOISY
    assert torch.equal(made["input_ids"][clean], batch["input_ids"][clean])


@pytest.mark.parametrize("arch", ["llama", "gpt2"])
def test_a_model_that_has_moved_away_from_the_texts_sweeps_towards_them_all_the_same(arch: str, tmp_path: Path) -> None:
    trajectories = responses(shared_model(arch), tmp_path)
    model = tiny_model(arch, seed=7)
    rows = on_policy_rows(trajectories, max_length=400)
    batch = batch_of(rows, [0])
    made, counts = make_states(Backbone(model), batch)
    expected = []
    for (context, fixed_point), draft, wanted in zip(
        contexts(rows, trajectories), noisy_blocks(batch), batch["wanted"].tolist(), strict=True
    ):
        states = forced_states(model, context, draft, fixed_point)
        expected.append(states[nearest_state(noise_ratios(states), wanted)])
    assert noisy_blocks(made) == expected
    assert counts.drifted > 0
    assert counts.forwards <= N, "the clean pass and n - 1 sweeps at most"


def test_a_state_depends_on_no_other_sample_of_the_batch(tmp_path: Path) -> None:
    model = shared_model("llama")
    rows = on_policy_rows(responses(model, tmp_path))
    together, _ = make_states(Backbone(model), batch_of(rows, range(len(rows))))
    alone = []
    for index in range(len(rows)):
        alone += noisy_blocks(make_states(Backbone(model), batch_of(rows, [index]))[0])
    assert noisy_blocks(together) == alone


def test_drafts_are_new_in_each_epoch_and_come_from_the_text_before_or_the_vocabulary(tmp_path: Path) -> None:
    trajectories = responses(shared_model("llama"), tmp_path)
    rows = on_policy_rows(trajectories, schedule_phase="fixed")
    epochs = []
    for epoch in (0, 1, 0):
        rows.set_epoch(epoch)
        epochs.append(noisy_blocks(batch_of(rows, range(len(rows)))))
    assert epochs[0] == epochs[2] != epochs[1]
    for (context, fixed_point), draft in zip(contexts(rows, trajectories), epochs[0], strict=True):
        assert draft[0] == fixed_point[0]
        assert set(draft[1:]) <= set(context)
    rows = on_policy_rows(trajectories, vocabulary=[50, 52])
    drafts = noisy_blocks(batch_of(rows, range(len(rows))))
    assert {token for draft in drafts for token in draft[1:]} == {50, 52}
    assert on_policy_rows(trajectories, vocabulary=[50, VOCAB + 8]).max_token == VOCAB + 8


def test_where_no_noise_is_wanted_no_forward_is_made(tmp_path: Path) -> None:
    model = shared_model("llama")
    rows = on_policy_rows(responses(model, tmp_path), t_min=0.0, t_max=0.0)
    made, counts = make_states(Backbone(model), batch_of(rows, range(len(rows))))
    assert (counts.forwards, counts.sweeps) == (0, 0)
    assert made["noise_ratios"].tolist() == [0.0] * len(made["noise_ratios"])


def test_dropout_is_off_while_states_are_made_and_back_on_after(tmp_path: Path) -> None:
    model = tiny_model("gpt2", attn_pdrop=0.5, resid_pdrop=0.5, embd_pdrop=0.5)
    rows = on_policy_rows(responses(model, tmp_path))
    batch = batch_of(rows, range(len(rows)))
    expected, _ = make_states(Backbone(model), batch)
    found, _ = make_states(Backbone(model.train()), batch)
    assert model.training
    assert torch.equal(found["input_ids"], expected["input_ids"])


def test_stored_states_are_not_kept_where_they_are_not_used(tmp_path: Path) -> None:
    model = shared_model("llama")
    run(model, tmp_path / "states", max_new_tokens=18)
    responses(model, tmp_path / "bare")
    both = [on_policy_rows(list(TrajectoryReader(tmp_path / name))) for name in ("states", "bare")]
    for one, other in zip(*([rows[i] for i in range(len(rows))] for rows in both), strict=True):
        assert torch.equal(one["input_ids"], other["input_ids"])
    assert not both[0]._samples[0].states


def test_an_unknown_kind_of_states_is_refused_with_the_known_ones(tmp_path: Path) -> None:
    trajectories = responses(shared_model("llama"), tmp_path)
    with pytest.raises(ConfigError, match=r"'states'.*'fresh'.*stored or on_policy"):
        PackedRows(trajectories, max_length=64, window_size=2, states="fresh")
