from __future__ import annotations

import pytest

from jacobi_forcing.config import RoundConfig
from jacobi_forcing.errors import ConfigError
from jacobi_forcing.training import JacobiForcingConfig


@pytest.mark.parametrize(
    "wrong",
    [
        {"block_size": 0},
        {"ar_weight": -1.0},
        {"logits_chunk_size": 0},
        {"schedule": "linear"},
        {"schedule_phase": "late"},
        {"mask": "causal"},
        {"misfits": "drop"},
        {"remove_unused_columns": True},
        {"label_smoothing_factor": 0.1},
        {"torch_compile": True},
    ],
)
def test_settings_out_of_range_or_without_effect_are_refused(tmp_path, wrong):
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        JacobiForcingConfig(output_dir=str(tmp_path), use_cpu=True, **wrong)


def test_settings_of_a_round_all_reach_the_trainer(tmp_path):
    settings_of_round = RoundConfig(
        block_size=8,
        window_size=5,
        steps=70,
        learning_rate=3e-4,
        batch_size=3,
        gradient_accumulation_steps=2,
        max_length=512,
        ar_weight=10.0,
        schedule_phase="random",
        mask="clean_context",
        t_min=0.1,
        t_max=0.9,
        loss_positions="from_mismatch",
        loss_reduction="token",
        temperature=2.0,
        lr_scheduler="constant",
        warmup_ratio=0.25,
        save_steps=35,
        misfits="skip",
        gradient_checkpointing=True,
    )
    args = JacobiForcingConfig.from_round(settings_of_round, str(tmp_path), seed=3, use_cpu=True)
    assert (args.block_size, args.window_size, args.max_steps, args.learning_rate) == (8, 5, 70, 3e-4)
    assert (args.per_device_train_batch_size, args.gradient_accumulation_steps, args.max_length) == (3, 2, 512)
    assert (args.ar_weight, args.schedule_phase, args.mask, args.schedule) == (
        10.0,
        "random",
        "clean_context",
        "progressive",
    )
    assert (args.t_min, args.t_max, args.temperature) == (0.1, 0.9, 2.0)
    assert (args.loss_positions, args.loss_reduction) == ("from_mismatch", "token")
    assert (args.misfits, args.activation_checkpointing) == ("skip", True)
    assert (args.lr_scheduler_type, args.get_warmup_steps(100), args.save_steps, args.seed) == ("constant", 25, 35, 3)


def test_defaults_are_the_papers(tmp_path):
    args = JacobiForcingConfig(output_dir=str(tmp_path), use_cpu=True)
    assert (args.adam_beta1, args.adam_beta2, args.weight_decay) == (0.9, 0.95, 0.0)
    assert (args.learning_rate, args.lr_scheduler_type, args.get_warmup_steps(1000)) == (1e-6, "cosine", 30)
    assert (args.per_device_train_batch_size, args.max_length, args.block_size, args.window_size) == (4, 2048, 16, 16)
