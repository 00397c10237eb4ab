"""Settings of a training run: those of the library, and what Jacobi Forcing adds."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Self

from transformers import SchedulerType, TrainingArguments

from jacobi_forcing.config import (
    Attention,
    LossPositions,
    LossReduction,
    Mask,
    Misfits,
    Optimizer,
    RoundConfig,
    Schedule,
    SchedulePhase,
    States,
)
from jacobi_forcing.errors import ConfigError
from jacobi_forcing.training.budget import check_lengths
from jacobi_forcing.training.common import UNSUPPORTED, check_settings
from jacobi_forcing.training.sharing import check_sharding

_LEAST: dict[str, int] = {"block_size": 1, "window_size": 1, "max_length": 1, "logits_chunk_size": 1, "ar_weight": 0}
_CHOICES: dict[str, Any] = {
    "schedule": Schedule,
    "schedule_phase": SchedulePhase,
    "states": States,
    "mask": Mask,
    "loss_positions": LossPositions,
    "loss_reduction": LossReduction,
    "optimizer": Optimizer,
    "misfits": Misfits,
    "attention": Attention,
}
_UNSUPPORTED: dict[str, str] = {
    **UNSUPPORTED,
    "remove_unused_columns": "the loss needs every column of a packed row",
}


@dataclass
class JacobiForcingConfig(TrainingArguments):
    """`transformers.TrainingArguments` plus the settings of Jacobi Forcing.

    Defaults that differ from the parent's, all as in the paper's section 4.1 or its released code:
    `learning_rate` 1e-6, `per_device_train_batch_size` 4, `adam_beta2` 0.95, `lr_scheduler_type` cosine, `warmup_steps`
    0.03 (a share of all steps), `num_train_epochs` 1, `remove_unused_columns` False. Weight decay 0 is the parent's.

    For mixed precision load the model in float32 and set `bf16=True`: at a learning rate of 1e-6, bfloat16 weights
    round most updates away.

    The model trains in train mode. Where its config has dropout, teacher and student are disturbed too; set the
    dropout to 0 for the paper's loss (Llama and Qwen models have none).

    Attributes:
        block_size: n, tokens per block; must be that of the trajectories.
        window_size: w of Eq. 7, blocks per noise cycle.
        schedule: Noise ratio over blocks: "progressive" (Eq. 7), "reverse" or "random" (Table 4).
        t_min: Noise ratio at the clean end of the schedule.
        t_max: Noise ratio that its noisy end comes up to.
        schedule_phase: "fixed" starts each response at ratio 0 (the paper); "random" anywhere, anew in every epoch.
        states: "stored": states of the trajectories, as in the paper; "on_policy": the model that trains makes them
            (`on_policy.py`).
        mask: "noise_conditioned" (Fig. 2b), "noise_conditioned_window", "intra_window_clean" (NC-IC, Table 5) or
            "clean_context" (CLLM).
        loss_positions: Slots of a block in the consistency loss: "all", or "from_mismatch": from its first wrong token
            on, as in the authors' release.
        loss_reduction: That loss is a mean per "block" (Eq. 8) or per "token".
        temperature: T at which teacher and student are compared; 1 in the paper.
        optimizer: "adamw": whatever the parent's `optim` names. "muon": Muon for the layers' matrices, see `muon.py`.
        ar_weight: w of Eq. 9.
        max_length: Longest packed row, tokens, noisy and clean ones counted.
        logits_chunk_size: Loss positions whose logits exist at the same time.
        attention: "flex": FlexAttention with a `BlockMask`, rows padded to one of three lengths; "sdpa": an additive
            mask; "auto": flex on a CUDA device for a model that can run it, sdpa elsewhere.
        misfits: What to do about a sample that does not fit in a row: "error" or "skip".
        train_tokens: Replaces `max_steps` by as many steps as take this many tokens, see `budget.steps_for`.
        core_seconds: Replaces `max_steps` by this much time of the process, over which the learning rate is paced too.
            Such a run does not end with the same weights twice.

    Raises:
        ConfigError: A setting is out of range, or one of the parent's is not supported.
    """

    learning_rate: float = field(default=1e-6, metadata={"help": "Peak learning rate."})
    per_device_train_batch_size: int = field(default=4, metadata={"help": "Packed rows per batch and device."})
    num_train_epochs: float = field(default=1.0, metadata={"help": "Epochs, unless max_steps is set."})
    adam_beta2: float = field(default=0.95, metadata={"help": "Decay of AdamW's second moments."})
    lr_scheduler_type: SchedulerType | str = field(
        default="cosine", metadata={"help": "Learning-rate schedule of the library."}
    )
    warmup_steps: float = field(default=0.03, metadata={"help": "Steps of warm-up; below 1, a share of all steps."})
    remove_unused_columns: bool = field(default=False, metadata={"help": "Must stay off."})

    block_size: int = field(default=16, metadata={"help": "n, tokens per block."})
    window_size: int = field(default=16, metadata={"help": "w of Eq. 7, blocks per noise cycle."})
    schedule: str = field(default="progressive", metadata={"help": "Noise ratio over blocks."})
    schedule_phase: str = field(default="fixed", metadata={"help": "Where a response starts the cycle: fixed, random."})
    t_min: float = field(default=0.0, metadata={"help": "Noise ratio at the schedule's clean end."})
    t_max: float = field(default=1.0, metadata={"help": "Noise ratio that its noisy end comes up to."})
    states: str = field(default="stored", metadata={"help": "Noisy blocks: stored or on_policy."})
    mask: str = field(default="noise_conditioned", metadata={"help": "Who sees whom, see `mask.KINDS`."})
    loss_positions: str = field(default="all", metadata={"help": "Slots of a block: all or from_mismatch."})
    loss_reduction: str = field(default="block", metadata={"help": "Consistency loss per block or per token."})
    temperature: float = field(default=1.0, metadata={"help": "T of the consistency loss."})
    optimizer: str = field(default="adamw", metadata={"help": "adamw (what the parent's `optim` names) or muon."})
    ar_weight: float = field(default=1.0, metadata={"help": "w of Eq. 9, weight of the AR loss."})
    max_length: int = field(default=2048, metadata={"help": "Longest packed row, tokens."})
    logits_chunk_size: int = field(default=512, metadata={"help": "Loss positions whose logits exist at a time."})
    attention: str = field(default="auto", metadata={"help": "Kernel and form of the mask: auto, flex, sdpa."})
    misfits: str = field(default="error", metadata={"help": "A sample that does not fit in a row: error or skip."})
    train_tokens: int | None = field(default=None, metadata={"help": "Training tokens instead of max_steps."})
    core_seconds: float | None = field(default=None, metadata={"help": "Core-seconds instead of max_steps."})

    def __post_init__(self) -> None:
        """Check what this package adds, then let the library do its own."""
        check_settings(self, _LEAST, _CHOICES, _UNSUPPORTED)
        check_sharding(self)
        if self.temperature <= 0:
            raise ConfigError("'temperature' is too small", seen=self.temperature, expected="more than 0")
        check_lengths(self.max_steps, self.train_tokens, self.core_seconds)
        super().__post_init__()

    @classmethod
    def from_round(cls, settings: RoundConfig, output_dir: str, *, seed: int = 0, **overrides: Any) -> Self:
        """The training part of one round of a recipe.

        Args:
            settings: The round.
            output_dir: Where checkpoints go.
            seed: Seed of the order of rows, dropout and random phases.
            overrides: Any other field of this class, such as `use_cpu=True`.

        Raises:
            ConfigError: A setting of the round is out of range.
        """
        if settings.warmup_ratio >= 1:
            raise ConfigError("'warmup_ratio' is too large", seen=settings.warmup_ratio, expected="a share below 1")
        values: dict[str, Any] = {
            "output_dir": output_dir,
            "seed": seed,
            "block_size": settings.block_size,
            "window_size": settings.window_size,
            "max_steps": -1 if settings.steps is None else settings.steps,
            "train_tokens": settings.train_tokens,
            "core_seconds": settings.core_seconds,
            "learning_rate": settings.learning_rate,
            "per_device_train_batch_size": settings.batch_size,
            "gradient_accumulation_steps": settings.gradient_accumulation_steps,
            "max_length": settings.max_length,
            "ar_weight": settings.ar_weight,
            "schedule": settings.schedule,
            "schedule_phase": settings.schedule_phase,
            "states": settings.states,
            "mask": settings.mask,
            "t_min": settings.t_min,
            "t_max": settings.t_max,
            "loss_positions": settings.loss_positions,
            "loss_reduction": settings.loss_reduction,
            "temperature": settings.temperature,
            "optimizer": settings.optimizer,
            "lr_scheduler_type": settings.lr_scheduler,
            "warmup_steps": settings.warmup_ratio,
            "save_steps": settings.save_steps,
            "misfits": settings.misfits,
            "attention": settings.attention,
            **sharding(settings),
            "activation_checkpointing": settings.gradient_checkpointing,
        }
        return cls(**{**values, **overrides})


def sharding(settings: RoundConfig) -> dict[str, Any]:
    """The options of the library that share weights out, where a round sets them."""
    names = ("fsdp", "fsdp_config", "deepspeed")
    return {name: getattr(settings, name) for name in names if getattr(settings, name)}
