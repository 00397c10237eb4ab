"""Probes: tokens per forward and quality of the half-trained model every so many steps, for the trade-off curve."""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from jacobi_forcing.backbone import Backbone
from jacobi_forcing.config import DecodeConfig, EvaluationConfig
from jacobi_forcing.decode.stats import DecodeStats
from jacobi_forcing.evaluate.quality import answers, quality_of
from jacobi_forcing.files import write_text
from jacobi_forcing.formats import stamped
from jacobi_forcing.loading import Loaded
from jacobi_forcing.processes import from_main, is_main
from jacobi_forcing.recipe.collapse import halt, keep_good, verdict
from jacobi_forcing.recipe.reporter import Reporter
from jacobi_forcing.trajectories.prompts import Prompt, load_prompts
from jacobi_forcing.trajectories.trajectory import Trajectory


class Probe(TrainerCallback):
    """Decodes a few held-out and training prompts at step 0, every `probe_steps` steps and at the end; a line a time.

    It draws no random numbers that training uses and leaves the model in the mode it was in, so a run with probes has
    the weights of one without. Of several processes the main one measures. A resumed run drops the lines behind the
    step at which it goes on.

    Args:
        file: JSON lines: `step`, `tokens_per_forward`, the entries of `Quality.to_dict`, and the decoder.
        settings: Prompts, task and probe settings.
        reporter: Told each result.
        trained: What is trained on; its first prompts are probed too.

    Raises:
        CollapseError: The model has collapsed, see `collapse.verdict`; the checkpoint of the last good probe is kept.
    """

    def __init__(
        self,
        file: Path,
        settings: EvaluationConfig,
        loaded: Loaded,
        reporter: Reporter,
        trained: Iterable[Trajectory] = (),
    ) -> None:
        self.file, self.settings, self.reporter = file, settings, reporter
        self.tokenizer, self.vocabulary = loaded.tokenizer, loaded.vocabulary
        limit = settings.prompts.limit
        count = settings.probe_prompts if limit is None else min(limit, settings.probe_prompts)
        few = dataclasses.replace(settings.prompts, limit=count)
        self.prompts: Sequence[Prompt] = load_prompts(
            few, loaded.tokenizer, context_length=Backbone(loaded.model).context_length
        )
        parallel = [config for config in settings.decode if config.decoder != "ar"]
        self.decode = parallel[0] if parallel else DecodeConfig()
        first = itertools.islice(trained, settings.probe_training_prompts)
        self.trained = [Prompt(one.sample, "", list(one.prompt_ids)) for one in first]
        self.lines: list[dict[str, Any]] = []
        self._good = -1

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Drop what a killed run measured behind its last checkpoint; measure the start."""
        self.lines = [line for line in _read(self.file) if line["step"] <= state.global_step]
        self._save()
        if state.global_step == 0:
            self._measure(kwargs["model"], 0)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Measure when it is time."""
        if (
            state.global_step % (self.settings.probe_steps or state.max_steps) == 0
            or state.global_step == state.max_steps
        ):
            self._measure(kwargs["model"], state.global_step)
            reason = self._judge(state, Backbone(kwargs["model"]).vocab_size) if is_main() else None
            # All processes end together: one that went on would wait for the gradients of the others.
            reason = from_main(reason)
            if reason is not None:
                good = [line["step"] for line in self.lines[:-1] if "halted" not in line]
                last = from_main(good[-1] if good else 0)
                raise halt(Path(args.output_dir), state.global_step, last, reason)
            control.should_save = True

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Keep the checkpoint of a good probe."""
        if is_main() and self._good == state.global_step and self.settings.halt_repetition is not None:
            keep_good(Path(args.output_dir), self._good)

    def _judge(self, state: Any, vocab_size: int) -> str | None:
        """Why the last line tells of a collapse, or None."""
        losses = [entry["ar_loss"] for entry in state.log_history if "ar_loss" in entry]
        looping = [_looping(line) for line in (self.lines[0], self.lines[-1])]
        last = losses[-1] if losses else None
        reason = verdict(looping[1], looping[0], last, vocab_size, self.settings.halt_repetition)
        if reason is None:
            self._good = state.global_step
            return None
        self.lines[-1]["halted"] = reason
        self._save()
        return reason

    def _measure(self, model: Any, step: int) -> None:
        if not is_main() or any(line["step"] == step for line in self.lines):
            return
        backbone = Backbone(model)
        responses, stats = self._answers(backbone, self.prompts)
        quality = quality_of(responses, self.prompts, self.tokenizer, backbone.eos_ids, self.settings.task)
        line = {
            "step": step,
            "tokens_per_forward": round(stats.tokens_per_forward, 4),
            **quality.to_dict(),
            "decoder": self.decode.decoder,
            "block_size": self.decode.block_size,
        }
        if self.trained:
            line["training"] = self._on_training_prompts(backbone)
        self.lines.append(stamped("probe", line))
        self._save()
        solved = "" if quality.solved is None else f", {quality.solved.count} of {quality.solved.of} solved"
        self.reporter.note(f"step {step}: {stats.tokens_per_forward:.2f} tokens a forward{solved}")

    def _answers(self, backbone: Backbone, prompts: Sequence[Prompt]) -> tuple[list[list[int]], DecodeStats]:
        return answers(
            backbone,
            prompts,
            max_new_tokens=self.settings.max_new_tokens,
            batch_size=self.settings.batch_size,
            decode=self.decode,
            vocabulary=self.vocabulary,
        )

    def _on_training_prompts(self, backbone: Backbone) -> dict[str, float]:
        responses, stats = self._answers(backbone, self.trained)
        quality = quality_of(responses, self.trained, self.tokenizer, backbone.eos_ids).to_dict()
        return {
            "tokens_per_forward": round(stats.tokens_per_forward, 4),
            **{name: quality[name] for name in ("answers", "repetition_rate")},
        }

    def _save(self) -> None:
        if is_main():
            write_text(self.file, "".join(json.dumps(line) + "\n" for line in self.lines))


def _looping(line: dict[str, Any]) -> float:
    """Share of a line's answers that loop, training and held-out ones together."""
    parts = [line, *([line["training"]] if "training" in line else [])]
    return float(sum(one["repetition_rate"] * one["answers"] for one in parts) / sum(one["answers"] for one in parts))


def _read(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()] if file.exists() else []
