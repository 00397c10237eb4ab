"""A grid from begin to end, resumable at any point.

OUTPUT/grid.yaml                       what is run
OUTPUT/collected/<key>/                what several runs collect from the base model, once
OUTPUT/base/stages/count.json          figures of the base model
OUTPUT/runs/<variant>/seed-<s>/        one run, a folder as `jforce run` makes it, and stages/count.json
OUTPUT/ablation.json, OUTPUT/table.md  the table, renewed after every run
"""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path
from typing import Any

from jacobi_forcing import processes, provenance
from jacobi_forcing.ablate.count import count_model
from jacobi_forcing.ablate.grid import GridConfig
from jacobi_forcing.ablate.table import markdown, summarise
from jacobi_forcing.config import RecipeConfig
from jacobi_forcing.errors import ArtefactError, ConfigError
from jacobi_forcing.files import read_json, remove, write_json, write_text
from jacobi_forcing.formats import stamped
from jacobi_forcing.recipe import Reporter, run_recipe
from jacobi_forcing.recipe.run import alone
from jacobi_forcing.recipe.stages import Stage, model_inputs, perform, plan, prompts_inputs

_OWN = ("grid.yaml", "collected", "base", "runs", "ablation.json", "table.md")


def run_grid(
    grid: GridConfig, recipe: dict[str, Any], *, fresh: bool = False, reporter: Reporter | None = None
) -> dict[str, Any]:
    """Run every variant with every seed, but those that are done, and write one table.

    All variants with the first seed come first, then all with the next: a table of an unfinished grid is fair too.
    What a run trains is decided by its own keys; what it is measured on is the base recipe's evaluation, counted and
    not timed, see `count_model`.

    Args:
        grid: The grid; `grid.output` is its folder.
        recipe: What stands in its base recipe.
        fresh: Throw away what an earlier call left in the folder.
        reporter: Told about progress.

    Returns:
        The report as it stands in `ablation.json`.

    Raises:
        ArtefactError: The folder holds runs of other settings or foreign files, or another process is at work in it.
        ConfigError: There are several processes.
        JForceError: Whatever a stage raises.
    """
    if processes.count() > 1:
        raise ConfigError(
            "A grid is run by one process", seen=f"{processes.count()} of them", remedy="leave out torchrun"
        )
    reporter, folder = reporter or Reporter(), Path(grid.output)
    with alone(folder):
        _refuse_foreign(folder)
        if fresh:
            for name in _OWN:
                remove(folder / name)
        write_text(folder / "grid.yaml", grid.to_yaml())
        (folder / "runs").mkdir(exist_ok=True)
        first = next(iter(grid.recipes(recipe, grid.seeds[0]).values()))
        base = _counted(folder / "base", first, {"model": model_inputs(first.model)}, grid, Named(reporter, "base"))
        runs: list[dict[str, Any]] = []
        recipes = [(name, seed, own) for seed in grid.seeds for name, own in grid.recipes(recipe, seed).items()]
        report: dict[str, Any] = {}
        for place, (name, seed, own) in enumerate(recipes, 1):
            told = Named(reporter, f"{place} of {len(recipes)}, {name}, seed {seed}")
            runs.append({"variant": name, "seed": seed, **_run(grid, own, folder / "collected", told)})
            report = _write(grid, recipe, folder, base, runs)
        return report


def _run(grid: GridConfig, recipe: RecipeConfig, pool: Path, reporter: Reporter) -> dict[str, Any]:
    """One run, trained and counted."""
    folder = Path(recipe.output)
    trained = dataclasses.replace(recipe, evaluation=None)
    stages = run_recipe(trained, reporter=reporter, pool=pool)["stages"]
    training = [result for name, result in stages.items() if name.startswith("train")]
    collecting = [result for name, result in stages.items() if name.startswith("collect")]
    counted = _counted(folder, recipe, {"after": plan(trained)[-1].key}, grid, reporter)
    return {
        **counted,
        "steps": sum(result["steps"] for result in training),
        "train_tokens": sum(result["train_tokens"] for result in training),
        "collect_core_seconds": round(sum(result["core_seconds"] for result in collecting), 1),
        "train_core_seconds": round(sum(result["core_seconds"] for result in training), 1),
        "collected": sum(result["trajectories"] for result in collecting),
    }


def _counted(
    folder: Path, recipe: RecipeConfig, of: dict[str, Any], grid: GridConfig, reporter: Reporter
) -> dict[str, Any]:
    """Figures of the base model, or of what a run has trained; kept in a marker of the folder."""
    settings = recipe.evaluation
    assert settings is not None
    inputs = {
        **of,
        "prompts": prompts_inputs(settings.prompts),
        "decoders": [config.to_dict() for config in settings.decode],
        **{name: getattr(settings, name) for name in ("task", "max_new_tokens")},
        "tpf_prompts": grid.tpf_prompts,
    }
    number = 0 if "model" in of else len(recipe.rounds)
    stage = Stage("count", "evaluate", number, inputs)
    model = recipe.model
    if number:
        made = str(folder.absolute() / "model")
        if recipe.mode == "adapter":
            model = dataclasses.replace(model, adapter=made)
        else:
            model = dataclasses.replace(model, name=made)
    work = functools.partial(count_model, model, settings, tpf_prompts=grid.tpf_prompts, reporter=reporter)
    result = perform(folder, stage, work, reporter, seed=recipe.seed)
    return {name: result[name] for name in ("decoders", "quality")}


def _write(
    grid: GridConfig, recipe: dict[str, Any], folder: Path, base: dict[str, Any], runs: list[dict[str, Any]]
) -> dict[str, Any]:
    values = {
        "base": base,
        "variants": summarise(list(grid.variants), runs),
        "runs": runs,
        "unfinished": len(grid.variants) * len(grid.seeds) - len(runs),
        "grid": grid.to_dict(),
        "recipe": recipe,
        "provenance": provenance.collect(seed=None),
    }
    report = stamped("ablation", values)
    path = folder / "ablation.json"
    if path.exists():
        before = read_json(path)
        if {**before, "provenance": None} == {**report, "provenance": None}:
            return before
        if before["grid"] == report["grid"] and before["unfinished"] < report["unfinished"]:
            return report  # a second call goes through runs that are done: the table of all of them stays
    write_text(folder / "table.md", markdown(report))
    write_json(path, report)
    return report


def _refuse_foreign(folder: Path) -> None:
    """Never write over a folder that is no grid's."""
    foreign = [name for name in (*_OWN, "stages", "recipe.yaml") if (folder / name).exists()]
    if foreign and not (folder / "grid.yaml").is_file():
        raise ArtefactError(
            f"'{folder}' holds files that are not of a grid", seen=", ".join(foreign), remedy="use another --output"
        )


class Named(Reporter):
    """Says with every stage which run it belongs to."""

    def __init__(self, reporter: Reporter, name: str) -> None:
        self._reporter, self._name = reporter, name
        self.progress, self.note = reporter.progress, reporter.note  # type: ignore[method-assign]  # passed through

    def begin(self, stage: str, title: str) -> None:
        """Pass on."""
        self._reporter.begin(stage, f"{self._name}: {title}")

    def end(self, stage: str, summary: str) -> None:
        """Pass on."""
        self._reporter.end(f"{self._name}: {stage}", summary)

    def skip(self, stage: str, summary: str) -> None:
        """Pass on."""
        self._reporter.skip(f"{self._name}: {stage}", summary)
