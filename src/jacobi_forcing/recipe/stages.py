"""Stages of a run: what decides each one's result, and markers that say what was begun and what is done.

A marker `stages/<name>.json` is written when a stage begins and again when it is done. It holds everything that decides
the stage's result, and a hash of it; the hash of an earlier stage is part of the later ones'. So a restart knows what
to keep, what to go on with, and what belongs to other settings.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

from jacobi_forcing import processes, provenance
from jacobi_forcing.config import CollectConfig, ModelConfig, PeftSettings, PromptsConfig, RecipeConfig, RoundConfig
from jacobi_forcing.errors import ArtefactError
from jacobi_forcing.files import file_sha256, read_json, write_json
from jacobi_forcing.loading import locate
from jacobi_forcing.peft_models import base_name, is_peft_folder
from jacobi_forcing.recipe.reporter import Reporter
from jacobi_forcing.recipe.settings import round_noise, round_prompts, sweeps_blocks

Kind = Literal["collect", "train", "evaluate"]

_TITLES: dict[str, str] = {"collect": "Collect trajectories", "train": "Train", "evaluate": "Measure"}
# Settings that change how a stage is carried out and not what comes out.
_INDIFFERENT = {
    "collect": {"batch_size", "responses", "responses_check", "filters", "filter_task"}
    | {"executor", "workers", "worker_gpus"},
    "round": {"attention", "save_steps", "prompts_offset", "prompts_limit", "fsdp", "fsdp_config", "deepspeed"}
    | {"report_to"},
}


@dataclasses.dataclass(frozen=True)
class Stage:
    """One stage.

    Attributes:
        name: Such as `collect-1`; unique in a run, names its marker.
        kind: What is done.
        round: Number of the round, from 1; 0 is the base model.
        inputs: Everything that decides the result, JSON values.
    """

    name: str
    kind: Kind
    round: int
    inputs: dict[str, Any]

    @property
    def key(self) -> str:
        """SHA-256 of the inputs."""
        return hashlib.sha256(json.dumps(self.inputs, sort_keys=True).encode()).hexdigest()

    @property
    def title(self) -> str:
        """For people."""
        return f"{_TITLES[self.kind]}, " + (f"round {self.round}" if self.round else "base model")


def plan(recipe: RecipeConfig) -> list[Stage]:
    """The stages of a recipe in order.

    Raises:
        ArtefactError, ModelError: A file or folder that the recipe names cannot be read.
    """
    base = {"model": model_inputs(recipe.model)}
    measured = recipe.evaluation is not None and recipe.evaluation.base
    stages = [_evaluate(recipe, 0, base)] if measured else []
    after: dict[str, Any] = base
    for index, settings in enumerate(recipe.rounds):
        number = index + 1
        source = base if recipe.mode == "adapter" else after
        collect = Stage(f"collect-{number}", "collect", number, {**source, **collect_inputs(recipe, index)})
        train = Stage(
            f"train-{number}",
            "train",
            number,
            {
                "after": collect.key,
                # An adapter goes on from that of the round before; the model that is collected from stays the same.
                **({"from": after, "adapter": recipe.adapter.to_dict()} if recipe.mode == "adapter" else {}),
                **train_inputs(settings, recipe.seed, recipe.model.dtype, recipe.peft),
            },
        )
        stages += [collect, train]
        after = {"after": train.key}
        last = number == len(recipe.rounds)
        if recipe.evaluation is not None and (last or recipe.evaluation.every_round):
            stages.append(_evaluate(recipe, number, after))
    return stages


def model_inputs(model: ModelConfig) -> dict[str, Any]:
    """What identifies a model: the content of its folder, or the hub name."""
    inputs = model.to_dict()
    folder = Path(locate(model.name))
    if model.adapter is not None:
        inputs["adapter"] = provenance.folder_fingerprint(Path(model.adapter), ignore=("provenance.json",))
    else:
        del inputs["adapter"]
    if model.quantization == "none":
        del inputs["quantization"]
    if not model.pack_weights:  # so that what was made before there was the option still counts
        del inputs["pack_weights"]
    if is_peft_folder(folder):
        inputs["base"] = model_inputs(dataclasses.replace(model, name=base_name(folder), adapter=None))
    if folder.is_dir():
        # The record of how it was made tells times, not weights.
        del inputs["name"]
        inputs["content"] = provenance.folder_fingerprint(folder, ignore=("provenance.json",))
    return inputs


def prompts_inputs(prompts: PromptsConfig) -> dict[str, Any]:
    """What identifies prompts: the content of the file, or the name of the source, and the slice."""
    inputs = prompts.to_dict()
    if Path(prompts.source).is_file():
        inputs["content"] = file_sha256(Path(prompts.source))
        del inputs["source"]
    return inputs


def collect_inputs(recipe: RecipeConfig, index: int) -> dict[str, Any]:
    """What decides the trajectories of a round, the model apart."""
    settings = recipe.rounds[index]
    states = sweeps_blocks(recipe, settings)
    return {
        "prompts": prompts_inputs(round_prompts(recipe, index)),
        "collect": _without(recipe.collect.to_dict(), _INDIFFERENT["collect"]),
        **_chosen(recipe.collect),
        "block_size": settings.block_size,
        **({} if states else {"states": False}),
        **({"needed": dataclasses.asdict(round_noise(settings))} if states and recipe.collect.needed_only else {}),
    }


def _chosen(collect: CollectConfig) -> dict[str, Any]:
    """Which responses are taken: those of a file, those that pass filters; nothing where all are the model's own."""
    responses = {} if collect.responses is None else {"responses": file_sha256(Path(collect.responses))}
    filters = {} if not collect.filters else {"filters": [*collect.filters, collect.filter_task]}
    return responses | filters


def train_inputs(settings: RoundConfig, seed: int, dtype: str, peft: PeftSettings | None = None) -> dict[str, Any]:
    """What decides a training run, model and trajectories apart."""
    few = {} if peft is None or peft.method == "none" else {"peft": peft.to_dict()}
    # The batch is one of each process, so their number decides what is learnt from at a time.
    shared = {"processes": processes.count()} if processes.count() > 1 else {}
    kept = _without(settings.to_dict(), _INDIFFERENT["round"])
    return {"round": kept, "seed": seed, "dtype": dtype, **few, **shared}


def _evaluate(recipe: RecipeConfig, number: int, after: Mapping[str, Any]) -> Stage:
    assert recipe.evaluation is not None
    settings = {
        k: v
        for k, v in recipe.evaluation.to_dict().items()
        if not k.startswith(("probe", "halt")) and k not in ("every_round", "base")
    }
    settings["prompts"] = prompts_inputs(recipe.evaluation.prompts)
    name = f"evaluate-{number}" if number else "evaluate-base"
    return Stage(name, "evaluate", number, {**after, "evaluation": settings})


def _without(values: dict[str, Any], names: set[str]) -> dict[str, Any]:
    return {key: value for key, value in values.items() if key not in names}


def marker_path(folder: Path, stage: Stage) -> Path:
    """Where the marker of a stage lies."""
    return folder / "stages" / f"{stage.name}.json"


def read_marker(folder: Path, stage: Stage) -> dict[str, Any] | None:
    """The marker of a stage, or None where it was never begun.

    Raises:
        ArtefactError: It is damaged. It is not passed over: what it vouches for is made anew only if people say so.
    """
    path = marker_path(folder, stage)
    if not path.exists():
        return None
    try:
        marker, seen = read_json(path), "JSON that is no stage's"
    except ArtefactError as error:
        if isinstance(error.__cause__, OSError):  # that it cannot be read says nothing of what is in it
            raise
        marker, seen = {}, str(error.seen)
    needed = {"state": str, "key": str, "inputs": dict} | ({"result": dict} if marker.get("state") == "done" else {})
    if not all(isinstance(marker.get(name), kind) for name, kind in needed.items()):
        remedy = "delete it, and that part is done again"
        raise ArtefactError(f"'{path}' is damaged", seen=seen, expected="the record of a stage", remedy=remedy)
    return marker


def is_done(folder: Path, stage: Stage) -> bool:
    """Whether the stage was finished with these very inputs."""
    marker = read_marker(folder, stage)
    return marker is not None and marker["state"] == "done" and marker["key"] == stage.key


def refuse_other_settings(folder: Path, stages: list[Stage], remedy: str) -> None:
    """Refuse to touch work that was begun with other settings.

    Measurements are left out: they are made anew where they no longer fit. In `remedy`, `{stage}` becomes the name of
    the first stage that differs.

    Raises:
        ArtefactError: Names what differs in the first such stage, and what to do.
    """
    for stage in stages:
        marker = None if stage.kind == "evaluate" else read_marker(folder, stage)
        if marker is None or marker["key"] == stage.key:
            continue
        changes = dict(_differences(marker["inputs"], stage.inputs))
        name = next(iter(changes), "after")
        old, new = changes.get(name, ("another model or other trajectories", "these"))
        raise ArtefactError(
            f"'{folder}' holds the stage '{stage.name}' of other settings: " + (", ".join(changes) or name),
            seen=f"{name}: {old}",
            expected=f"{name}: {new}",
            remedy=remedy.format(stage=stage.name),
        )


def _differences(old: Any, new: Any, where: str = "") -> Iterator[tuple[str, tuple[Any, Any]]]:
    if isinstance(old, dict) and isinstance(new, dict):
        for key in [*new, *(key for key in old if key not in new)]:
            yield from _differences(old.get(key), new.get(key), f"{where}.{key}" if where else key)
    elif old != new:
        yield where, (old, new)


def perform(
    folder: Path, stage: Stage, work: Callable[[], dict[str, Any]], reporter: Reporter, *, seed: int | None = None
) -> dict[str, Any]:
    """Do a stage unless it is done; returns its result.

    Args:
        folder: Of the run.
        stage: What is to be done.
        work: Does it, going on where an earlier attempt stopped; what it returns is kept in the marker. Its entry
            `summary` is told to the reporter.
        reporter: Told about it.
        seed: For the provenance.

    With several processes the main one decides what is to be done and writes it down; the others do their share of
    collecting and training, and return what the main one does.
    """
    if not processes.is_main():
        done = processes.from_main(False)
        if not done and stage.kind != "evaluate":
            work()
        return processes.from_main({})
    processes.from_main(done := is_done(folder, stage))
    return processes.from_main(_perform(folder, stage, work, reporter, seed, done=done))


def _perform(
    folder: Path, stage: Stage, work: Callable[[], dict[str, Any]], reporter: Reporter, seed: int | None, *, done: bool
) -> dict[str, Any]:
    if done:
        marker = read_marker(folder, stage)
        assert marker is not None
        reporter.skip(stage.name, str(marker["result"].get("summary", "")))
        return dict(marker["result"])
    before = read_marker(folder, stage)
    if before is not None and before["key"] != stage.key:
        reporter.note(f"{stage.name} was done with other settings: it is done anew")
    record = {
        "stage": stage.name,
        "state": "begun",
        "key": stage.key,
        "inputs": stage.inputs,
        "provenance": provenance.collect(seed=seed, stage=stage.name),
    }
    write_json(marker_path(folder, stage), record)
    reporter.begin(stage.name, stage.title)
    started, spent = time.perf_counter(), time.process_time()
    result = work()
    taken = {"seconds": time.perf_counter() - started, "core_seconds": time.process_time() - spent}
    # A stage that counts for itself counts what earlier attempts took, too.
    result = {**{name: round(value, 2) for name, value in taken.items()}, **result}
    write_json(marker_path(folder, stage), {**record, "state": "done", "result": result})
    reporter.end(stage.name, str(result.get("summary", "")))
    return result
