"""What `gpu_smollm2.py` trains and measures: domains, recipes, and how long they may be."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from gpu_prepare import FOLDERS, HELD_OUT, QUESTIONS
from jacobi_forcing.config import EvaluationConfig
from jacobi_forcing.embedded import BUILTIN_ORDERS
from jacobi_forcing.files import count_lines

EPOCHS, SECOND_ROUND = 2, 0.4
ADAPTER: dict[str, Any] = {"learning_rate": 2e-3, "misfits": "skip"}
FULL: dict[str, Any] = {
    **{"learning_rate": 1e-4, "misfits": "skip", "max_length": 512, "attention": "sdpa"},
    # The mean over tokens beside the sum over a block, see the recipe for GSM8K.
    **{"ar_weight": 100.0, "mask": "noise_conditioned_window", "schedule_phase": "random"},
}


@dataclasses.dataclass(frozen=True)
class Sizes:
    """What is small in a trial."""

    collect_batch: int = 256
    batch: int = 16
    pace_steps: int = 16
    most_steps: int = 4000
    held_out: int = 200
    timed: int = 24
    response: float = 1.0


TINY = Sizes(collect_batch=4, batch=2, pace_steps=2, most_steps=2, held_out=4, timed=2, response=0.125)


@dataclasses.dataclass(frozen=True)
class Plan:
    """Settings out of a few choices.

    Attributes:
        base: Folder or name of the base model.
        device: Where all runs.
        work: Folder that runs work in.
        carried: What `prepare` filled; prompts that lie there make a second domain.
        sizes: How much of everything.
    """

    base: str
    device: str
    work: Path
    carried: Path
    sizes: Sizes

    def domains(self) -> dict[str, dict[str, Any]]:
        """Prompts to train on, prompts to measure on, grading and length of answers of each domain."""
        apart = [folder for name in FOLDERS if (folder := self.carried / name / QUESTIONS).is_file()]
        found: dict[str, dict[str, Any]] = {
            "orders": {
                "train": {"source": BUILTIN_ORDERS, "split": "train", "seed": 1},
                "held_out": {"source": BUILTIN_ORDERS, "split": "heldout", "seed": 1},
                **{"task": "orders", "tokens": 96, "prompts": 10**6},
            }
        }
        if apart:
            held_out = {"source": str(apart[0].with_name(HELD_OUT)), "field": "question", "answer_field": "answer"}
            found["gsm8k"] = {
                "train": {"source": str(apart[0]), "field": "question"},
                "held_out": held_out,
                **{"task": "gsm8k", "tokens": 160, "prompts": count_lines(apart[0])},
            }
        return found

    def recipe(self, domain: str, mode: str, rounds: list[dict[str, Any]]) -> dict[str, Any]:
        """A recipe; each round names its own number of prompts and is given others than those before."""
        told, begun, made = self.domains()[domain], 0, []
        for settings in rounds:
            common = {"batch_size": self.sizes.batch, **(ADAPTER if mode == "adapter" else FULL)}
            made.append({**common, **settings, "prompts_offset": begun})
            begun += settings["prompts_limit"]
        return {
            "model": self.model(),
            "prompts": {**told["train"], "limit": begun},
            **{"mode": mode, "rounds": made},
            "collect": {
                **{"max_new_tokens": self.tokens(domain), "batch_size": self.sizes.collect_batch},
                **{"shard_size": self.sizes.collect_batch, "needed_only": mode == "full"},
            },
            "output": str(self.folder(domain, mode) if len(rounds) > 1 else self.work / f"pace-{domain}-{mode}"),
        }

    def model(self, **changes: Any) -> dict[str, Any]:
        """The base, or another model, in the dtype of this run."""
        return {"name": self.base, "dtype": "bfloat16", "device": self.device, **changes}

    def tokens(self, domain: str) -> int:
        """Longest response, tokens."""
        return int(self.domains()[domain]["tokens"] * self.sizes.response)

    def folder(self, domain: str, mode: str) -> Path:
        """Where the run of a domain and mode works."""
        return self.work / f"{domain}-{mode}"

    def pace(self, domain: str, mode: str) -> dict[str, Any]:
        """A recipe of a few steps, to see how fast they are: the slower of both block sizes."""
        few = {"block_size": 32, "steps": self.sizes.pace_steps, "prompts_limit": self.sizes.collect_batch}
        return self.recipe(domain, mode, [few])

    def rounds(
        self, domain: str, mode: str, seconds: float, step: float, taken: dict[str, Any]
    ) -> list[dict[str, Any]]:
        """Two rounds, as the paper's (n=16, w=16, then n=32, w=8), as long as there is time.

        Args:
            domain: Whose prompts.
            mode: Full or adapter.
            seconds: What both may take, collecting included.
            step: Seconds a step.
            taken: The stages of the run of `pace`: their seconds tell what collecting and beginning to train cost.
        """
        few = self.sizes
        collecting = taken["collect-1"]["seconds"] / few.collect_batch
        fixed = max(0.0, taken["train-1"]["seconds"] - few.pace_steps * step)
        steps = int((seconds - 2 * fixed) / (step + collecting * few.batch / EPOCHS))
        steps, most = max(2, min(steps, few.most_steps)), self.domains()[domain]["prompts"] // 2
        found = []
        second = max(1, int(SECOND_ROUND * steps))
        for index, count in enumerate((steps - second, second)):
            # Checkpoints of all weights cost seconds, those of an adapter next to nothing.
            schedule: dict[str, Any] = {
                "lr_scheduler": "linear" if index else "constant",
                "save_steps": max(1, count // 4),
            }
            if mode == "full":
                schedule = {"window_size": 8 if index else 16, "save_steps": count}
            prompts = min(most, max(few.batch, -(-count * few.batch // EPOCHS)))
            sizes = {"block_size": 32 if index else 16, "steps": count, "prompts_limit": prompts}
            found.append({**sizes, **schedule})
        return found

    def evaluation(self, domain: str, timed: int, block_sizes: tuple[int, ...]) -> EvaluationConfig:
        """What is measured: quality on held-out prompts, and speed on the first `timed` of them at most."""
        told, few = self.domains()[domain], self.sizes
        return EvaluationConfig.from_dict(
            {
                "prompts": {**told["held_out"], "limit": few.held_out},
                **{"task": told["task"], "max_new_tokens": self.tokens(domain), "batch_size": few.held_out},
                "decode": [{"decoder": "window", "block_size": size} for size in block_sizes],
                "speed_prompts": max(1, min(timed, few.timed)),
            }
        )
