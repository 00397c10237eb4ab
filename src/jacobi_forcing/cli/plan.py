"""`jforce plan`: what a recipe will cost, before it starts."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from jacobi_forcing.cli import options
from jacobi_forcing.cli.console import note, print_json, print_table, print_text
from jacobi_forcing.cli.run import Overrides

Measure = Annotated[
    bool,
    typer.Option("--measure/--no-measure", help="Time a few prompts and steps here, or reckon from the config alone."),
]
Tflops = Annotated[float, typer.Option(min=0, help="--no-measure: what the device sustains in training, 1e12/s.")]
Bandwidth = Annotated[float, typer.Option(min=0, help="--no-measure: what it sustains in reading weights, GB/s.")]
Tpf = Annotated[float, typer.Option(help="Tokens per forward expected of the trained model, for the break-even.")]
Speedup = Annotated[
    float | None, typer.Option(help="Speed-up in wall time expected instead.", show_default="--tpf / cost of a forward")
]
Budget = Annotated[float, typer.Option("--seconds", help="How long each kind of measurement may take, about.")]


def plan(
    recipe: Annotated[str, typer.Argument(help="Recipe file, or the name of one that ships with the package.")],
    overrides: Overrides = None,
    measure: Measure = True,
    tflops: Tflops = 300.0,
    bandwidth: Bandwidth = 2000.0,
    tpf: Tpf = 3.0,
    speedup: Speedup = None,
    seconds: Budget = 60.0,
    json: options.Json = False,
) -> None:
    """Estimate memory, time and disk of every stage of a recipe, and how many tokens pay for the training.

    Nothing is written. A few real prompts and steps are timed on this machine; with --no-measure a model's config
    is enough, and the machine is what --tflops and --bandwidth say.
    """
    from jacobi_forcing.cli.bars import Bars
    from jacobi_forcing.errors import ConfigError
    from jacobi_forcing.recipe import load_recipe
    from jacobi_forcing.recipe.planning import Hardware, estimate_recipe

    if tflops <= 0 or bandwidth <= 0:
        raise ConfigError(
            "The speed of the device is out of range", seen=f"{tflops:g}, {bandwidth:g}", expected="above 0"
        )
    settings = load_recipe(recipe, overrides or [])
    with Bars() as bars:
        found = estimate_recipe(
            settings,
            measure=measure,
            hardware=Hardware(tflops, bandwidth),
            tpf=tpf,
            speedup=speedup,
            budget=seconds,
            reporter=bars,
        )
    _show(found, to_stderr=json)
    if json:
        print_json(found)


def _show(found: dict[str, Any], *, to_stderr: bool) -> None:
    hours = "device-hours" if found["device"] == "cpu" else "GPU-hours"
    columns = ("stage", "what", "time", hours, "memory", "disk", "disk at work")
    rows = [(stage["stage"], stage["detail"], *_figures(stage)) for stage in found["stages"]]
    rows.append(("total", "", *_figures(found["total"])))
    print_table(columns, rows, to_stderr=to_stderr)
    even = found["break_even"]
    tokens = "never" if even["tokens"] is None else f"{even['tokens']:,} generated tokens"
    print_text(f"\nPays after: {tokens} = {even['formula']}", to_stderr=to_stderr)
    for text in found["assumptions"]:
        note(f"Assumed: {text}")
    note("Memory is the peak of a stage; disk at work counts checkpoints. Break-even: one answer at a time, here.")


def _figures(stage: dict[str, Any]) -> tuple[str, ...]:
    return (
        duration(stage["seconds"]),
        f"{stage['device_hours']:.2g}",
        *(size(stage[name]) for name in ("memory_bytes", "disk_bytes", "disk_peak_bytes")),
    )


def duration(seconds: float) -> str:
    """A time for people."""
    for unit, name in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= 2 * unit:
            return f"{seconds / unit:.1f} {name}"
    return f"{seconds:.0f} s"


def size(count: float) -> str:
    """A number of bytes for people, powers of 1000."""
    for unit, name in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if count >= unit:
            return f"{count / unit:.1f} {name}"
    return f"{count:.0f} B"
