"""Collecting trajectories: who collects which shards, and what is written."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from jacobi_forcing import processes
from jacobi_forcing.backbone import Backbone
from jacobi_forcing.blocks import truncate
from jacobi_forcing.config import CollectConfig
from jacobi_forcing.errors import ConfigError
from jacobi_forcing.provenance import model_fingerprint
from jacobi_forcing.schedule import NoiseSchedule
from jacobi_forcing.trajectories.collector import CollectWork, evaluating, near_tie, response_limit
from jacobi_forcing.trajectories.executors import Executor, LocalExecutor, ShardResult, TorchrunExecutor, each_once
from jacobi_forcing.trajectories.filters import Filter, kept_of
from jacobi_forcing.trajectories.given import Given, check_responses
from jacobi_forcing.trajectories.prompts import Prompt
from jacobi_forcing.trajectories.report import CollectReport
from jacobi_forcing.trajectories.store import TrajectoryWriter, read_manifest

Progress = Callable[[str, int, int], None]
"""Called with the stage ("fixed points" or "trajectories"), responses done and responses in all."""


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
    given: Given | None = None,
    filters: Mapping[str, Filter] | None = None,
    make_backbone: Callable[[], Backbone] | None = None,
    on_progress: Progress | None = None,
) -> CollectReport:
    """Collect the trajectories of all prompts into a folder; goes on where a killed run stopped.

    In fp32 the result depends neither on the batch size nor on who collects. Where two tokens' logits are closer than
    rounding (`NEAR_TIE`) and a sweep prefers the other one, the response's is kept and the block counted. A larger gap
    means that the model computes other things in a sweep: the sample is dropped, counted and named in a warning and in
    the manifest. Started by torchrun, every process is to call this; they share the shards and return one report.

    Args:
        backbone: The model whose greedy responses are the fixed points.
        prompts: In ascending order of `index`.
        folder: Where shards and manifest go.
        config: Limits, batch and shard sizes, how y(0) is drawn, who collects.
        block_size: n, tokens per block.
        eos_ids: Ids that end a response; None: the model's own.
        vocabulary: Ids that the tokenizer has, for `draft_init="vocabulary"`.
        provenance: Kept in the manifest for this opening of the folder.
        states: Whether blocks are swept; without, the fixed point is their only state.
        needed: With `config.needed_only`, the schedule of the training to come.
        given: Responses made elsewhere; None: the model writes them.
        filters: Which responses are kept, by name; None: all.
        make_backbone: Gives the model anew in another process, for `config.executor="ray"`.
        on_progress: Told after every batch; of what other processes do, after every shard.

    Raises:
        ArtefactError: The folder holds another collection.
        ConfigError: Block size or vocabulary are wrong, or `needed` is missing.
        DataError: Prompts or given responses do not fit the model, or no response passed the filters.
        ModelError: A whole shard had to be dropped.
        MissingExtraError: pyarrow, or Ray where it is asked for, is not installed.
    """
    _check(block_size, config, vocabulary, needed, make_backbone)
    ends = backbone.eos_ids if eos_ids is None else list(eos_ids)
    plan, responses = {prompt.index: prompt for prompt in prompts}, None if given is None else given.responses
    needed = needed if config.needed_only and states else None
    work = CollectWork(
        lambda: backbone, plan, config, block_size, ends, vocabulary, states, needed, responses, dict(filters or {})
    )
    return _shared(work, backbone, folder, given, make_backbone, provenance, on_progress)


def _shared(
    work: CollectWork,
    backbone: Backbone,
    folder: str | Path,
    given: Given | None,
    make_backbone: Callable[[], Backbone] | None,
    provenance: Mapping[str, Any] | None,
    on_progress: Progress | None,
) -> CollectReport:
    """The main process writes what all collect."""
    config, report = work.config, CollectReport()
    limits = {index: response_limit(backbone, config, prompt) for index, prompt in work.prompts.items()}
    if processes.is_main():
        if given is not None:
            _check_given(backbone, work, limits, report, given)
        settings = _settings(work, backbone, given)
        writer = TrajectoryWriter(
            folder,
            samples=list(work.prompts),
            shard_size=config.shard_size,
            block_size=work.block_size,
            settings=settings,
            provenance=provenance,
        )
        _fill(writer, _executor(config, folder, settings), _portable(work, config, make_backbone), report, on_progress)
    elif config.executor == "local":
        for _ in TorchrunExecutor(folder, "").run(work, (), lambda stage, count: None):
            pass
    return processes.from_main(report)


def _fill(
    writer: TrajectoryWriter, executor: Executor, work: CollectWork, report: CollectReport, on_progress: Progress | None
) -> None:
    """Have the shards done that are missing, and write them."""
    total = sum(len(samples) for _, samples in writer.pending()) + len(writer.done)
    report.resumed = len(writer.done)
    done = {"fixed points": report.resumed, "trajectories": report.resumed}

    def tell(stage: str, count: int) -> None:
        done[stage] += count
        if on_progress is not None:
            on_progress(stage, done[stage], total)

    def keep(result: ShardResult) -> None:
        report.add(result.report)
        with report.timed("write_seconds"):
            writer.write_shard(result.shard, result.trajectories, result.dropped, result.filtered)

    for result in executor.left_over(writer.pending()):
        keep(result)
    pending = writer.pending()
    for result in each_once(executor.run(work, pending, tell), pending):
        keep(result)
    writer.finish()
    if work.filters:
        kept_of(read_manifest(writer.folder), work.filters)


def _executor(config: CollectConfig, folder: str | Path, settings: Mapping[str, Any]) -> Executor:
    if config.executor == "ray":
        from jacobi_forcing.trajectories.ray_executor import RayExecutor

        return RayExecutor(config.workers, gpus=config.worker_gpus)
    return TorchrunExecutor(folder, _digest(dict(settings))) if processes.count() > 1 else LocalExecutor()


def _portable(work: CollectWork, config: CollectConfig, make_backbone: Callable[[], Backbone] | None) -> CollectWork:
    """The work as it can go to other machines: without the model of this process."""
    if config.executor != "ray" or make_backbone is None:
        return work
    return dataclasses.replace(work, make_backbone=make_backbone)


def _check(
    block_size: int,
    config: CollectConfig,
    vocabulary: Sequence[int] | None,
    needed: NoiseSchedule | None,
    make_backbone: Callable[[], Backbone] | None,
) -> None:
    if block_size < 1:
        raise ConfigError("The block size is too small", seen=block_size, expected="at least 1 token")
    if config.draft_init == "vocabulary" and not vocabulary:
        raise ConfigError('draft_init="vocabulary" needs the ids that the tokenizer has', remedy="pass vocabulary=…")
    if config.needed_only and needed is None:
        raise ConfigError("'needed_only' needs the schedule of the training to come", remedy="pass needed=…")
    if config.executor == "ray" and make_backbone is None:
        raise ConfigError("Ray's actors each need a model of their own", remedy="pass make_backbone=…")


def _check_given(
    backbone: Backbone,
    work: CollectWork,
    limits: Mapping[int, int],
    report: CollectReport,
    given: Given,
) -> None:
    """Compare responses made elsewhere with the model, before anything is written."""
    responses = {
        index: truncate(list(response), work.eos_ids, limits[index])
        for index, response in given.responses.items()
        if index in limits
    }
    with evaluating(backbone):
        check = check_responses(
            backbone,
            list(work.prompts.values()),
            responses,
            count=work.config.responses_check,
            batch_size=work.config.batch_size,
            tolerance=near_tie(backbone.dtype),
            show=given.show,
        )
    report.checked, report.response_near_ties = check.checked, check.near_ties


def _settings(work: CollectWork, backbone: Backbone, given: Given | None) -> dict[str, Any]:
    """All that decides the content of the shards; batch size and executor do not."""
    config, vocabulary = work.config, work.vocabulary
    return {
        "model_fingerprint": model_fingerprint(backbone.model),
        "prompts_sha256": _digest([[prompt.index, prompt.ids] for prompt in work.prompts.values()]),
        "eos_ids": list(work.eos_ids),
        "max_new_tokens": config.max_new_tokens,
        "draft_init": config.draft_init,
        "vocabulary_sha256": _digest(list(vocabulary or [])) if config.draft_init == "vocabulary" else None,
        "seed": config.seed,
        "states": work.states,
        "needed_only": None if work.needed is None else dataclasses.asdict(work.needed),
        "responses_sha256": None if given is None else given.sha256,
        "filters": list(work.filters) or None,
    }


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()
