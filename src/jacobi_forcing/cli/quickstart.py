"""`jforce quickstart`: the whole loop on the embedded base model, in minutes on a CPU."""

from __future__ import annotations

import shlex
from pathlib import Path

from jacobi_forcing.cli import options
from jacobi_forcing.cli.console import note, print_json, print_text
from jacobi_forcing.cli.run import Fresh, Output, Overrides, Redo, note_places, run_and_show
from jacobi_forcing.config import DecodeConfig, EvaluationConfig, ModelConfig, RecipeConfig


def quickstart(
    overrides: Overrides = None,
    output: Output = None,
    fresh: Fresh = False,
    redo: Redo = None,
    json: options.Json = False,
) -> None:
    """Train the embedded base model to decode in parallel, and show what it gained and what it lost.

    A second call goes on where the first was stopped, or shows its result again.
    """
    settings, report = run_and_show("quickstart", overrides, output, fresh=fresh, redo=redo, to_stderr=json)
    folder = Path(settings.output) / "model"
    sample = _show_sample(settings, folder, to_stderr=json) if settings.evaluation is not None else None
    note_places(settings)
    if sample is not None:
        note("Next:")
        for command in _next(folder, sample):
            print_text(f"  {command}", to_stderr=True)
    if json:
        print_json({**report, "output": settings.output})


def _show_sample(settings: RecipeConfig, folder: Path, *, to_stderr: bool) -> str:
    """Decode one held-out problem with the trained model, sweep by sweep; returns the problem."""
    from jacobi_forcing.cli.answers import answer, describe
    from jacobi_forcing.loading import load
    from jacobi_forcing.trajectories.prompts import load_prompts

    evaluation = settings.evaluation
    assert evaluation is not None
    loaded = load(ModelConfig(str(folder), settings.model.dtype, settings.model.device))
    prompt = load_prompts(evaluation.prompts, loaded.tokenizer)[0]
    print_text(f"\n{prompt.text}", to_stderr=to_stderr)
    result = answer(loaded, prompt.ids, best_decoder(evaluation), evaluation.max_new_tokens, show_sweeps=True)
    print_text(result["text"].strip(), to_stderr=to_stderr)
    note(describe(result))
    return prompt.text


def best_decoder(evaluation: EvaluationConfig) -> DecodeConfig:
    """The first parallel decoder that a recipe measures."""
    return next((config for config in evaluation.decode if config.decoder != "ar"), DecodeConfig())


def _next(folder: Path, sample: str) -> list[str]:
    """Commands to go on with."""
    return [
        f"jforce generate --model {shlex.quote(str(folder))} --show-sweeps {_quoted(sample)}",
        f"jforce bench --model builtin:word-problems --compare {shlex.quote(str(folder))}",
        "jforce run recipes/smollm2-135m-gsm8k.yaml --set model.name=FOLDER --set prompts.source=FILE.jsonl",
    ]


def _quoted(text: str) -> str:
    """Quoted for bash and zsh; a newline stays on the line as an escape."""
    if "\n" not in text:
        return shlex.quote(text)
    escaped = text.replace("\\", "\\\\").replace("'", "\\'").replace("\n", "\\n")
    return f"$'{escaped}'"
