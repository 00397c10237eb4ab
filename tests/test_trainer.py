from __future__ import annotations

import importlib
import json
import sys

import pytest
import torch
from transformers import AutoModelForCausalLM, TrainerCallback

from jacobi_forcing.errors import ConfigError, DataError, MissingExtraError
from jacobi_forcing.packing import PackedRows
from jacobi_forcing.training import Collator, JacobiForcingConfig, JacobiForcingTrainer, last_checkpoint
from reference_losses import random_trajectory
from tiny_models import tiny_model

# They make rows of unequal lengths.
TRAJECTORIES = [
    random_trajectory(sample, 3 + sample, 4 + 3 * sample, 4, finished=sample % 3 > 0) for sample in range(6)
]


def settings(folder, **changes) -> JacobiForcingConfig:
    values = {
        "output_dir": str(folder),
        "block_size": 4,
        "window_size": 4,
        "max_length": 48,
        "per_device_train_batch_size": 2,
        "learning_rate": 1e-2,
        "max_steps": 2,
        "logging_steps": 1,
        "save_strategy": "no",
        "use_cpu": True,
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
    }
    return JacobiForcingConfig(**{**values, **changes})


def trained(model, args, trajectories=TRAJECTORIES, resume=None, **kwargs) -> JacobiForcingTrainer:
    trainer = JacobiForcingTrainer(model, args, trajectories, **kwargs)
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def weights(trainer) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in trainer.model.state_dict().items()}


def assert_same_bits(ours, theirs):
    assert ours.keys() == theirs.keys()
    for name in theirs:
        assert torch.equal(ours[name], theirs[name]), name


def test_four_batches_of_one_row_and_one_batch_of_four_rows_give_the_same_gradients(tmp_path):
    # One plain SGD step: the weights differ by the gradient alone.
    shared = {"optim": "sgd", "max_steps": 1, "max_grad_norm": 0.0, "warmup_steps": 0, "learning_rate": 1.0}
    shared |= {"train_sampling_strategy": "sequential", "lr_scheduler_type": "constant"}
    steps = []
    for rows, batches in ((4, 1), (1, 4), (2, 2)):
        args = settings(tmp_path, per_device_train_batch_size=rows, gradient_accumulation_steps=batches, **shared)
        trainer = trained(tiny_model("llama"), args)
        assert len(set(trainer.train_dataset.lengths[:4])) > 1, "rows of unequal lengths"
        steps.append((weights(trainer), trainer.state.log_history[0]))
    start = tiny_model("llama").state_dict()
    expected, expected_log = steps[0]
    largest = max((expected[name] - start[name]).abs().max() for name in start)
    for after, log in steps[1:]:
        for name in start:
            assert (after[name] - expected[name]).abs().max() <= 1e-5 * largest, name
        for name in ("loss", "consistency_loss", "ar_loss", "noise_ratio", "grad_norm"):
            assert log[name] == pytest.approx(expected_log[name], rel=1e-5), name


class EpochLog(TrainerCallback):
    """What the data set was told at each step."""

    def __init__(self):
        self.seen: list[int] = []

    def on_step_end(self, args, state, control, train_dataloader=None, **kwargs):
        self.seen.append(int(train_dataloader.dataset._epoch))


@pytest.mark.parametrize(
    ("arch", "phase", "batches", "optimizer"),
    [
        ("llama", "fixed", 1, "adamw"),
        ("llama", "random", 1, "adamw"),
        ("gpt2", "random", 2, "adamw"),
        ("llama", "random", 1, "muon"),
    ],
)
def test_ten_steps_equal_five_and_five_to_the_bit(tmp_path, arch, phase, batches, optimizer):
    # GPT-2 has dropout, so the random state must come back as well. Three batches an epoch: step 5 is in the second.
    changes = {
        "max_steps": 10,
        "save_strategy": "steps",
        "save_steps": 5,
        "schedule_phase": phase,
        "optimizer": optimizer,
    }
    args = settings(tmp_path, gradient_accumulation_steps=batches, **changes)
    whole, halves = EpochLog(), EpochLog()
    expected = trained(tiny_model(arch), args, callbacks=[whole])
    resumed = trained(tiny_model(arch, seed=9), args, resume=str(tmp_path / "checkpoint-5"), callbacks=[halves])
    assert resumed.state.global_step == 10
    assert halves.seen == whole.seen[5:]
    assert whole.seen[4] > 0, "the checkpoint is not in the first epoch"
    assert_same_bits(weights(resumed), weights(expected))
    logs = [
        {key: value for key, value in entry.items() if "loss" in key or key == "noise_ratio"}
        for trainer in (expected, resumed)
        for entry in trainer.state.log_history
        if entry["step"] > 5 and "loss" in entry
    ]
    assert logs[: len(logs) // 2] == logs[len(logs) // 2 :]


def test_muon_takes_the_layers_matrices_and_follows_the_schedule(tmp_path):
    model = tiny_model("llama")
    trainer = trained(model, settings(tmp_path, max_steps=2, optimizer="muon", learning_rate=0.01))
    optimizer = trainer.optimizer.optimizer
    muon = {id(p) for p in optimizer.parts[0].param_groups[0]["params"]}
    assert muon == {id(p) for n, p in model.named_parameters() if p.ndim == 2 and "layers" in n}
    assert [part.param_groups[0]["lr"] for part in optimizer.parts] == pytest.approx([0.01, 0.003])


def test_parts_of_the_loss_are_logged_and_add_up(tmp_path):
    trainer = trained(tiny_model("llama"), settings(tmp_path, max_steps=4, logging_steps=2, ar_weight=0.5))
    entries = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert len(entries) == 2
    for entry in entries:
        assert entry["loss"] == pytest.approx(entry["consistency_loss"] + 0.5 * entry["ar_loss"], rel=1e-5)
        assert 0 < entry["noise_ratio"] < 1
    assert 0 < entries[0]["train_tokens"] < entries[1]["train_tokens"] == trainer.meter.tokens


def test_logged_losses_are_those_of_the_rows(tmp_path):
    args = settings(tmp_path, max_steps=1, per_device_train_batch_size=6)
    trainer = JacobiForcingTrainer(tiny_model("llama"), args, TRAJECTORIES)
    rows = trainer.train_dataset
    with torch.no_grad():
        losses = trainer.losses(Collator()([rows[index] for index in range(len(rows))]))
    trainer.train()
    assert trainer.state.log_history[0]["consistency_loss"] == pytest.approx(losses.consistency.item(), rel=1e-5)
    assert trainer.state.log_history[0]["ar_loss"] == pytest.approx(losses.ar.item(), rel=1e-5)


def test_evaluation_gives_the_loss_of_its_own_rows(tmp_path):
    args = settings(tmp_path, max_steps=1, per_device_eval_batch_size=8)
    trainer = JacobiForcingTrainer(tiny_model("llama"), args, TRAJECTORIES, eval_trajectories=TRAJECTORIES[:2])
    rows = trainer.eval_dataset
    with torch.no_grad():
        expected = trainer.losses(Collator()([rows[index] for index in range(len(rows))])).total.item()
    assert trainer.evaluate()["eval_loss"] == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("pad", [60, None])
def test_the_end_token_is_learnt_whatever_the_pad_token_is(tmp_path, pad):
    model = tiny_model("llama", eos_token_id=60, pad_token_id=pad)
    trajectories = [random_trajectory(sample, 4, 6, 4) for sample in range(2)]
    args = settings(tmp_path, max_steps=60, learning_rate=5e-3, max_length=17, logging_steps=60)
    trained(model, args, trajectories)
    model.eval()
    for trajectory in trajectories:
        ids = torch.tensor([trajectory.prompt_ids])
        out = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=12)
        assert out[0, ids.shape[1] :].tolist() == trajectory.response_ids


@pytest.mark.parametrize("arch", ["llama", "gpt2"])
def test_tied_embeddings_survive_saving_and_load_without_this_package(tmp_path, arch):
    model = tiny_model(arch, tie_word_embeddings=True)
    trainer = trained(model, settings(tmp_path))
    trainer.save_model(str(tmp_path / "saved"))
    ids = torch.arange(12)[None]
    with torch.no_grad():
        expected = model.eval()(input_ids=ids).logits
    assert "jacobi" not in (tmp_path / "saved" / "config.json").read_text()
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    assert loaded.get_output_embeddings().weight is loaded.get_input_embeddings().weight
    with torch.no_grad():
        assert torch.equal(loaded(input_ids=ids).logits, expected)


def test_eager_attention_gives_the_same_loss_as_sdpa(tmp_path):
    losses = []
    for kernel in ("sdpa", "eager"):
        model = tiny_model("llama", attn_implementation=kernel)
        assert model.config._attn_implementation == kernel
        losses.append(trained(model, settings(tmp_path)).state.log_history[1]["loss"])
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


def test_activation_checkpointing_changes_no_weight(tmp_path):
    plain = trained(tiny_model("llama"), settings(tmp_path))
    checkpointed = trained(tiny_model("llama"), settings(tmp_path, activation_checkpointing=True))
    for name, value in weights(plain).items():
        torch.testing.assert_close(weights(checkpointed)[name], value, rtol=1e-5, atol=1e-6)


def test_mixed_precision_reaches_the_model_and_its_head(tmp_path):
    kinds = set()
    model = tiny_model("llama")
    for module in (model.model.layers[0].mlp, model.lm_head):
        module.register_forward_hook(lambda module, inputs, output: kinds.add(output.dtype))
    trainer = JacobiForcingTrainer(model, settings(tmp_path, bf16=True), TRAJECTORIES)
    kinds.clear()
    trainer.train()
    assert kinds == {torch.bfloat16}
    assert model.dtype == torch.float32


def test_special_tokens_of_the_model_stay_and_the_tokenizer_is_saved(tmp_path):
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({"a": 0, "<end>": 1, "<pad>": 2}, unk_token="a"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<end>", pad_token="<pad>")
    model = tiny_model("llama", eos_token_id=60)
    trainer = trained(model, settings(tmp_path), processing_class=tokenizer)
    assert (model.config.eos_token_id, model.generation_config.eos_token_id) == (60, 60)
    trainer.save_model(str(tmp_path / "saved"))
    assert (tmp_path / "saved" / "tokenizer.json").exists()


def test_ids_and_positions_that_the_model_lacks_are_refused_before_training(tmp_path):
    with pytest.raises(DataError, match=r"token id that the model has not; seen: 60; expected: below 50"):
        JacobiForcingTrainer(tiny_model("llama", vocab_size=50), settings(tmp_path), TRAJECTORIES)
    with pytest.raises(DataError, match=r"position that the model has not; seen: 26; expected: below 20"):
        JacobiForcingTrainer(tiny_model("llama", max_position_embeddings=20), settings(tmp_path), TRAJECTORIES)


def test_block_size_of_trajectories_and_settings_must_agree(tmp_path):
    with pytest.raises(ConfigError, match=r"another block size.*seen: 4; expected: 8"):
        JacobiForcingTrainer(tiny_model("llama"), settings(tmp_path, block_size=8), TRAJECTORIES)


def test_several_devices_are_refused(tmp_path):
    args = settings(tmp_path)
    args._n_gpu = 2
    with pytest.raises(ConfigError, match=r"one device; seen: 2 GPUs.*CUDA_VISIBLE_DEVICES"):
        JacobiForcingTrainer(tiny_model("llama"), args, TRAJECTORIES)


def test_rows_packed_already_are_taken_as_they_are(tmp_path):
    rows = PackedRows(TRAJECTORIES, max_length=120, window_size=2, schedule_phase="random", seed=3)
    assert JacobiForcingTrainer(tiny_model("llama"), settings(tmp_path), rows).train_dataset is rows


def test_checkpoint_that_was_not_written_to_its_end_is_passed_over(tmp_path):
    assert last_checkpoint(tmp_path) is None
    for step, state in ((5, json.dumps({"global_step": 5})), (10, json.dumps({"global_step": 10})), (15, '{"glob')):
        (tmp_path / f"checkpoint-{step}").mkdir()
        (tmp_path / f"checkpoint-{step}" / "trainer_state.json").write_text(state)
    (tmp_path / "checkpoint-20").mkdir()
    assert last_checkpoint(tmp_path) == tmp_path / "checkpoint-10"


def test_training_without_its_extra_says_how_to_install_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "accelerate", None)
    monkeypatch.delitem(sys.modules, "jacobi_forcing.training")
    with pytest.raises(MissingExtraError, match=r"'accelerate'.*pip install 'jacobi-forcing\[train\]'"):
        importlib.import_module("jacobi_forcing.training")
