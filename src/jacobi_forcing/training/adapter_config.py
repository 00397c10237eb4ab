"""Settings of the training of a gated adapter: those of the library, and what drafting adds."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from transformers import SchedulerType, TrainingArguments

from jacobi_forcing.config import AdapterStates, Misfits, Optimizer
from jacobi_forcing.training.common import UNSUPPORTED, check_settings

_LEAST: dict[str, int] = {
    "rank": 1,
    "block_size": 2,
    "lines_per_response": 1,
    "max_sweeps": 0,
    "max_length": 2,
    "logits_chunk_size": 1,
    "right_weight": 0,
    "slot_decay": 0,
}
_CHOICES: dict[str, Any] = {"states": AdapterStates, "optimizer": Optimizer, "misfits": Misfits}
_UNSUPPORTED: dict[str, str] = {
    **UNSUPPORTED,
    "remove_unused_columns": "the loss needs every column of a row",
    "gradient_checkpointing": "the library then hides the clean KV from the lines",
    "activation_checkpointing": "the library then hides the clean KV from the lines",
    "fsdp": "the base is frozen and needs no optimiser; processes without fsdp each keep it whole",
    "deepspeed": "the base is frozen and needs no optimiser; processes without deepspeed each keep it whole",
    "load_best_model_at_end": "the library would look for whole models in the checkpoints",
}


@dataclass
class AdapterConfig(TrainingArguments):
    """`transformers.TrainingArguments` plus the settings of a gated adapter.

    Defaults that differ from the parent's: `learning_rate` 3e-3, `per_device_train_batch_size` 1, `adam_beta2` 0.95,
    `lr_scheduler_type` linear, `warmup_steps` 0.03 (a share of all steps), `num_train_epochs` 1,
    `remove_unused_columns` False. Rank, rate, `states` and `right_weight` come from single short runs on the embedded
    base, not from a search; the others were not compared.

    Attributes:
        rank: r of the adapter.
        alpha: Its product is scaled by alpha / r; 2 r where None.
        targets: Names of the layers it is put on; every linear layer but the head where None.
        block_size: n, slots of a line: the last known token and n - 1 guesses.
        lines_per_response: K, lines that share one clean forward.
        max_sweeps: S, age of the oldest states, sweeps.
        states: "drawn": each line is trained at one state, 0 to S sweeps old. "every": at all of them, the sweeps
            being the forwards that are trained; S + 1 times the memory. "stored": at one of those that the base went
            through, out of trajectories with this block size; S is not read.
        right_weight: Weight of slots all of whose guesses so far are right. Decoding uses no prediction made there,
            the base has made it by then.
        slot_decay: Each further slot weighs this much less, since a guess counts only if all before it are right.
        optimizer: "adamw": whatever the parent's `optim` names. "muon": Muon.
        max_length: Longest text, tokens, prompt included; longer ones are cut.
        logits_chunk_size: Slots whose logits exist at the same time.
        misfits: What to do about a text with nothing to learn from: "error" or "skip".

    Raises:
        ConfigError: A setting is out of range, or one of the parent's is not supported.
    """

    learning_rate: float = field(default=3e-3, metadata={"help": "Peak learning rate."})
    per_device_train_batch_size: int = field(default=1, metadata={"help": "Responses per batch and device."})
    num_train_epochs: float = field(default=1.0, metadata={"help": "Epochs, unless max_steps is set."})
    adam_beta2: float = field(default=0.95, metadata={"help": "Decay of AdamW's second moments."})
    lr_scheduler_type: SchedulerType | str = field(
        default="linear", metadata={"help": "Learning-rate schedule of the library."}
    )
    warmup_steps: float = field(default=0.03, metadata={"help": "Steps of warm-up; below 1, a share of all steps."})
    remove_unused_columns: bool = field(default=False, metadata={"help": "Must stay off."})

    rank: int = field(default=32, metadata={"help": "r of the adapter."})
    alpha: float | None = field(default=None, metadata={"help": "Scale of the adapter times r; 2 r by default."})
    targets: list[str] | None = field(default=None, metadata={"help": "Layers it is put on; all linear by default."})
    block_size: int = field(default=16, metadata={"help": "n, slots of a line."})
    lines_per_response: int = field(default=8, metadata={"help": "K, lines that share one clean forward."})
    max_sweeps: int = field(default=4, metadata={"help": "S, age of the oldest states, sweeps."})
    states: str = field(
        default="every", metadata={"help": "A line is learnt at every state, one (drawn), or a stored one."}
    )
    right_weight: float = field(default=0.0, metadata={"help": "Weight of slots whose guesses so far are right."})
    slot_decay: float = field(default=1.0, metadata={"help": "Weight of a slot over that of the one before."})
    optimizer: str = field(default="adamw", metadata={"help": "adamw (what the parent's `optim` names) or muon."})
    max_length: int = field(default=2048, metadata={"help": "Longest text, tokens."})
    logits_chunk_size: int = field(default=512, metadata={"help": "Slots whose logits exist at a time."})
    misfits: str = field(default="error", metadata={"help": "A text with nothing to learn from: error or skip."})

    def __post_init__(self) -> None:
        """Check what this package adds, then let the library do its own."""
        check_settings(self, _LEAST, _CHOICES, _UNSUPPORTED)
        super().__post_init__()
