"""What a report tells, part by part: tables, sentences, figures. What was not measured is named, nothing is made up."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from jacobi_forcing.bench.details import details, overhead
from jacobi_forcing.bench.table import LEGEND, columns, graded_parts, notes, rows
from jacobi_forcing.viz import figures
from jacobi_forcing.viz.canvas import processor
from jacobi_forcing.viz.gather import Found
from jacobi_forcing.viz.others import other_sections
from jacobi_forcing.viz.parts import Block, Items, Section, Table, Text
from jacobi_forcing.viz.payback import drafting, expected, name_of, payback, verdict
from jacobi_forcing.viz.style import Figure

Form = Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class Report:
    """All parts of a report.

    Attributes:
        verdicts: One sentence for each model: whether a speed-up is to be expected, and why.
        sections: What there is.
        missing: What there is not, and how to get it.
    """

    verdicts: list[str]
    sections: list[Section]
    missing: list[str]


def build(found: Found) -> Report:
    """Everything that can be told of what was found."""
    models = [*found.models, *found.benches]
    parts: list[tuple[Section, str]] = [
        (_table(found), "Decoders were not measured: `jforce run` with an `evaluation`, or `jforce bench --output`."),
        (_block_sizes(models), "No decoder with a block size was measured."),
        (_drafts(models), "Nothing is known of accepted lengths and guesses: no decoder of ours was measured."),
        (_latencies(found), "Latencies of requests were not measured: `jforce bench --output`."),
        (_losses(found), "There are no logs of a training."),
        (_probes(found), "TPF and quality over steps were not probed: `evaluation.probe_steps` in the recipe."),
        (_payback(found), "What the training cost is not known: there is no report of a run."),
    ]
    given, lacking = other_sections(found)
    kept = [section for section, _ in parts if section.blocks]
    missing = [said for section, said in parts if not section.blocks]
    return Report([verdict(model) for model in models], [*kept, *given, _origin(found)], [*missing, *lacking])


def _table(found: Found) -> Section:
    blocks: list[Block] = []
    if found.models:
        blocks += [Table(columns(found.models), rows(found.models)), Items(notes(found.models))]
    for name, value in found.of("bench"):
        models = value["models"]
        prompts = value["prompts"]
        blocks += [
            Text(
                f"{name}: {models[0]['prompts']} prompts of {prompts['source']}, at most "
                f"{models[0]['max_new_tokens']} new tokens, {_where(models[0])}."
            ),
            Table(columns(models), rows(models)),
            Items(notes(models)),
        ]
    return Section("Before and after" if found.models else "Decoders", [*blocks, Text(LEGEND)] if blocks else [])


def _where(model: Form) -> str:
    return f"{model['dtype']} on {model['device']}{processor(model)}"


def _block_sizes(models: Sequence[Form]) -> Section:
    shown = [
        figures.over_block_size(
            models, "tokens_per_forward", "tpf", "Tokens per forward over block size", "tokens per forward (TPF)"
        ),
        figures.over_block_size(models, "speedup", "speedup", "Speed-up over block size", "TPS over that of ar (×)"),
    ]
    return Section("Block size", [*_drawn(shown), *([Text(quality_line(models))] if any(shown) else [])])


def quality_line(models: Sequence[Form]) -> str:
    """What the answers of each model are worth, to stand beside any speed."""
    said = []
    for model in models:
        quality = model.get("quality") or model["decoders"][0]["quality"]
        solved, interval = quality["solve_rate"], quality.get("solve_rate_interval")
        share = "not graded" if solved is None else f"{100 * solved:.1f} % of {quality['answers']} solved"
        if solved is not None and interval:
            share += f" (95 %: {100 * interval[0]:.1f} to {100 * interval[1]:.1f})"
        share += f" ({graded_parts(quality)})" if graded_parts(quality) else ""
        said.append(f"{model['label']}: {share}, {100 * quality['repetition_rate']:.1f} % end in a loop")
    return "Quality of the answers. " + "; ".join(dict.fromkeys(said)) + "."


def _best(models: Sequence[Form]) -> list[tuple[str, Form]]:
    """Of each model the decoder of which most is to be expected."""
    found = []
    for model in models:
        ours = drafting(model)
        if ours:
            best = max(ours, key=expected)
            found.append((f"{model['label']}: {name_of(best)}", best))
    return list(dict(found).items())


def _drafts(models: Sequence[Form]) -> Section:
    best = _best(models)
    blocks = _drawn([figures.accepted(best, "len"), figures.accuracy(best, "acc")])
    for table in [*details(models), *overhead(models)]:
        blocks.append(Table(table.columns, table.rows, table.title))
    return Section("What became of the guesses", blocks)


_TIMES = ("p50", "p90", "p95", "p99", "worst")


def _latencies(found: Found) -> Section:
    models = [*found.benches, *found.models]
    lines = [
        (
            model["label"],
            name_of(decoder),
            str(decoder.get("batch_size", 1)),
            str(decoder["latency"]["requests"]),
            *(f"{decoder['latency']['answer'][time]:.3g}" for time in _TIMES),
            f"{decoder['latency']['first_token']['p50']:.3g}",
            f"{decoder['exact']}/{decoder['of']}",
            f"{100 * decoder['quality']['repetition_rate']:.1f} %",
        )
        for model in models
        for decoder in model["decoders"]
        if decoder.get("latency")
    ]
    if not lines:
        return Section("Latency", [])
    heads = (
        "model",
        "decoder",
        "batch",
        "requests",
        *(f"{time}, s" for time in _TIMES),
        "first token p50, s",
        "exact",
        "repeats",
    )
    timed = [
        (f"{model['label']}: {name_of(decoder)}", decoder)
        for model in models
        for decoder in [*(d for d in model["decoders"] if d["decoder"] == "ar"), *(d for _, d in _best([model]))]
        if decoder.get("batch_size", 1) == 1
    ]
    return Section("Latency", [*_drawn([figures.latency(timed, "lat")]), Table(heads, lines)])


def _losses(found: Found) -> Section:
    curves = [
        figures.over_steps(found.logs, key, key.replace("_", ""), title, unit, log=True)
        for key, title, unit in (
            ("consistency_loss", "Consistency loss", "KL divergence a block (nats)"),
            ("ar_loss", "AR loss", "cross-entropy a token (nats)"),
            ("loss", "Loss", "loss as it is minimised"),
        )
    ]
    estimate = figures.over_steps(
        found.logs, "tokens_per_forward", "est", "Estimated TPF while training", "tokens per forward"
    )
    return Section("Losses", _drawn([*curves, estimate]))


def _probes(found: Found) -> Section:
    if not found.probes:
        return Section("Probes", [])
    lines = [
        (
            str(number),
            str(line["step"]),
            f"{line['tokens_per_forward']:.2f}",
            "–" if line["solve_rate"] is None else f"{100 * line['solve_rate']:.1f} % of {line['answers']}",
            f"{100 * line['repetition_rate']:.1f} %",
        )
        for number, probe in sorted(found.probes.items())
        for line in probe
    ]
    rated = {
        number: [
            {**line, "percent": None if line["solve_rate"] is None else 100 * line["solve_rate"]} for line in probe
        ]
        for number, probe in found.probes.items()
    }
    shown = [
        figures.over_steps(found.probes, "tokens_per_forward", "ptpf", "TPF over training steps", "tokens per forward"),
        figures.over_steps(rated, "percent", "psol", "Solve rate over training steps", "held-out problems solved (%)"),
    ]
    return Section("Probes", [*_drawn(shown), Table(("round", "step", "TPF", "solved", "repeats"), lines)])


def _payback(found: Found) -> Section:
    if found.run is None or not found.run["stages"]:
        return Section("What the training cost, and when it has paid", [])
    blocks: list[Block] = [Table(("what", "how much"), payback(found.run))]
    if found.models:
        blocks.append(Text(quality_line(found.models)))
    return Section("What the training cost, and when it has paid", blocks)


def _origin(found: Found) -> Section:
    """Who made what with which versions."""
    entries = [("report.json", found.run)] if found.run is not None else []
    entries += [(name, value) for results in found.results.values() for name, value in results]
    lines = [_made(name, value["provenance"]) for name, value in entries if value.get("provenance")]
    blocks: list[Block] = [Table(("file", "command", "commit", "versions", "seed", "made"), lines)]
    for number, manifest in sorted(found.manifests.items()):
        held = sum(int(shard["rows"]) for shard in manifest["shards"])
        size, shards = manifest["block_size"], len(manifest["shards"])
        blocks.append(Text(f"Trajectories of round {number}: {held} of n={size} in {shards} shards."))
    if found.notes:
        blocks.append(Items(found.notes))
    return Section("Where the figures come from", blocks)


def _made(name: str, record: Form) -> tuple[str, ...]:
    commit = record.get("commit") or {}
    state = " with changes" if commit.get("dirty") else ""
    versions = ", ".join(f"{package} {version}" for package, version in record["versions"].items())
    seed = "–" if record.get("seed") is None else str(record["seed"])
    return (
        name,
        " ".join(record["argv"]),
        f"{str(commit.get('hash', '–'))[:12]}{state}",
        versions,
        seed,
        record["created"],
    )


def _drawn(shown: Sequence[Figure | None]) -> list[Block]:
    return [figure for figure in shown if figure is not None]
