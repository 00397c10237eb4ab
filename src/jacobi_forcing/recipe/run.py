"""A whole run: stage after stage in one folder, resumable at any point.

OUTPUT/recipe.yaml                    what is run
OUTPUT/stages/<stage>.json            markers, see `stages`
OUTPUT/round-R/trajectories/          Parquet shards and their manifest
OUTPUT/round-R/log.jsonl              losses
OUTPUT/round-R/probe.jsonl            tokens per forward and quality over steps, where asked for
OUTPUT/round-R/model/                 the model after round R
OUTPUT/model/                         the last of them: load it with AutoModelForCausalLM (mode full), or as a peft
                                      adapter of the base (mode adapter, or peft that is not merged)
OUTPUT/report.json, OUTPUT/table.md   what was gained
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import importlib.util
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from jacobi_forcing import processes, provenance
from jacobi_forcing.adapter_file import SETTINGS, WEIGHTS
from jacobi_forcing.bench.table import markdown
from jacobi_forcing.config import ModelConfig, RecipeConfig
from jacobi_forcing.errors import ArtefactError, ConfigError, MissingExtraError
from jacobi_forcing.files import link_folder, read_json, remove, write_json, write_text
from jacobi_forcing.formats import stamped
from jacobi_forcing.peft_models import needs_peft
from jacobi_forcing.recipe.collecting import collect_once, collect_trajectories, less_collecting
from jacobi_forcing.recipe.measuring import measure_model
from jacobi_forcing.recipe.reporter import Reporter
from jacobi_forcing.recipe.settings import round_noise, round_prompts, sweeps_blocks
from jacobi_forcing.recipe.stages import Stage, is_done, marker_path, perform, plan, read_marker, refuse_other_settings

_REMEDY = "use another --output, or --redo {stage} to keep what comes before it, or --fresh"
_OWN = ("recipe.yaml", "stages", "model", "report.json", "table.md")


def run_recipe(
    recipe: RecipeConfig,
    *,
    fresh: bool = False,
    redo: str | None = None,
    reporter: Reporter | None = None,
    pool: Path | None = None,
) -> dict[str, Any]:
    """Run every stage that is not done yet, then write model, report and table.

    Several processes share the work, see `processes`: all collect and train, the main one measures and writes.

    Args:
        recipe: The settings; `recipe.output` is the folder.
        fresh: Throw away what an earlier run left in the folder.
        redo: Name of a stage to do anew, with all that follows; what comes before it is kept.
        reporter: Told about progress.
        pool: Folder that several runs share: what they all collect from the base model is collected there, once.

    Returns:
        The report as it stands in `report.json`.

    Raises:
        ArtefactError: The folder holds a run of other settings or foreign files, or another process is at work in it.
        ConfigError: `redo` names no stage.
        JForceError: Whatever a stage raises.
    """
    # An extra that is missing is better known before hours of collecting than after.
    _ = adapter_trainer() if recipe.mode == "adapter" else trainer()
    if recipe.peft.method != "none":
        needs_peft()
    reporter = reporter or Reporter()
    folder = Path(recipe.output)
    stages = plan(recipe)
    with alone(folder):
        if processes.is_main():
            _prepare(recipe, folder, stages, fresh=fresh, redo=redo)
        for stage in stages:
            if processes.is_main():
                _check_artefacts(folder, stage, SETTINGS if leaves_adapter(recipe) else "config.json", reporter)
            work = functools.partial(_work, recipe, folder, stage, reporter, pool)
            perform(folder, stage, work, reporter, seed=recipe.seed)
        return processes.from_main(_finish(recipe, folder, stages) if processes.is_main() else {})


def _prepare(recipe: RecipeConfig, folder: Path, stages: list[Stage], *, fresh: bool, redo: str | None) -> None:
    """Make the folder ready, or refuse it."""
    refuse_foreign(folder)
    if fresh:
        _clear(folder)
    if redo is not None:
        names = [stage.name for stage in stages]
        if redo not in names:
            raise ConfigError(f"There is no stage '{redo}'", expected="one of " + ", ".join(names))
        _forget(folder, stages[names.index(redo) :])
    refuse_other_settings(folder, stages, _REMEDY)
    write_text(folder / "recipe.yaml", recipe.to_yaml())


def leaves_adapter(recipe: RecipeConfig) -> bool:
    """Whether the rounds leave folders of adapters and no whole models."""
    return recipe.mode == "adapter" or (recipe.peft.method != "none" and not recipe.peft.merge)


def trainer() -> Callable[..., dict[str, Any]]:
    """`train_model`, loaded only when it is needed: decoding does without the extra `train`.

    Raises:
        MissingExtraError: The extra is not installed.
    """
    importlib.import_module("jacobi_forcing.training")
    from jacobi_forcing.recipe.training import train_model

    return train_model


def adapter_trainer() -> Callable[..., dict[str, Any]]:
    """`train_adapter`, see `trainer`."""
    importlib.import_module("jacobi_forcing.training")
    if importlib.util.find_spec("peft") is None:
        raise MissingExtraError("peft", "train")
    from jacobi_forcing.recipe.adapter_training import train_adapter

    return train_adapter


def _work(recipe: RecipeConfig, folder: Path, stage: Stage, reporter: Reporter, pool: Path | None) -> dict[str, Any]:
    """Do one stage."""
    if stage.kind == "evaluate":
        assert recipe.evaluation is not None
        label = "base"
        if stage.round:
            label = f"{'adapter, ' if recipe.mode == 'adapter' else ''}round {stage.round}"
        return measure_model(_model(recipe, folder, stage.round), recipe.evaluation, label=label, reporter=reporter)
    model, apart = _model(recipe, folder, stage.round - 1), recipe.mode == "adapter"
    settings, place = recipe.rounds[stage.round - 1], folder / f"round-{stage.round}"
    if stage.kind == "collect":
        collecting = functools.partial(
            collect_trajectories,
            recipe.model if apart else model,
            round_prompts(recipe, stage.round - 1),
            recipe.collect,
            block_size=settings.block_size,
            states=sweeps_blocks(recipe, settings),
            needed=round_noise(settings),
        )
        if pool is not None and "after" not in stage.inputs:
            return collect_once(pool, stage, collecting, place / "trajectories", reporter)
        return collecting(folder=place / "trajectories", reporter=reporter)
    if apart:
        return adapter_trainer()(
            model,
            place / "trajectories",
            settings,
            recipe.adapter,
            place,
            seed=recipe.seed,
            reporter=reporter,
            evaluation=recipe.evaluation,
        )
    return trainer()(
        model,
        place / "trajectories",
        less_collecting(settings, folder / "stages" / f"collect-{stage.round}.json"),
        place,
        seed=recipe.seed,
        reporter=reporter,
        evaluation=recipe.evaluation,
        peft=recipe.peft,
    )


def _model(recipe: RecipeConfig, folder: Path, number: int) -> ModelConfig:
    """The model as it stands after round `number`; always read from disk, so that a restart sees the same weights."""
    if number == 0:
        return recipe.model
    if recipe.mode == "adapter":
        return dataclasses.replace(recipe.model, adapter=str(folder.absolute() / f"round-{number}" / "model"))
    return dataclasses.replace(recipe.model, name=str(folder.absolute() / f"round-{number}" / "model"))


def _finish(recipe: RecipeConfig, folder: Path, stages: list[Stage]) -> dict[str, Any]:
    """Put the last model in its place and write down what was gained."""
    last = [stage for stage in stages if stage.kind == "train"][-1]
    source, target = folder / f"round-{last.round}" / "model", folder / "model"
    weights = WEIGHTS if leaves_adapter(recipe) else "model.safetensors"
    if not _same_file(source / weights, target / weights):
        link_folder(source, target)
    markers = {stage.name: read_marker(folder, stage) for stage in stages}
    results = {name: marker["result"] for name, marker in markers.items() if marker is not None}
    measured = [results[stage.name] for stage in stages if stage.kind == "evaluate"]
    values = {
        "model": "model",
        "models": measured,
        "stages": {name: result for name, result in results.items() if not name.startswith("evaluate")},
        "seconds": round(sum(result["seconds"] for result in results.values()), 1),
        "recipe": recipe.to_dict(),
        "provenance": provenance.collect(seed=recipe.seed),
    }
    report = stamped("run", values)
    if (folder / "report.json").exists():
        before = read_json(folder / "report.json")
        if {**before, "provenance": None} == {**report, "provenance": None}:
            return before
    write_text(
        folder / "table.md", markdown(measured) if measured else "Nothing was measured: the recipe has no evaluation.\n"
    )
    write_json(folder / "report.json", report)
    return report


def _same_file(one: Path, other: Path) -> bool:
    return one.exists() and other.exists() and one.samefile(other)


def _check_artefacts(folder: Path, stage: Stage, settings: str, reporter: Reporter) -> None:
    """A marker without what it vouches for counts for nothing."""
    needed = {"collect": "trajectories/manifest.json", "train": f"model/{settings}"}.get(stage.kind)
    if needed and is_done(folder, stage) and not (folder / f"round-{stage.round}" / needed).is_file():
        reporter.note(f"{stage.name} was done, but round-{stage.round}/{needed} is missing: it is done again")
        remove(marker_path(folder, stage))


def _forget(folder: Path, stages: list[Stage]) -> None:
    """Throw away some stages and what they made."""
    made = {"collect": ("trajectories",), "train": ("checkpoints", "model", "log.jsonl", "probe.jsonl"), "evaluate": ()}
    for stage in stages:
        remove(marker_path(folder, stage))
        for name in made[stage.kind]:
            remove(folder / f"round-{stage.round}" / name)


def _clear(folder: Path) -> None:
    """Throw away what a run makes, and nothing else that may lie in the folder."""
    for path in [*(folder / name for name in _OWN), *folder.glob("round-*")]:
        remove(path)


def refuse_foreign(folder: Path) -> None:
    """Never write over a folder that looks like a run and is none."""
    if (folder / "stages").is_dir():
        return
    foreign = [path.name for path in [*(folder / name for name in _OWN), *folder.glob("round-*")] if path.exists()]
    if foreign:
        raise ArtefactError(
            f"'{folder}' holds files that are not of a run", seen=", ".join(foreign), remedy="use another --output"
        )


@contextlib.contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Hold the folder against a second run of the same recipe; the system lets go when the process ends, however.

    The main process does so for all that share the work.
    """
    if not processes.is_main():
        yield
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = (folder / ".lock").open("w")
    except OSError as error:
        raise ArtefactError(
            f"Cannot use the folder '{folder}'", seen=error.strerror, remedy="use another --output"
        ) from error
    with lock:
        try:
            import fcntl

            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except ImportError:  # Windows has no such lock
            pass
        except OSError as error:
            raise ArtefactError(
                f"Another run is at work in '{folder}'", remedy="wait for it, or use another --output"
            ) from error
        yield
