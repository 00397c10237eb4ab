"""Training a gated adapter with the library's own trainer: the base is frozen, and is its own teacher."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, Trainer

from jacobi_forcing.adapter import GatedAdapter
from jacobi_forcing.backbone import Backbone
from jacobi_forcing.errors import ConfigError
from jacobi_forcing.training.adapter_config import AdapterConfig
from jacobi_forcing.training.adapter_lines import CleanPass, State, Texts, greedy, slot_losses
from jacobi_forcing.training.adapter_rows import Answered, LineCollator, LineRows
from jacobi_forcing.training.budget import Meter
from jacobi_forcing.training.common import EpochSetter, refuse_foreign_rows
from jacobi_forcing.training.sharing import EvenRows, check_processes, share_out, summed, within_forward


class LineLosses(NamedTuple):
    """The losses of one batch.

    Attributes:
        total: KL summed over the slots of a line, weighted, and averaged over lines and their trained states [].
        gained: Tokens that the oldest states commit in their next sweep, summed [].
        sweeps: How many states those are [].
        slots: Slots of the trained states of the lines that hold a text [].
        taught: Those of them that count in the loss [].
    """

    total: Tensor
    gained: Tensor
    sweeps: Tensor
    slots: Tensor
    taught: Tensor


class AdapterTrainer(Trainer):
    """Trains a gated adapter to draft what its base would write.

    The loss is Eq. 8 with the base as the teacher: KL(base at the clean token || adapter at the slot of the same
    position). There is no AR loss, since the base does not change. Beside `loss` it logs `tokens_per_forward`: tokens
    that a sweep would commit at the oldest states, an estimate of what decoding would reach with the weights in hand;
    `tokens_per_second`, texts and slots that are trained on, by wall time; and `trained_share`, of those slots the ones
    that count in the loss. `meter` counts core-seconds and training tokens: slots of lines, at each state that they are
    trained at.

    Losses are averaged over all lines of an accumulated batch, those that have met the end of their text included, so
    four batches of one text and one batch of four give the same gradients, and so do two processes with two texts each.
    A checkpoint holds the adapter as a plain peft one; a run resumed from it ends with the weights of an undisturbed
    one. Dropout is off: the base is to be what it is in decoding.

    Args:
        model: The base, in float32; each process has its own. An adapter that it has already is trained further.
        args: Settings.
        responses: What the base wrote, such as trajectories, or rows made already.
        eval_responses: The same for `evaluate`.
        processing_class: The tokenizer, saved with each checkpoint.
        kwargs: Passed to `transformers.Trainer`: `callbacks`, `optimizers`, ...

    Raises:
        ConfigError: Several devices in one process, or an adapter of another rank than the settings name.
        DataError: The texts do not fit the model: ids or positions that it does not have.
        ModelError: The model is not a decoder-only LM that this package can run.
    """

    # Ours is divided by the counts of the whole accumulated batch; the library must not divide it again.
    loss_is_scaled_for_ga = True

    def __init__(
        self,
        model: PreTrainedModel,
        args: AdapterConfig,
        responses: LineRows | Iterable[Answered],
        *,
        eval_responses: LineRows | Iterable[Answered] | None = None,
        processing_class: Any = None,
        **kwargs: Any,
    ) -> None:
        check_processes(args)
        self.settings = args
        self.backbone = Backbone(model)
        rows = self._rows(responses)
        eval_rows = None if eval_responses is None else self._rows(eval_responses)
        self.adapter = GatedAdapter.of(model) or GatedAdapter.attach(
            model, args.rank, args.alpha, args.targets, args.seed
        )
        self._check_rank()
        super().__init__(
            model=model,
            args=args,
            data_collator=LineCollator(processing_class),
            train_dataset=share_out(rows, args),
            eval_dataset=eval_rows,
            **kwargs,
        )
        self.add_callback(EpochSetter(self.train_dataset))
        self.backbone.verify_head()
        self._sums: dict[str, Tensor] = {}
        self.meter = Meter()
        self.add_callback(self.meter)

    def _rows(self, responses: LineRows | Iterable[Answered]) -> LineRows:
        args, rows = self.settings, responses
        if not isinstance(rows, LineRows):
            rows = LineRows(
                rows,
                block_size=args.block_size,
                lines=args.lines_per_response,
                max_sweeps=args.max_sweeps,
                max_length=args.max_length,
                seed=args.seed,
                stored=args.states == "stored",
                misfits=args.misfits,  # type: ignore[arg-type]  # checked in __post_init__
            )
        remedies = ("generate with this model's tokenizer", "lower max_length")
        refuse_foreign_rows(rows, self.backbone, "texts", *remedies)
        return rows

    def _check_rank(self) -> None:
        if self.adapter.rank != self.settings.rank:
            raise ConfigError(
                "The adapter has another rank than the settings name",
                seen=self.adapter.rank,
                expected=self.settings.rank,
                remedy="set rank to the adapter's",
            )

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """The optimiser that the settings name. Called by the library."""
        args = self.settings
        if self.optimizer is None and args.optimizer == "muon":
            self.optimizer = torch.optim.Muon(
                self.adapter.parameters(), args.learning_rate, args.weight_decay, adjust_lr_fn="match_rms_adamw"
            )
        return self.optimizer if self.optimizer is not None else super().create_optimizer(model)

    def losses(self, inputs: dict[str, Tensor], lines: int | None = None) -> LineLosses:
        """The losses of one batch.

        Args:
            inputs: From `LineCollator`, on the model's device.
            lines: Lines to average over; the batch's own by default.
        """
        args = self.settings
        # The library has switched the model to train mode; with dropout neither teacher nor states would be right.
        self.backbone.model.eval()
        texts = Texts(inputs["input_ids"], inputs["last"], inputs["taught"])
        fill, sweeps = inputs["fill"], inputs["sweeps"]
        state = State(inputs["starts"], fill[:, :, 0].clone())
        state.ids[..., 0] = texts.at(state.start)
        share = 1 / (int(inputs["lines"]) if lines is None else lines)
        # The accelerator hangs mixed precision on the model's forward, which the hidden states do not come from.
        with self.accelerator.autocast():
            clean = CleanPass(self.backbone, texts)
            if args.states == "drawn":
                state = self._swept(clean, texts, state, sweeps, fill)
                oldest = sweeps == fill.shape[2] - 1
                total, _ = self._trained(clean, texts, state)
                return self._losses(total * share, texts, state, oldest, texts.counts(state).sum(), 1)
            total, taught = torch.zeros((), device=fill.device), torch.zeros((), dtype=torch.long, device=fill.device)
            ages = fill.shape[2]
            for age in range(ages):
                of_state, predictions = self._trained(clean, texts, state)
                total, taught = total + of_state, taught + texts.counts(state).sum()
                if age + 1 < ages:
                    state = texts.advance(state, predictions, fill[:, :, age + 1])
        every = torch.ones_like(sweeps, dtype=torch.bool)
        return self._losses(total * (share / ages), texts, state, every, taught, ages)

    def _swept(self, clean: CleanPass, texts: Texts, state: State, sweeps: Tensor, fill: Tensor) -> State:
        """The lines after as many sweeps as were drawn for each; those with most come first in their row."""
        start, ids = state.start.clone(), state.ids.clone()
        for age in range(fill.shape[2] - 1):
            count = int((sweeps > age).any(dim=0).sum())
            if not count:
                break
            now = State(start, ids).first(count)
            with torch.no_grad():
                hidden = clean.lines(self.adapter, now)
            then = texts.advance(
                now, greedy(self.backbone, hidden, self.settings.logits_chunk_size), fill[:, :count, age + 1]
            )
            moves = sweeps[:, :count] > age
            start[:, :count] = torch.where(moves, then.start, now.start)
            ids[:, :count] = torch.where(moves[..., None], then.ids, now.ids)
        return State(start, ids)

    def _trained(self, clean: CleanPass, texts: Texts, state: State) -> tuple[Tensor, Tensor]:
        """Weighted KL of the lines, summed [], and the adapter's next token at each slot [R, K, n]."""
        args = self.settings
        hidden, teacher = clean.lines(self.adapter, state), clean.teacher(state)
        divergence, predictions = slot_losses(
            self.backbone, teacher.flatten(0, 2), hidden.flatten(0, 2), args.logits_chunk_size
        )
        behind = torch.arange(state.ids.shape[-1], device=hidden.device) - texts.right(state)[..., None]
        weight = torch.where(behind > 0, args.slot_decay ** (behind - 1).clamp(min=0), args.right_weight)
        # Not a product: where nothing counts, the slot may hold anything.
        kept = torch.where(texts.counts(state), divergence.view_as(weight) * weight, 0.0)
        return kept.sum(), predictions.view_as(state.ids)

    def _losses(
        self, total: Tensor, texts: Texts, state: State, oldest: Tensor, taught: Tensor, states: int
    ) -> LineLosses:
        gains = texts.gains(state)
        counted = oldest & (gains > 0)
        slots = (texts.last > 0).sum() * (state.ids[0].numel() * states)
        return LineLosses(total, (gains * counted).sum(), counted.sum(), slots, taught)

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Tensor],
        return_outputs: bool = False,
        num_items_in_batch: Any = None,
    ) -> Any:
        """The loss of one batch, as its share of the accumulated batch. Called by the library."""
        losses = self._within(model, inputs, None if num_items_in_batch is None else int(num_items_in_batch))
        last = inputs["last"]
        counts = {name: getattr(losses, name) for name in ("gained", "sweeps", "slots", "taught")}
        for name, value in {**counts, "text": (last + (last > 0)).sum()}.items():
            self._sums[name] = self._sums.get(name, torch.zeros((), dtype=torch.long, device=value.device)) + value
        # The shares of all processes add up to the loss, and the library takes the mean of their gradients.
        total = losses.total * self.accelerator.num_processes
        return (total, {"loss": total}) if return_outputs else total

    def _within(self, model: nn.Module, *args: Any) -> LineLosses:
        """`losses`, within the forward of what the library wrapped around the model."""
        if self.accelerator.num_processes == 1:
            return self.losses(*args)
        return within_forward(model, self.backbone.model, self.losses, *args)

    def _get_train_sampler(self, train_dataset: Any = None) -> Any:
        """The order of texts. Called by the library."""
        if isinstance(self.train_dataset, EvenRows):
            return self.train_dataset.sampler
        return super()._get_train_sampler(train_dataset)

    def get_batch_samples(
        self, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device
    ) -> tuple[list[Any], Tensor | None]:
        """The batches of one step, and over how many lines their losses are averaged []."""
        batches, _ = super().get_batch_samples(epoch_iterator, num_batches, device)
        if not batches:
            return batches, None
        # Kept on the CPU, where it is read.
        lines = summed(torch.tensor(sum(int(batch["lines"]) for batch in batches)), self.accelerator)
        _, _, ages, size = batches[0]["fill"].shape
        self.meter.tokens += int(lines) * size * (ages if self.settings.states == "every" else 1)
        return batches, lines

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Log, with what the steps since the last log gained, took and taught beside the loss."""
        if "loss" in logs and self._sums:
            sums = {name: int(summed(total, self.accelerator)) for name, total in self._sums.items()}
            if sums["sweeps"]:
                logs["tokens_per_forward"] = sums["gained"] / sums["sweeps"]
            self.meter.pace.count(sums["text"] + sums["slots"], sums["slots"], sums["taught"])
            logs.update(self.meter.pace.rates())
            self._sums = {}
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
            return self._within(model, self._prepare_inputs(inputs)).total.detach(), None, None

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        """Write the adapter, not the base. Called by the library, in every process."""
        if not self.args.should_save:
            return
        folder = Path(output_dir or str(self.settings.output_dir))
        self.adapter.save(folder)
        if self.processing_class is not None:
            self.processing_class.save_pretrained(folder)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        """Put the checkpoint's adapter in the place of the present one. Called by the library."""
        self.adapter.detach()
        self.adapter = GatedAdapter.load(self.backbone.model, resume_from_checkpoint)
        self._check_rank()
