"""One shard at a time: greedy responses first, then filters, then the states of all blocks. See `collect`."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from jacobi_forcing.backbone import Backbone
from jacobi_forcing.blocks import split, truncate
from jacobi_forcing.cache import RowContent
from jacobi_forcing.config import CollectConfig
from jacobi_forcing.errors import DataError, ModelError
from jacobi_forcing.schedule import NoiseSchedule
from jacobi_forcing.trajectories.executors import ShardResult, Tell
from jacobi_forcing.trajectories.filters import Answer, Filter, first_refusal
from jacobi_forcing.trajectories.prompts import Prompt
from jacobi_forcing.trajectories.report import CollectReport
from jacobi_forcing.trajectories.responses import greedy_responses
from jacobi_forcing.trajectories.states import Block, draw_state, sweep_blocks
from jacobi_forcing.trajectories.store import Trajectory

logger = logging.getLogger(__name__)

NEAR_TIE = {torch.float32: 1e-3, torch.float16: 0.1, torch.bfloat16: 0.5}
"""Largest gap between two logits that rounding alone explains, for each dtype of the weights."""


@dataclasses.dataclass
class Job:
    """One sample on its way to a trajectory."""

    prompt: Prompt
    limit: int
    response: list[int] = dataclasses.field(default_factory=list)
    blocks: list[Block] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(frozen=True)
class CollectWork:
    """All that decides what a shard holds. Can be pickled if its parts can: an actor makes the model for itself.

    Attributes:
        make_backbone: Gives the model whose greedy responses are the fixed points.
        prompts: By index.
        config: Limits, batch sizes, how y(0) is drawn.
        block_size: n, tokens per block.
        eos_ids: Ids that end a response.
        vocabulary: Ids that the tokenizer has, for `draft_init="vocabulary"`.
        states: Whether blocks are swept.
        needed: The schedule whose states alone are wanted; None: all states there are.
        responses: Responses made elsewhere, by index of the prompt; None: the model writes them.
        filters: Which responses are kept, by name.
    """

    make_backbone: Callable[[], Backbone]
    prompts: Mapping[int, Prompt]
    config: CollectConfig
    block_size: int
    eos_ids: Sequence[int]
    vocabulary: Sequence[int] | None = None
    states: bool = True
    needed: NoiseSchedule | None = None
    responses: Mapping[int, Sequence[int]] | None = None
    filters: Mapping[str, Filter] = dataclasses.field(default_factory=dict)

    def __call__(self, shard: int, samples: Sequence[int], tell: Tell | None = None) -> ShardResult:
        """Collect one shard."""
        return self._collector.shard(shard, [self.prompts[sample] for sample in samples], tell)

    @functools.cached_property
    def _collector(self) -> Collector:
        return Collector(self, self.make_backbone())

    def __getstate__(self) -> dict[str, Any]:
        """Without the model, where there is one."""
        return {name: value for name, value in vars(self).items() if name != "_collector"}


class Collector:
    """Runs the stages over the jobs of a shard, batch by batch.

    Args:
        work: What is to be done.
        backbone: The model.
    """

    def __init__(self, work: CollectWork, backbone: Backbone) -> None:
        self.work, self.config, self.backbone = work, work.config, backbone
        self.report = CollectReport()

    def shard(self, shard: int, prompts: Sequence[Prompt], tell: Tell | None = None) -> ShardResult:
        """The trajectories of one shard in order of sample, and why the missing ones are missing."""
        self.report = CollectReport()
        jobs = [Job(prompt, response_limit(self.backbone, self.config, prompt)) for prompt in prompts]
        # Rows of similar length in a batch waste little on padding; the result is the same in any order.
        ordered, size = sorted(jobs, key=lambda job: len(job.prompt.ids)), self.config.batch_size
        filtered: dict[int, str] = {}
        with evaluating(self.backbone), torch.inference_mode():
            for start in range(0, len(ordered), size):
                filtered |= self._batch(ordered[start : start + size], tell or _silent)
        self.report.filtered += len(filtered)
        kept = [job for job in jobs if job.prompt.index not in filtered]
        dropped = self._dropped(kept)
        trajectories = [self._finished(job) for job in kept if job.prompt.index not in dropped]
        return ShardResult(shard, trajectories, dropped, filtered, self.report)

    def _batch(self, jobs: list[Job], tell: Tell) -> dict[int, str]:
        """Responses and states of some jobs; which filter keeps which sample out."""
        contents: list[RowContent] | None = [] if self.work.states and self.work.responses is None else None
        with self.report.timed("fixed_point_seconds"):
            for job, response in zip(jobs, self._responses(jobs, contents), strict=True):
                job.response, job.blocks = response, self._first_states(job.prompt, response)
        tell("fixed points", len(jobs))
        filtered = self._filtered(jobs)
        kept = [place for place, job in enumerate(jobs) if job.prompt.index not in filtered]
        if self.work.states and kept:
            with self.report.timed("trajectory_seconds"):
                self.report.forwards += sweep_blocks(
                    self.backbone,
                    [jobs[place].prompt.ids for place in kept],
                    [jobs[place].response for place in kept],
                    [jobs[place].blocks for place in kept],
                    None if contents is None else [contents[place] for place in kept],
                )
        tell("trajectories", len(jobs))
        return filtered

    def _responses(self, jobs: list[Job], contents: list[RowContent] | None) -> list[list[int]]:
        given, eos_ids = self.work.responses, self.work.eos_ids
        if given is not None:
            return [truncate(list(given[job.prompt.index]), eos_ids, job.limit) for job in jobs]
        prompts, limits = [job.prompt.ids for job in jobs], [job.limit for job in jobs]
        return greedy_responses(self.backbone, prompts, limits, eos_ids, contents)

    def _filtered(self, jobs: list[Job]) -> dict[int, str]:
        found: dict[int, str] = {}
        for job in jobs:
            answer = Answer(job.prompt, job.response, job.response[-1] in self.work.eos_ids)
            name = first_refusal(self.work.filters, answer)
            if name is not None:
                found[job.prompt.index] = name
        return found

    def _first_states(self, prompt: Prompt, response: list[int]) -> list[Block]:
        blocks = []
        for index, fixed_point in enumerate(split(response, self.work.block_size)):
            offset = index * self.work.block_size
            pool = self.work.vocabulary if self.config.draft_init == "vocabulary" else [*prompt.ids, *response[:offset]]
            state = list(fixed_point)
            if self.work.states:
                state = draw_state(fixed_point, pool or [], seed=self.config.seed, sample=prompt.index, block=index)
            wanted = None if self.work.needed is None else self.work.needed.possible(index)
            blocks.append(Block(len(prompt.ids) + offset, fixed_point, [state], wanted))
        return blocks

    def _dropped(self, jobs: Sequence[Job]) -> dict[int, str]:
        tolerance = near_tie(self.backbone.dtype)
        gaps = {job.prompt.index: max(block.gap for block in job.blocks) for job in jobs}
        dropped = {
            sample: f"sweep and generation disagree by {gap:.3g} logits, and rounding explains {tolerance} at most"
            for sample, gap in gaps.items()
            if gap > tolerance
        }
        for sample, reason in dropped.items():
            logger.warning("Sample %d is dropped: %s", sample, reason)
        if dropped and len(dropped) == len(jobs):
            raise ModelError(
                "The model computes other tokens in a sweep than in generation",
                seen=f"{len(dropped)} of {len(jobs)} samples, by up to {max(gaps.values()):.3g} logits",
                expected=f"gaps up to {tolerance}",
                remedy="its cache or its masks cannot be relied on; please report the architecture",
            )
        self.report.dropped += len(dropped)
        return dropped

    def _finished(self, job: Job) -> Trajectory:
        report, finished = self.report, job.response[-1] in self.work.eos_ids
        report.responses += 1
        report.tokens += len(job.response)
        report.unfinished += not finished
        report.blocks += len(job.blocks)
        report.sweeps += sum(len(block.states) - 1 for block in job.blocks)
        report.near_ties += sum(block.gap > 0 for block in job.blocks)
        report.spared += sum(len(block.fixed_point) - block.right for block in job.blocks)
        states = [block.whole for block in job.blocks]
        return Trajectory(job.prompt.index, list(job.prompt.ids), job.response, finished, self.work.block_size, states)


def _silent(stage: str, count: int) -> None:
    """Told by nobody."""


def response_limit(backbone: Backbone, config: CollectConfig, prompt: Prompt) -> int:
    """Most tokens that a response may have, at least 1.

    Raises:
        DataError: The prompt is empty or fills the context.
    """
    context = backbone.context_length
    room = config.max_new_tokens if context is None else context - len(prompt.ids)
    if not prompt.ids or room < 1:
        raise DataError(
            f"Prompt {prompt.index} cannot be continued",
            seen=f"{len(prompt.ids)} tokens",
            expected="at least 1, and fewer than the model's context" + ("" if context is None else f" of {context}"),
            remedy="remove it from the source, or shorten it",
        )
    return min(config.max_new_tokens, room)


def near_tie(dtype: torch.dtype) -> float:
    """Largest gap between two logits that rounding alone explains."""
    return NEAR_TIE.get(dtype, max(NEAR_TIE.values()))


@contextlib.contextmanager
def evaluating(backbone: Backbone) -> Iterator[None]:
    """Without dropout, whatever mode the model is in."""
    training = backbone.model.training
    backbone.model.eval()
    try:
        yield
    finally:
        backbone.model.train(training)
