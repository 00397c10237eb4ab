"""The library's trainer with the loss of Jacobi Forcing."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, Trainer

from jacobi_forcing.backbone import Backbone
from jacobi_forcing.errors import ConfigError
from jacobi_forcing.flexmask import bucket_lengths, row_mask
from jacobi_forcing.losses import Losses, LossItems, position_losses, reduce_losses
from jacobi_forcing.packing import PackedRows
from jacobi_forcing.peft_models import plain
from jacobi_forcing.tags import Tags
from jacobi_forcing.training.attention import takes_flex
from jacobi_forcing.training.budget import Meter, endless, paced_scheduler, sizes, steps_for
from jacobi_forcing.training.collator import Collator
from jacobi_forcing.training.common import EpochSetter, refuse_foreign_rows
from jacobi_forcing.training.config import JacobiForcingConfig
from jacobi_forcing.training.muon import MuonWithAdamW
from jacobi_forcing.training.on_policy import make_states
from jacobi_forcing.training.sharing import EvenRows, check_processes, share_out, summed, within_forward
from jacobi_forcing.trajectories.store import Trajectory

if TYPE_CHECKING:
    from peft import PeftModel


class JacobiForcingTrainer(Trainer):
    """Trains a causal LM on trajectories by Eq. 9: consistency loss plus weighted AR loss.

    Beside `loss` it logs `consistency_loss`, `ar_loss` (loss = consistency_loss + ar_weight * ar_loss) and
    `noise_ratio`, the mean over the blocks trained on; each is a mean over the steps since the last log. With states on
    policy also, per step and summed over processes, `state_forwards`, `state_seconds`, `block_sweeps`,
    `swept_blocks` and `drifted_blocks`, see `StateCounts`. `meter` counts tokens and core-seconds.

    The losses are averaged over all blocks and target tokens of an accumulated batch, so four batches of one row and
    one batch of four rows give the same gradients, and so do two processes with two rows each. A run resumed from a
    checkpoint ends with the weights of an undisturbed one.

    Args:
        model: The model to train, in float32; or peft's model of it, whose base may be in less. Each process has one.
        args: Settings.
        trajectories: Trajectories, which are packed as `args` says, or rows packed already.
        eval_trajectories: The same for `evaluate`.
        processing_class: The tokenizer, saved with each checkpoint. The model's special tokens are left as they are:
            what ends a text must not change between collecting and decoding.
        vocabulary: With states on policy, the ids that first states are drawn from; None: each one's own context.
        kwargs: Passed to `transformers.Trainer`: `callbacks`, `optimizers`, ...

    Raises:
        ConfigError: Several devices in one process, or block sizes that differ.
        DataError: The trajectories do not fit the model: ids or positions that it does not have.
        ModelError: The model is not a decoder-only LM that this package can run.
    """

    # Ours is divided by the counts of the whole accumulated batch; the library must not divide it again.
    loss_is_scaled_for_ga = True

    def __init__(
        self,
        model: PreTrainedModel | PeftModel,
        args: JacobiForcingConfig,
        trajectories: PackedRows | Iterable[Trajectory],
        *,
        eval_trajectories: PackedRows | Iterable[Trajectory] | None = None,
        processing_class: Any = None,
        vocabulary: Sequence[int] | None = None,
        **kwargs: Any,
    ) -> None:
        check_processes(args)
        self.backbone = Backbone(plain(model))
        self.settings = args
        rows = self._packed(trajectories, args, vocabulary)
        eval_rows = None if eval_trajectories is None else self._packed(eval_trajectories, args, vocabulary)
        self.flex = takes_flex(args.attention, args.device, self.backbone)
        longest = max(rows.max_length, 0 if eval_rows is None else eval_rows.max_length)
        self._collate = Collator(
            processing_class,
            args.loss_positions,  # type: ignore[arg-type]  # checked in __post_init__
            args.loss_reduction,  # type: ignore[arg-type]  # checked in __post_init__
            args.states,  # type: ignore[arg-type]  # checked in __post_init__
            bucket_lengths(longest) if self.flex else (),
            args.per_device_train_batch_size if self.flex else 0,
        )
        if args.train_tokens is not None:
            batch = args.train_batch_size * args.world_size
            args.max_steps = steps_for(args.train_tokens, rows.lengths, batch, args.gradient_accumulation_steps)
        elif args.core_seconds is not None:
            args.max_steps = endless(args.world_size)
        super().__init__(
            model=model,
            args=args,
            data_collator=self._collate,
            train_dataset=share_out(rows, args),
            eval_dataset=eval_rows,
            **kwargs,
        )
        self.add_callback(EpochSetter(self.train_dataset))
        self.meter = Meter(args.core_seconds)
        self.add_callback(self.meter)
        self.backbone.verify_head()
        self._sums: dict[str, Tensor] = {}
        self._steps = 0

    def _packed(
        self,
        trajectories: PackedRows | Iterable[Trajectory],
        args: JacobiForcingConfig,
        vocabulary: Sequence[int] | None,
    ) -> PackedRows:
        rows = trajectories
        if not isinstance(rows, PackedRows):
            rows = PackedRows(
                rows,
                max_length=args.max_length,
                window_size=args.window_size,
                schedule=args.schedule,
                t_min=args.t_min,
                t_max=args.t_max,
                schedule_phase=args.schedule_phase,  # type: ignore[arg-type]  # checked in __post_init__
                seed=args.seed,
                misfits=args.misfits,  # type: ignore[arg-type]  # checked in __post_init__
                states=args.states,  # type: ignore[arg-type]  # checked in __post_init__
                vocabulary=vocabulary,
            )
        if rows.block_size != args.block_size:
            raise ConfigError(
                "The trajectories have another block size than the settings",
                seen=rows.block_size,
                expected=args.block_size,
                remedy="collect again, or set block_size to theirs",
            )
        if rows.states != args.states:
            raise ConfigError("The rows' states are not those of the settings", seen=rows.states, expected=args.states)
        remedies = ("collect with this model's tokenizer", "collect shorter responses")
        refuse_foreign_rows(rows, self.backbone, "trajectories", *remedies)
        return rows

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """The optimiser that the settings name. Called by the library."""
        if self.optimizer is None and self.settings.optimizer == "muon":
            args = self.settings
            betas = (args.adam_beta1, args.adam_beta2)
            self.optimizer = MuonWithAdamW(self.backbone.model, args.learning_rate, betas, args.weight_decay)
        return self.optimizer if self.optimizer is not None else super().create_optimizer(model)

    def create_scheduler(self, num_training_steps: int, optimizer: torch.optim.Optimizer | None = None) -> Any:
        """The learning-rate schedule, over steps or over core-seconds. Called by the library."""
        if self.lr_scheduler is None and self.meter.budget is not None:
            optimizer = optimizer or self.optimizer
            assert optimizer is not None
            self.lr_scheduler = paced_scheduler(optimizer, self.settings, lambda: self.meter.share)
        return super().create_scheduler(num_training_steps, optimizer)

    def losses(self, inputs: dict[str, Tensor], blocks: int | None = None, targets: int | None = None) -> Losses:
        """The losses of one batch.

        Args:
            inputs: From `Collator`, on the model's device.
            blocks: Blocks to average over; the batch's own by default.
            targets: Target tokens to average over; the batch's own by default.
        """
        args = self.settings
        tags = Tags.of(inputs["tags"])
        items = LossItems(**{name: inputs[name] for name in LossItems._fields})
        # The accelerator hangs mixed precision on the model's forward, which the hidden states do not come from.
        with self.accelerator.autocast():
            mask = row_mask(self.backbone, tags, args.mask, flex=self.flex)
            hidden = self.backbone.hidden(inputs["input_ids"], tags.position, mask)
            divergence, entropy = position_losses(
                self.backbone, hidden, items, args.logits_chunk_size, args.temperature
            )
        return reduce_losses(
            divergence,
            entropy,
            blocks=items.blocks if blocks is None else blocks,
            targets=items.targets if targets is None else targets,
            ar_weight=args.ar_weight,
        )

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Tensor],
        return_outputs: bool = False,
        num_items_in_batch: Any = None,
    ) -> Any:
        """The loss of one batch, as its share of the accumulated batch. Called by the library."""
        blocks, targets = (None, None) if num_items_in_batch is None else num_items_in_batch.tolist()
        losses = self._losses(model, inputs, blocks, targets)
        if num_items_in_batch is not None:
            self._add("consistency_loss", losses.consistency)
            self._add("ar_loss", losses.ar)
        # The shares of all processes add up to the loss, and the library takes the mean of their gradients.
        total = losses.total * self.accelerator.num_processes
        return (total, {"loss": total}) if return_outputs else total

    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        """Forward and backward of one batch. Called by the library."""
        # Layers that are computed again in the backward pass ask for their kernel again, so it stays till then.
        with self.backbone.flex() if self.flex else contextlib.nullcontext():
            return super().training_step(*args, **kwargs)

    def _losses(self, model: nn.Module, *args: Any) -> Losses:
        """`losses`, within the forward of what the library wrapped around the model."""
        if self.accelerator.num_processes == 1:
            return self.losses(*args)
        trained: Any = self.model  # annotated as if it could be missing
        return within_forward(model, trained, self.losses, *args)

    def _get_train_sampler(self, train_dataset: Any = None) -> Any:
        """The order of rows. Called by the library."""
        if isinstance(self.train_dataset, EvenRows):
            return self.train_dataset.sampler
        return super()._get_train_sampler(train_dataset)

    def get_batch_samples(
        self, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device
    ) -> tuple[list[Any], Tensor | None]:
        """The batches of one step, and over how many blocks and target tokens their losses are averaged [2]."""
        batches, _ = super().get_batch_samples(epoch_iterator, num_batches, device)
        if not batches:
            return batches, None
        batches = [self._with_states(batch, log=True) for batch in batches]
        self._steps += 1
        ratios = torch.cat([batch["noise_ratios"] for batch in batches]).double()
        counts = [sum(int(batch[name]) for batch in batches) for name in ("blocks", "targets")]
        own = torch.tensor([*counts, len(ratios), *sizes(batches)], dtype=torch.long)
        # Kept on the CPU, where they are read.
        blocks, targets, states, *taken = summed(own, self.accelerator).tolist()
        self.meter.count(*taken)
        self._add("noise_ratio", ratios.sum() / states)
        return batches, torch.tensor([blocks, targets])

    def _with_states(self, batch: dict[str, Tensor], *, log: bool) -> dict[str, Tensor]:
        """The batch with noisy blocks that the model has made, where the settings ask for it."""
        if self.settings.states == "stored":
            return batch
        with self.accelerator.autocast():
            made, counts = make_states(self.backbone, batch)
        if log:
            self._add("state_forwards", torch.tensor(float(counts.forwards)))
            self._add("state_seconds", torch.tensor(counts.seconds))
            self._add("block_sweeps", torch.tensor(float(counts.sweeps)))
            self._add("swept_blocks", torch.tensor(float(counts.blocks)))
            self._add("drifted_blocks", torch.tensor(float(counts.drifted)))
        return self._collate.with_items(made)

    def _add(self, name: str, value: Tensor) -> None:
        self._sums[name] = self._sums.get(name, torch.zeros((), device=value.device)) + value.detach()

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Log, with the parts of the loss beside the loss, and the training tokens so far."""
        if "loss" in logs and self._steps:
            for name, total in self._sums.items():
                logs[name] = summed(total, self.accelerator).item() / self._steps
            self._sums, self._steps = {}, 0
            logs.update(self.meter.pace.rates())
            logs["train_tokens"] = self.meter.tokens
        super().log(logs, start_time)

    def prediction_step(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """The loss of one batch in `evaluate`; there are no logits to return."""
        with torch.no_grad():
            batch = self._with_states(self._prepare_inputs(inputs), log=False)
            with self.backbone.flex() if self.flex else contextlib.nullcontext():
                return self._losses(model, batch).total.detach(), None, None


def last_checkpoint(folder: str | Path) -> Path | None:
    """The newest checkpoint in a folder that was written to its end, or None.

    A killed run can leave a checkpoint behind that lacks files. The library writes `trainer_state.json` last.
    """
    whole = []
    for path in Path(folder).glob("checkpoint-*"):
        try:
            step = json.loads((path / "trainer_state.json").read_text(encoding="utf-8"))["global_step"]
        except (OSError, ValueError, KeyError):
            continue
        whole.append((int(step), path))
    return max(whole)[1] if whole else None
