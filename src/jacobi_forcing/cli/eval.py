"""`jforce eval`: tasks, with quality and speed out of the same run."""

from __future__ import annotations

import dataclasses
import itertools
import json as json_text
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from jacobi_forcing import provenance
from jacobi_forcing.cli import options
from jacobi_forcing.cli.console import note, print_report, print_table
from jacobi_forcing.config import DecodeConfig, ModelConfig, PromptsConfig, Template
from jacobi_forcing.embedded import BUILTIN
from jacobi_forcing.errors import ConfigError
from jacobi_forcing.files import write_json, write_text

if TYPE_CHECKING:
    from jacobi_forcing.evaluate.harness import JForceLM

TASKS = "gsm8k, math, humaneval, mbpp"

Tasks = Annotated[str, typer.Option("--tasks", "-t", help=f"Tasks, with commas between: {TASKS}.")]
Data = Annotated[
    list[str] | None,
    typer.Option(
        help="A task's data as a JSONL file: TASK=FILE, or FILE where there is one task. Repeatable.",
        show_default="the hub's",
    ),
]
Limit = Annotated[int | None, typer.Option("--limit", "-l", min=1, help="First items only.", show_default="all")]
MaxNewTokens = Annotated[
    int | None, typer.Option(min=1, help="Longest answer, tokens.", show_default="512 to 1024, by task")
]
Fewshot = Annotated[int, typer.Option(min=0, help="Solved examples of the same data before each prompt.")]
BatchSize = Annotated[int, typer.Option("--batch-size", "-b", min=1, help="Answers decoded side by side.")]
CompareAr = Annotated[bool, typer.Option(help="Also answer with ar, and compare item by item.")]
Seconds = Annotated[float, typer.Option(min=0.1, help="Wall time for the tests of one answer, seconds.")]
CheckReferences = Annotated[
    bool, typer.Option("--check-references", help="Grade the data's own answers instead of a model's; needs no model.")
]
Output = Annotated[
    Path, typer.Option("--output", "-o", help="Folder for answers and result; a killed run goes on there.")
]


def eval(
    tasks: Tasks,
    model: options.Model = BUILTIN,
    adapter: options.Adapter = ModelConfig.adapter,
    data: Data = None,
    limit: Limit = None,
    decoder: options.Decoders = None,
    block_size: options.BlockSizes = None,
    candidates: options.Candidates = DecodeConfig.candidates,
    num_blocks: options.NumBlocks = DecodeConfig.num_blocks,
    spawn_ratio: options.SpawnRatio = DecodeConfig.spawn_ratio,
    prompt_ngrams: options.PromptNgrams = DecodeConfig.prompt_ngrams,
    draft_init: options.DraftInit = DecodeConfig.draft_init,
    draft_seed: options.DraftSeed = DecodeConfig.draft_seed,
    static_shapes: options.StaticShapes = DecodeConfig.static_shapes,
    compare_ar: CompareAr = True,
    template: options.Template = PromptsConfig.template,
    fewshot: Fewshot = 0,
    max_new_tokens: MaxNewTokens = None,
    batch_size: BatchSize = 1,
    test_seconds: Seconds = 60.0,
    dtype: options.DType = ModelConfig.dtype,
    device: options.Device = ModelConfig.device,
    pack_weights: options.PackWeights = ModelConfig.pack_weights,
    trust_remote_code: options.TrustRemoteCode = ModelConfig.trust_remote_code,
    check_references: CheckReferences = False,
    output: Output = Path("runs/eval"),
    json: options.Json = False,
) -> None:
    """Grade a model's answers to benchmarks, and time them in the same run.

    Answers come through lm-evaluation-harness with any decoder; generated code is tested in a sandbox. --decoder and
    --block-size may be repeated. Where standard output is no terminal, its last line is a JSON object with all figures;
    OUTPUT gets it as eval.json, and every answer as a line of items.jsonl.
    """
    os.environ.setdefault("TQDM_DISABLE", "1")  # the harness's own bars; before anything imports tqdm
    plan = _plan(dict(locals()))

    from jacobi_forcing.evaluate.sandbox import SandboxLimits

    limits = SandboxLimits(seconds=test_seconds)
    if check_references:
        report = _check(plan, limits, to_stderr=json)
    else:
        report = _evaluate(plan, limits)
        _show(report, to_stderr=json)
    print_report(report, json=json)


@dataclasses.dataclass(frozen=True)
class _Plan:
    """What is asked for, checked before anything is loaded."""

    tasks: list[str]
    data: dict[str, str]
    limit: int | None
    model: ModelConfig
    decoders: list[DecodeConfig]
    template: Template
    fewshot: int
    max_new_tokens: int | None
    batch_size: int
    output: Path


def _plan(given: Mapping[str, Any]) -> _Plan:
    """Turn a call's arguments into settings.

    Raises:
        ConfigError: One is wrong.
    """
    known = TASKS.split(", ")
    tasks = [name.strip() for name in given["tasks"].split(",") if name.strip()]
    for name in tasks:
        if name not in known:
            raise ConfigError(f"There is no task '{name}'", expected="one or more of " + TASKS)
    if not tasks or len(set(tasks)) < len(tasks):
        raise ConfigError("'tasks' names none, or one twice", seen=given["tasks"], expected="one or more of " + TASKS)
    names, sizes = given["decoder"] or ["window"], given["block_size"] or [DecodeConfig.block_size]
    if given["compare_ar"]:
        names = ["ar", *names]
    decoders: list[DecodeConfig] = []
    for name, size in itertools.product(names, sizes):
        plain = DecodeConfig(decoder="ar")
        one = plain if name == "ar" else options.settings(DecodeConfig, given, decoder=name, block_size=size)
        if one not in decoders:
            decoders.append(one)
    return _Plan(
        tasks=tasks,
        data=_data(given["data"] or [], tasks),
        limit=given["limit"],
        model=options.settings(ModelConfig, given, name=given["model"]),
        decoders=decoders,
        template=options.settings(PromptsConfig, {"template": given["template"]}, source="prompt").template,
        fewshot=given["fewshot"],
        max_new_tokens=given["max_new_tokens"],
        batch_size=given["batch_size"],
        output=given["output"],
    )


def _data(given: list[str], tasks: list[str]) -> dict[str, str]:
    """The file of each task that has one."""
    found: dict[str, str] = {}
    for text in given:
        name, equals, path = text.partition("=")
        if not equals or name not in TASKS.split(", "):
            if len(tasks) > 1:
                raise ConfigError("It is not clear which task a file is for", seen=text, expected="TASK=FILE")
            name, path = tasks[0], text
        if name not in tasks or name in found:
            seen = "named twice" if name in found else "not among --tasks"
            raise ConfigError(f"The data of '{name}' is given for nothing", seen=seen, remedy="leave it out")
        found[name] = path
    return found


def _check(plan: _Plan, limits: Any, *, to_stderr: bool) -> dict[str, Any]:
    """Grade reference answers."""
    from jacobi_forcing.cli.bars import Bars
    from jacobi_forcing.evaluate import benchmark
    from jacobi_forcing.evaluate.records import check_references, hub_records, read_records
    from jacobi_forcing.formats import stamped

    results, rows = [], []
    with Bars() as bars:
        for name in plan.tasks:
            task = benchmark(name)
            bars.begin("check", f"Grade the reference answers of {name}")
            path = plan.data.get(name)
            records = hub_records(task, plan.limit) if path is None else read_records(path, task, plan.limit)
            found = check_references(task, records, limits, lambda done, total: bars.progress(done, total, "answers"))
            bars.end("check", f"{name}: {found.right} of {found.items} right")
            wrong = [{"item": item, "answer": grade.answer, "detail": grade.detail} for item, grade in found.wrong]
            walls = None if found.isolation is None else dataclasses.asdict(found.isolation)
            results.append(
                {"task": name, "items": found.items, "right": found.right, "wrong": wrong, "isolation": walls}
            )
            rows.append((name, str(found.items), str(found.right), ", ".join(str(item) for item, _ in found.wrong[:9])))
            if found.isolation is not None:
                note(found.isolation.sentence() + ".")
    print_table(("task", "items", "right", "wrong ones"), rows, to_stderr=to_stderr)
    return stamped("references", {"tasks": results, "provenance": provenance.collect()})


def _evaluate(plan: _Plan, limits: Any) -> dict[str, Any]:
    """Answer, grade, compare; the files of the run."""
    from jacobi_forcing.bench.evaluation import run_task
    from jacobi_forcing.cli.bars import Bars
    from jacobi_forcing.evaluate import benchmark
    from jacobi_forcing.evaluate.harness import Contender, JForceLM
    from jacobi_forcing.evaluate.journal import Journal
    from jacobi_forcing.evaluate.records import read_records
    from jacobi_forcing.files import file_sha256
    from jacobi_forcing.formats import stamped
    from jacobi_forcing.loading import load
    from jacobi_forcing.trajectories.prompts import wants_chat

    # Files are read before the model is loaded: a broken line is better known at once.
    records = {name: read_records(path, benchmark(name), plan.limit) for name, path in plan.data.items()}
    sums = {name: file_sha256(Path(path)) for name, path in plan.data.items()}
    results, lines = [], []
    with Bars() as bars:
        loaded = load(plan.model)
        contenders = [Contender(decode) for decode in plan.decoders]
        lm = JForceLM(loaded, contenders, None, plan.batch_size, wants_chat(plan.template, loaded.tokenizer))
        settings = _settings(plan, lm, sums)
        lm.journal = Journal(plan.output, settings)
        if lm.journal.found:
            bars.note(f"{lm.journal.found} answers were made before and are kept")
        lm.on_progress = lambda done, total: bars.progress(done, total, "answers")
        for name in plan.tasks:
            bars.begin("eval", name)
            result, items = run_task(
                lm,
                benchmark(name),
                records=records.get(name),
                limit=plan.limit,
                max_new_tokens=plan.max_new_tokens,
                fewshot=plan.fewshot,
                limits=limits,
            )
            source = provenance.portable(plan.data[name]) if name in plan.data else benchmark(name).path
            results.append({**result, "data": {"source": source, "sha256": sums.get(name)}})
            lines += items
            bars.end("eval", f"{name}: {result['items']} items, {len(plan.decoders)} decoders")
    text = "".join(json_text.dumps(stamped("eval-item", line), ensure_ascii=False) + "\n" for line in lines)
    write_text(plan.output / "items.jsonl", text)
    report = stamped(
        "eval",
        {
            "model": provenance.portable(plan.model.name),
            **settings,
            "tasks": results,
            "provenance": provenance.collect(),
        },
    )
    write_json(plan.output / "eval.json", report)
    return report


def _settings(plan: _Plan, lm: JForceLM, sums: Mapping[str, str]) -> dict[str, Any]:
    """All that decides answers and times beside the decoder: answers of other settings are not gone on with."""
    from jacobi_forcing.bench.roofline import model_form

    adapter = plan.model.adapter
    return {
        "fingerprint": provenance.model_fingerprint(lm.loaded.model),
        "adapter": None if adapter is None else provenance.portable(adapter),
        **model_form(lm.backbone),
        "chat": lm.chat,
        "batch_size": plan.batch_size,
        "fewshot": plan.fewshot,
        "max_new_tokens": plan.max_new_tokens,
        "data": dict(sums),
    }


def _show(report: Mapping[str, Any], *, to_stderr: bool) -> None:
    """The table, and what it means."""
    from jacobi_forcing.bench.evaltable import COLUMNS, LEGEND, notes, rows

    print_table(COLUMNS, rows(report), to_stderr=to_stderr)
    for text in [LEGEND, *notes(report)]:
        note(text)
