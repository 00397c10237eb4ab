from __future__ import annotations

import pytest
import torch

from jacobi_forcing.errors import ConfigError
from jacobi_forcing.packing import PackedRows
from jacobi_forcing.tags import Kind, Tags
from jacobi_forcing.training import Collator, JacobiForcingTrainer
from jacobi_forcing.training.on_policy import make_states
from reference_losses import Plain, reference_losses
from test_trainer import TRAJECTORIES, assert_same_bits, settings, trained, weights
from tiny_models import shared_model, tiny_model

ON_POLICY = {"states": "on_policy", "schedule_phase": "random"}


def plain_samples(batch: dict[str, torch.Tensor], trajectories) -> list[Plain]:
    """The samples of a batch of one row, read off the row slot by slot."""
    tags, ids = Tags.of(batch["tags"][0]), batch["input_ids"][0]
    samples = []
    for sample in range(int(tags.sample.max()) + 1):
        mine = tags.sample == sample
        blocks = range(int(tags.block[mine].max()) + 1)
        noisy, clean = (
            [ids[mine & (tags.kind == kind) & (tags.block == block)].tolist() for block in blocks]
            for kind in (Kind.NOISY, Kind.CLEAN)
        )
        prompt = ids[mine & (tags.kind == Kind.PROMPT)].tolist()
        finished = next(t.finished for t in trajectories if t.prompt_ids == prompt)
        samples.append(Plain(prompt, noisy, clean, finished))
    return samples


@pytest.mark.parametrize(
    ("options", "positions", "reduction"),
    [
        ({"mask": "noise_conditioned"}, "all", "block"),
        ({"mask": "noise_conditioned_window", "schedule": "reverse"}, "from_mismatch", "token"),
        ({"mask": "intra_window_clean", "t_min": 0.3, "t_max": 0.9}, "from_mismatch", "block"),
        ({"mask": "clean_context", "schedule": "random"}, "all", "token"),
    ],
)
def test_losses_are_those_of_the_states_that_were_made(tmp_path, options, positions, reduction):
    model = shared_model("llama")
    args = settings(
        tmp_path, states="on_policy", max_length=120, loss_positions=positions, loss_reduction=reduction, **options
    )
    trainer = JacobiForcingTrainer(model, args, TRAJECTORIES)
    row = trainer._collate([trainer.train_dataset[0]])
    with torch.no_grad():
        found = trainer.losses(trainer._with_states(row, log=False))
        made, _ = make_states(trainer.backbone, row)
        samples = plain_samples(made, TRAJECTORIES)
        expected = reference_losses(model, samples, options["mask"], 4, positions, reduction)
    assert not torch.equal(made["input_ids"], row["input_ids"])
    assert found.consistency.item() == pytest.approx(expected[0].item(), rel=1e-4)
    assert found.ar.item() == pytest.approx(expected[1].item(), rel=1e-4)


def test_four_batches_of_one_row_and_one_batch_of_four_rows_give_the_same_gradients(tmp_path):
    shared = {"optim": "sgd", "max_steps": 1, "max_grad_norm": 0.0, "warmup_steps": 0, "learning_rate": 1.0}
    shared |= {"train_sampling_strategy": "sequential", "lr_scheduler_type": "constant", **ON_POLICY}
    steps = []
    for rows, batches in ((4, 1), (1, 4)):
        args = settings(tmp_path, per_device_train_batch_size=rows, gradient_accumulation_steps=batches, **shared)
        trainer = trained(tiny_model("llama"), args)
        steps.append((weights(trainer), trainer.state.log_history[0]))
    start = tiny_model("llama").state_dict()
    (expected, expected_log), (after, log) = steps
    largest = max((expected[name] - start[name]).abs().max() for name in start)
    assert largest > 0
    for name in start:
        assert (after[name] - expected[name]).abs().max() <= 1e-5 * largest, name
    for name in ("loss", "consistency_loss", "noise_ratio", "block_sweeps", "drifted_blocks"):
        assert log[name] == pytest.approx(expected_log[name], rel=1e-5), name


@pytest.mark.parametrize("arch", ["llama", "gpt2"])
def test_ten_steps_equal_five_and_five_to_the_bit(tmp_path, arch):
    # GPT-2 has dropout, so the random state must come back as well. Step 5 is in the second epoch.
    args = settings(tmp_path, max_steps=10, save_strategy="steps", save_steps=5, **ON_POLICY)
    expected = trained(tiny_model(arch), args)
    resumed = trained(tiny_model(arch, seed=9), args, resume=str(tmp_path / "checkpoint-5"))
    assert resumed.state.global_step == 10
    assert_same_bits(weights(resumed), weights(expected))


def test_states_follow_the_weights(tmp_path):
    # The same row in the same epoch, before and after some steps of training.
    trainer = JacobiForcingTrainer(tiny_model("llama"), settings(tmp_path, max_steps=4, **ON_POLICY), TRAJECTORIES)
    rows = [trainer.train_dataset[index] for index in range(len(trainer.train_dataset))]
    before = trainer._with_states(trainer._collate(rows), log=False)["input_ids"]
    trainer.train()
    assert not torch.equal(trainer._with_states(trainer._collate(rows), log=False)["input_ids"], before)


def test_what_the_states_cost_is_logged_per_step_and_not_where_they_are_stored(tmp_path):
    args = settings(tmp_path, max_steps=2, logging_steps=2, gradient_accumulation_steps=2, **ON_POLICY)
    entry = trained(tiny_model("llama"), args).state.log_history[0]
    # Two batches a step, each a clean pass and up to n - 1 sweeps.
    assert 2 < entry["state_forwards"] <= 8
    assert entry["block_sweeps"] >= entry["swept_blocks"] >= entry["drifted_blocks"] > 0
    assert entry["state_seconds"] > 0
    assert "state_forwards" not in trained(tiny_model("llama"), settings(tmp_path)).state.log_history[0]


def test_evaluation_makes_states_too_and_the_same_each_time(tmp_path):
    args = settings(tmp_path, per_device_eval_batch_size=8, **ON_POLICY)
    trainer = JacobiForcingTrainer(tiny_model("llama"), args, TRAJECTORIES, eval_trajectories=TRAJECTORIES[:3])
    rows = trainer.eval_dataset
    batch = trainer._with_states(trainer._collate([rows[index] for index in range(len(rows))]), log=False)
    with torch.no_grad():
        expected = trainer.losses(batch).total.item()
    assert trainer.evaluate()["eval_loss"] == pytest.approx(expected, rel=1e-5)
    assert trainer.evaluate()["eval_loss"] == pytest.approx(expected, rel=1e-5)


def test_mixed_precision_reaches_the_sweeps(tmp_path):
    model, kinds = tiny_model("llama"), set()
    trainer = JacobiForcingTrainer(model, settings(tmp_path, bf16=True, **ON_POLICY), TRAJECTORIES)
    model.model.layers[0].mlp.register_forward_hook(lambda module, inputs, output: kinds.add(output.dtype))
    rows = [trainer.train_dataset[index] for index in range(len(trainer.train_dataset))]
    trainer._with_states(trainer._collate(rows), log=False)
    assert kinds == {torch.bfloat16}
    trainer.train()


def test_rows_and_settings_must_agree_on_the_states(tmp_path):
    rows = PackedRows(TRAJECTORIES, max_length=120, window_size=2)
    with pytest.raises(ConfigError, match=r"states.*seen: stored; expected: on_policy"):
        JacobiForcingTrainer(tiny_model("llama"), settings(tmp_path, states="on_policy"), rows)
    assert "query" not in Collator(states="on_policy")([rows[0]])
