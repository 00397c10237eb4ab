"""`jforce quickstart`: the whole loop on the embedded base model, in minutes on a CPU."""

from __future__ import annotations

import dataclasses
import shlex
from pathlib import Path
from typing import Annotated, Any

import typer

from jacobi_forcing.cli import options
from jacobi_forcing.cli.console import note, print_json, print_text
from jacobi_forcing.cli.run import Fresh, Output, Overrides, Redo, note_places, run_quietly
from jacobi_forcing.cli.together import Call, train_together
from jacobi_forcing.config import DecodeConfig, EvaluationConfig, RecipeConfig
from jacobi_forcing.errors import ConfigError

_RECIPES = {"full": "quickstart", "adapter": "quickstart-adapter"}
_CHOICE = {
    "full": "new weights (round 2): one model that plain transformers loads, and the fewest slots a sweep, for devices "
    "on which slots cost. Its text is its own: choose it if the solve rate is good enough for you.",
    "adapter": "the base and a drafting adapter beside it: the base's text, token for token. Choose it where the text "
    "must not change, or if you do not want to measure quality. More in docs/adapter.md.",
}
Mode = Annotated[str, typer.Option(help="What to train: full (new weights), adapter (beside the old ones), or both.")]


def quickstart(
    mode: Mode = "both",
    overrides: Overrides = None,
    output: Output = None,
    fresh: Fresh = False,
    redo: Redo = None,
    json: options.Json = False,
) -> None:
    """Train the embedded base model to decode in parallel, and show what it gained and what it lost.

    A second call goes on where the first was stopped, or shows its result again. With --mode both, the default, the
    table has new weights and the adapter side by side; the adapter goes to a folder of its own, and --set is for both
    recipes. Both are trained at the same time where there are two cores.
    """
    runs = _run(mode, overrides or [], output, fresh, redo)
    models = [model for _, report in runs.values() for model in report["models"]]
    if models:
        from jacobi_forcing.cli.tables import show_models

        show_models(models, to_stderr=json)
    if len(runs) > 1 and models:
        note("Which to choose:")
        for name, text in _CHOICE.items():
            note(f"  {name}: {text}")
    settings, report = next(iter(runs.values()))
    sample = _show_sample(settings, to_stderr=json) if settings.evaluation is not None else None
    for own, _ in runs.values():
        note_places(own)
    if sample is not None:
        note("Next:")
        for command in _next(runs, sample):
            print_text(f"  {command}", to_stderr=True)
    if json:
        others = {name: {**other, "output": own.output} for name, (own, other) in list(runs.items())[1:]}
        print_json({**report, "output": settings.output, **others})


def _run(
    mode: str, overrides: list[str], output: Path | None, fresh: bool, redo: str | None
) -> dict[str, tuple[RecipeConfig, dict[str, Any]]]:
    """Run one recipe or both; the base is measured once."""
    if mode not in (*_RECIPES, "both"):
        raise ConfigError("There is no such mode", seen=mode, expected="full, adapter or both")
    runs: dict[str, tuple[RecipeConfig, dict[str, Any]]] = {}
    if mode == "both" and any(text.partition("=")[0].strip() == "output" for text in overrides):
        raise ConfigError(
            "Two modes cannot share a folder", seen="--set output=…", remedy="use --output, or one --mode"
        )
    beside = None if output is None else _beside(output)
    places = {"full": output, "adapter": beside if mode == "both" else output}
    names = list(_RECIPES) if mode == "both" else [mode]
    if mode == "both" and redo is None:
        calls = {name: Call(_RECIPES[name], overrides, places[name]) for name in names}
        # Measured afterwards, one by one: clocks want a quiet machine.
        fresh = not train_together(calls, fresh=fresh) and fresh
    for name in names:
        own = [*overrides, "evaluation.base=false"] if runs and runs["full"][0].evaluation is not None else overrides
        runs[name] = run_quietly(_RECIPES[name], own, places[name], fresh=fresh, redo=redo)
    return runs


def _beside(output: Path) -> Path:
    """The adapter's folder, beside that of the new weights."""
    named = output if output.name not in ("", "..") else output.resolve()
    if not named.name:
        raise ConfigError("This folder cannot hold a run", seen=str(output), remedy="use another --output")
    return named.with_name(named.name + "-adapter")


def _show_sample(settings: RecipeConfig, *, to_stderr: bool) -> str:
    """Decode one held-out problem with the trained model, sweep by sweep; returns the problem."""
    from jacobi_forcing.cli.answers import answer, describe
    from jacobi_forcing.loading import load
    from jacobi_forcing.trajectories.prompts import load_prompts

    evaluation = settings.evaluation
    assert evaluation is not None
    folder = str(Path(settings.output) / "model")
    if settings.mode == "adapter":
        loaded = load(dataclasses.replace(settings.model, adapter=folder))
    else:
        loaded = load(dataclasses.replace(settings.model, name=folder))
    prompt = load_prompts(evaluation.prompts, loaded.tokenizer)[0]
    print_text(f"\n{prompt.text}", to_stderr=to_stderr)
    result = answer(loaded, prompt.ids, best_decoder(evaluation), evaluation.max_new_tokens, show_sweeps=True)
    print_text(result["text"].strip(), to_stderr=to_stderr)
    note(describe(result))
    return prompt.text


def best_decoder(evaluation: EvaluationConfig) -> DecodeConfig:
    """The first parallel decoder that a recipe measures."""
    return next((config for config in evaluation.decode if config.decoder != "ar"), DecodeConfig())


def _next(runs: dict[str, tuple[RecipeConfig, dict[str, Any]]], sample: str) -> list[str]:
    """Commands to go on with."""
    uses = {"full": "--model {}", "adapter": "--model builtin:word-problems --adapter {}"}
    measures = {"full": "--compare {}", "adapter": "--adapter {}"}
    folders = {name: shlex.quote(str(Path(own.output) / "model")) for name, (own, _) in runs.items()}
    first = next(iter(runs))
    others = " ".join(measures[name].format(folder) for name, folder in folders.items())
    return [
        f"jforce generate {uses[first].format(folders[first])} --show-sweeps {_quoted(sample)}",
        f"jforce bench --model builtin:word-problems --subset regular {others}",
        "jforce run recipes/smollm2-135m-gsm8k.yaml --set model.name=FOLDER --set prompts.source=FILE.jsonl",
    ]


def _quoted(text: str) -> str:
    """Quoted for bash and zsh; a newline stays on the line as an escape."""
    if "\n" not in text:
        return shlex.quote(text)
    escaped = text.replace("\\", "\\\\").replace("'", "\\'").replace("\n", "\\n")
    return f"$'{escaped}'"
