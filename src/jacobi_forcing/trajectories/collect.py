"""Collecting trajectories: greedy responses first, then the states of all their blocks, shard by shard."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from jacobi_forcing.backbone import Backbone
from jacobi_forcing.blocks import split
from jacobi_forcing.cache import RowContent
from jacobi_forcing.config import CollectConfig
from jacobi_forcing.errors import ConfigError, DataError, ModelError
from jacobi_forcing.provenance import model_fingerprint
from jacobi_forcing.schedule import NoiseSchedule
from jacobi_forcing.trajectories.prompts import Prompt
from jacobi_forcing.trajectories.report import CollectReport
from jacobi_forcing.trajectories.responses import greedy_responses
from jacobi_forcing.trajectories.states import Block, draw_state, sweep_blocks
from jacobi_forcing.trajectories.store import Trajectory, TrajectoryWriter

logger = logging.getLogger(__name__)

Progress = Callable[[str, int, int], None]
"""Called with the stage ("fixed points" or "trajectories"), responses done and responses in all."""

NEAR_TIE = {torch.float32: 1e-3, torch.float16: 0.1, torch.bfloat16: 0.5}
"""Largest gap between two logits that rounding alone explains, for each dtype of the weights."""


def collect(
    backbone: Backbone,
    prompts: Sequence[Prompt],
    *,
    folder: str | Path,
    config: CollectConfig,
    block_size: int,
    eos_ids: Sequence[int] | None = None,
    vocabulary: Sequence[int] | None = None,
    provenance: Mapping[str, Any] | None = None,
    states: bool = True,
    needed: NoiseSchedule | None = None,
    on_progress: Progress | None = None,
) -> CollectReport:
    """Collect the trajectories of all prompts into a folder; goes on where a killed run stopped.

    In fp32 the result does not depend on the batch size. Where two tokens' logits are closer than rounding (`NEAR_TIE`)
    and a sweep prefers the other one, the response's is kept and the block counted. A larger gap means that the model
    computes other things in a sweep: the sample is dropped, counted and named in a warning and in the manifest.

    Args:
        backbone: The model whose greedy responses are the fixed points.
        prompts: In ascending order of `index`.
        folder: Where shards and manifest go.
        config: Limits, batch and shard sizes, how y(0) is drawn.
        block_size: n, tokens per block.
        eos_ids: Ids that end a response; None: the model's own.
        vocabulary: Ids that the tokenizer has, for `draft_init="vocabulary"`.
        provenance: Kept in the manifest for this opening of the folder.
        states: Whether blocks are swept; without, the fixed point is their only state.
        needed: With `config.needed_only`, the schedule of the training to come.
        on_progress: Told after every batch.

    Raises:
        ArtefactError: The folder holds another collection.
        ConfigError: Block size or vocabulary are wrong, or `needed` is missing.
        DataError: There are no prompts, they are out of order, or one fills the model's context.
        ModelError: A whole shard had to be dropped.
        MissingExtraError: pyarrow is not installed.
    """
    _check(block_size, config, vocabulary, needed)
    ends = backbone.eos_ids if eos_ids is None else list(eos_ids)
    collector = _Collector(backbone, config, block_size, ends, vocabulary, states, needed)
    plan = {prompt.index: (prompt, collector.limit(prompt)) for prompt in prompts}
    writer = TrajectoryWriter(
        folder,
        samples=[prompt.index for prompt in prompts],
        shard_size=config.shard_size,
        block_size=block_size,
        settings=_settings(collector, prompts),
        provenance=provenance,
    )
    collector.start(len(prompts), len(writer.done), on_progress)
    with _evaluating(backbone), torch.inference_mode():
        for shard, samples in writer.pending():
            trajectories, dropped = collector.shard([_Job(*plan[sample]) for sample in samples])
            with collector.report.timed("write_seconds"):
                writer.write_shard(shard, trajectories, dropped)
    writer.finish()
    return collector.report


def _check(
    block_size: int, config: CollectConfig, vocabulary: Sequence[int] | None, needed: NoiseSchedule | None
) -> None:
    if block_size < 1:
        raise ConfigError("The block size is too small", seen=block_size, expected="at least 1 token")
    if config.draft_init == "vocabulary" and not vocabulary:
        raise ConfigError('draft_init="vocabulary" needs the ids that the tokenizer has', remedy="pass vocabulary=…")
    if config.needed_only and needed is None:
        raise ConfigError("'needed_only' needs the schedule of the training to come", remedy="pass needed=…")


@dataclasses.dataclass
class _Job:
    """One sample on its way to a trajectory."""

    prompt: Prompt
    limit: int
    response: list[int] = dataclasses.field(default_factory=list)
    blocks: list[Block] = dataclasses.field(default_factory=list)


class _Collector:
    """Runs both stages over the jobs of a shard, batch by batch, and keeps the report."""

    def __init__(
        self,
        backbone: Backbone,
        config: CollectConfig,
        block_size: int,
        eos_ids: list[int],
        vocabulary: Sequence[int] | None,
        states: bool = True,
        needed: NoiseSchedule | None = None,
    ) -> None:
        self.backbone, self.config, self.block_size = backbone, config, block_size
        self.eos_ids, self.vocabulary, self.states = eos_ids, vocabulary, states
        self.needed = needed if config.needed_only and states else None
        self.start(0, 0, None)

    def start(self, total: int, resumed: int, on_progress: Progress | None) -> None:
        """Set the counters before the first shard."""
        self.report = CollectReport(resumed=resumed)
        self._total, self._on_progress = total, on_progress
        self._done = {"fixed points": resumed, "trajectories": resumed}

    def limit(self, prompt: Prompt) -> int:
        """Most tokens that a response may have, at least 1.

        Raises:
            DataError: It is empty or fills the context.
        """
        context = self.backbone.context_length
        room = self.config.max_new_tokens if context is None else context - len(prompt.ids)
        if not prompt.ids or room < 1:
            raise DataError(
                f"Prompt {prompt.index} cannot be continued",
                seen=f"{len(prompt.ids)} tokens",
                expected="at least 1, and fewer than the model's context"
                + ("" if context is None else f" of {context}"),
                remedy="remove it from the source, or shorten it",
            )
        return min(self.config.max_new_tokens, room)

    def shard(self, jobs: list[_Job]) -> tuple[list[Trajectory], dict[int, str]]:
        """The trajectories of one shard in order of sample, and why the missing ones are missing."""
        # Rows of similar length in a batch waste little on padding; the result is the same in any order.
        ordered, size = sorted(jobs, key=lambda job: len(job.prompt.ids)), self.config.batch_size
        for start in range(0, len(ordered), size):
            self._batch(ordered[start : start + size])
        dropped = self._dropped(jobs)
        return [self._finished(job) for job in jobs if job.prompt.index not in dropped], dropped

    def _batch(self, jobs: Sequence[_Job]) -> None:
        """Responses and states of some jobs."""
        prompts, limits = [job.prompt.ids for job in jobs], [job.limit for job in jobs]
        contents: list[RowContent] | None = [] if self.states else None
        with self.report.timed("fixed_point_seconds"):
            responses = greedy_responses(self.backbone, prompts, limits, self.eos_ids, contents)
            for job, response in zip(jobs, responses, strict=True):
                job.response, job.blocks = response, self._first_states(job.prompt, response)
            self._tell("fixed points", len(jobs))
        with self.report.timed("trajectory_seconds"):
            if self.states:
                blocks = [job.blocks for job in jobs]
                self.report.forwards += sweep_blocks(self.backbone, prompts, responses, blocks, contents)
            self._tell("trajectories", len(jobs))

    def _first_states(self, prompt: Prompt, response: list[int]) -> list[Block]:
        blocks = []
        for index, fixed_point in enumerate(split(response, self.block_size)):
            offset = index * self.block_size
            pool = self.vocabulary if self.config.draft_init == "vocabulary" else [*prompt.ids, *response[:offset]]
            state = list(fixed_point)
            if self.states:
                state = draw_state(fixed_point, pool or [], seed=self.config.seed, sample=prompt.index, block=index)
            wanted = None if self.needed is None else self.needed.possible(index)
            blocks.append(Block(len(prompt.ids) + offset, fixed_point, [state], wanted))
        return blocks

    def _dropped(self, jobs: Sequence[_Job]) -> dict[int, str]:
        tolerance = NEAR_TIE.get(self.backbone.dtype, max(NEAR_TIE.values()))
        gaps = {job.prompt.index: max(block.gap for block in job.blocks) for job in jobs}
        dropped = {
            sample: f"sweep and generation disagree by {gap:.3g} logits, and rounding explains {tolerance} at most"
            for sample, gap in gaps.items()
            if gap > tolerance
        }
        for sample, reason in dropped.items():
            logger.warning("Sample %d is dropped: %s", sample, reason)
        if len(dropped) == len(jobs):
            raise ModelError(
                "The model computes other tokens in a sweep than in generation",
                seen=f"{len(dropped)} of {len(jobs)} samples, by up to {max(gaps.values()):.3g} logits",
                expected=f"gaps up to {tolerance}",
                remedy="its cache or its masks cannot be relied on; please report the architecture",
            )
        self.report.dropped += len(dropped)
        return dropped

    def _finished(self, job: _Job) -> Trajectory:
        report, finished = self.report, job.response[-1] in self.eos_ids
        report.responses += 1
        report.tokens += len(job.response)
        report.unfinished += not finished
        report.blocks += len(job.blocks)
        report.sweeps += sum(len(block.states) - 1 for block in job.blocks)
        report.near_ties += sum(block.gap > 0 for block in job.blocks)
        report.spared += sum(len(block.fixed_point) - block.right for block in job.blocks)
        states = [block.whole for block in job.blocks]
        return Trajectory(job.prompt.index, list(job.prompt.ids), job.response, finished, self.block_size, states)

    def _tell(self, stage: str, count: int) -> None:
        self._done[stage] += count
        if self._on_progress is not None:
            self._on_progress(stage, self._done[stage], self._total)


def _settings(collector: _Collector, prompts: Sequence[Prompt]) -> dict[str, Any]:
    """All that decides the content of the shards; the batch size does not."""
    config, vocabulary = collector.config, collector.vocabulary
    return {
        "model_fingerprint": model_fingerprint(collector.backbone.model),
        "prompts_sha256": _digest([[prompt.index, prompt.ids] for prompt in prompts]),
        "eos_ids": collector.eos_ids,
        "max_new_tokens": config.max_new_tokens,
        "draft_init": config.draft_init,
        "vocabulary_sha256": _digest(list(vocabulary or [])) if config.draft_init == "vocabulary" else None,
        "seed": config.seed,
        "states": collector.states,
        "needed_only": None if collector.needed is None else dataclasses.asdict(collector.needed),
    }


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()


@contextlib.contextmanager
def _evaluating(backbone: Backbone) -> Iterator[None]:
    """Without dropout, whatever mode the model is in."""
    training = backbone.model.training
    backbone.model.eval()
    try:
        yield
    finally:
        backbone.model.train(training)
