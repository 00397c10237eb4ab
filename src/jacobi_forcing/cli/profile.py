"""`jforce profile`: what parallel tokens cost on this device."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from jacobi_forcing import provenance
from jacobi_forcing.cli import options
from jacobi_forcing.cli.console import note, print_report, print_table, print_text
from jacobi_forcing.config import ModelConfig
from jacobi_forcing.embedded import BUILTIN
from jacobi_forcing.files import write_json
from jacobi_forcing.formats import stamped

TOKENS, CONTEXTS = "1, 2, 4, … 256", "64, 256, 1024"
Tokens = Annotated[
    list[int] | None,
    typer.Option("--tokens", "-n", min=1, help="Parallel tokens of a forward. Repeatable.", show_default=TOKENS),
]
Contexts = Annotated[
    list[int] | None,
    typer.Option("--context", min=1, help="Tokens of context before them. Repeatable.", show_default=CONTEXTS),
]
BatchSize = Annotated[int, typer.Option("--batch-size", "-b", min=1, help="Rows side by side.")]
Tolerance = Annotated[
    float, typer.Option(min=0, help="Excess over the latency of one token that still counts as flat, a share.")
]
Repeats = Annotated[int, typer.Option(min=1, help="Timed forwards of each kind; the median counts.")]
Output = Annotated[Path | None, typer.Option("--output", "-o", help="Write the figures to this JSON file too.")]
Figure = Annotated[Path | None, typer.Option(help="Draw them into this .png or .svg file.")]

LEGEND = (
    "latency: median of a forward, quartiles beside it. cost(n)/cost(1): what a decoder's TPF has to exceed to pay. "
    "bandwidth, arithmetic: share of what this device did at best, in reading as many bytes as the model has, in "
    "multiplying square matrices, or in a forward. Where both are small neither limits: the time goes into what "
    "surrounds the products."
)
NOISY = 0.5
"""Distance of quartiles over the median from which on a warning is given."""


def profile(
    model: options.Model = BUILTIN,
    adapter: options.Adapter = ModelConfig.adapter,
    tokens: Tokens = None,
    context: Contexts = None,
    batch_size: BatchSize = 1,
    tolerance: Tolerance = 0.2,
    repeats: Repeats = 15,
    dtype: options.DType = ModelConfig.dtype,
    device: options.Device = ModelConfig.device,
    pack_weights: options.PackWeights = ModelConfig.pack_weights,
    trust_remote_code: options.TrustRemoteCode = ModelConfig.trust_remote_code,
    output: Output = None,
    figure: Figure = None,
    json: options.Json = False,
) -> None:
    """Measure what parallel tokens cost on this device: latency over tokens, knee, roofline, and settings that fit.

    With --adapter half of a forward's tokens go through the adapter, as in decoding. Where standard output is no
    terminal, its last line is a JSON object with all figures; with --json it is the only one.
    """
    given = dict(locals())
    settings = options.settings(ModelConfig, given, name=model)
    if figure is not None:
        from jacobi_forcing.viz.canvas import check_figure

        check_figure(figure)
    report = stamped("profile", {**_measure(settings, given), "provenance": provenance.collect()})
    _show(report, to_stderr=json)
    if output is not None:
        write_json(output, report)
    if figure is not None:
        from jacobi_forcing.viz.figures_profile import draw_profile

        draw_profile(report, figure)
        note(f"figure: {figure}")
    print_report(report, json=json)


def _measure(settings: ModelConfig, given: Mapping[str, Any]) -> dict[str, Any]:
    from jacobi_forcing.bench import profile as bench
    from jacobi_forcing.cli.bars import Bars
    from jacobi_forcing.loading import load

    name = provenance.portable(settings.name)
    with Bars() as bars:
        bars.begin("profile", f"Time forwards of {settings.name}")
        result = bench.profile(
            load(settings),
            tokens=given["tokens"] or bench.TOKENS,
            contexts=given["context"] or bench.CONTEXTS,
            batch_size=given["batch_size"],
            tolerance=given["tolerance"],
            repeats=given["repeats"],
            label=options.label(settings),
            on_progress=lambda done, total: bars.progress(done, total, "rounds"),
        )
        bars.end("profile", f"{len(result['contexts'])} contexts, {result['repeats']} rounds")
    return {**result, "model": name}


def _show(report: Mapping[str, Any], *, to_stderr: bool) -> None:
    heads = ("context", "tokens", "latency, ms", "quartiles, ms", "cost(n)/cost(1)", "bandwidth", "arithmetic")
    rows = [
        (
            str(entry["context"]),
            str(point["tokens"]),
            f"{1000 * point['seconds']:.2f}",
            f"{1000 * point['low']:.2f}–{1000 * point['high']:.2f}",
            f"{point['ratio']:.2f}",
            f"{100 * point['bandwidth_share']:.1f} %",
            f"{100 * point['compute_share']:.1f} %",
        )
        for entry in report["contexts"]
        for point in entry["points"]
    ]
    print_table(heads, rows, to_stderr=to_stderr)
    for text in _sentences(report):
        print_text(text, to_stderr=to_stderr)
    if _spread(report) > NOISY:
        note(
            f"The quartiles lie up to {100 * _spread(report):.0f} % of the median apart: this machine is busy, and the "
            "knee is not to be trusted. Measure again when it is quiet, or raise --repeats."
        )
    note(LEGEND)


def _sentences(report: Mapping[str, Any]) -> list[str]:
    limits, tolerance = report["limits"], f"{100 * report['tolerance']:.0f} %"
    said = [
        f"{report['device_name']}: reads {limits['bytes_per_second'] / 1e9:.1f} GB/s, "
        f"computes {limits['flops_per_second'] / 1e9:.1f} GFLOP/s in {report['dtype']}."
    ]
    for entry in report["contexts"]:
        fitted, ridge = entry["knee"]["fitted"], entry["ridge"] or "more than 65535"
        said.append(
            f"context {entry['context']}: knee at {entry['knee']['tokens']} tokens (within {tolerance} of one token's "
            f"latency); fitted bend at {fitted['tokens']:.1f}, {1000 * fitted['flat']:.2f} ms before it, "
            f"{1e6 * fitted['slope']:.1f} µs a token behind it (off by {100 * fitted['error']:.0f} %); "
            f"the roofline turns at {ridge} tokens."
        )
    settings = "; ".join(_setting(setting) for setting in report["recommended"]["settings"])
    if not settings:
        said.append(
            "no sweep of a useful size keeps within the knee: every parallel token costs here, and a decoder pays only "
            "where its TPF exceeds cost(n)/cost(1). Whether one does: jforce tune."
        )
        return said
    said.append(
        f"settings with sweeps of at most {report['recommended']['tokens']} tokens: {settings}. "
        "Which is fastest depends on how many guesses are right: jforce tune."
    )
    return said


def _spread(report: Mapping[str, Any]) -> float:
    """Widest distance of quartiles, over the median."""
    points = [point for entry in report["contexts"] for point in entry["points"]]
    return max((float(point["high"]) - float(point["low"])) / float(point["seconds"]) for point in points)


def _setting(setting: Mapping[str, Any]) -> str:
    more = f", {setting['candidates']} candidates" if "candidates" in setting else ""
    return f"{setting['decoder']} n={setting['block_size']}{more}"
