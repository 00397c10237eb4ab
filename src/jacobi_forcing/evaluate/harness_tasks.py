"""Our benchmarks as tasks of lm-evaluation-harness."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from jacobi_forcing.errors import DataError
from jacobi_forcing.evaluate.benchmarks import Benchmark, Grade, Record
from jacobi_forcing.evaluate.harness import Contender, JForceLM
from jacobi_forcing.evaluate.sandbox import SandboxLimits

# Behind our own, which says what to install where the harness is not there.
from lm_eval.api.task import ConfigurableTask  # isort: skip
from lm_eval.evaluator import evaluate as run_harness  # isort: skip

_METRIC = "right"
_OTHERS = ("task_id", "unique_id", "canonical_solution", "code", "solution", "test_setup_code", "test_imports")
"""Fields of records that are used where they are there, beside those that must be."""


def make_task(
    benchmark: Benchmark,
    *,
    records: Sequence[Record] | None = None,
    chat: bool,
    max_new_tokens: int | None = None,
    fewshot: int = 0,
    limits: SandboxLimits | None = None,
    grades: list[Grade] | None = None,
) -> ConfigurableTask:
    """A benchmark as a task of the harness.

    Args:
        benchmark: Which.
        records: Its rows; None loads them from the hub.
        chat: Whether prompts are written for a chat template.
        max_new_tokens: Longest answer, tokens; the benchmark's own by default.
        fewshot: Solved examples before each prompt, of the same data and never the item itself.
        limits: What generated code may use.
        grades: Gets the grade of each answer, in order.

    Raises:
        DataError: The data cannot be loaded, or a record lacks a field.
    """

    def process_results(doc: Record, results: Sequence[str]) -> dict[str, float]:
        grade = benchmark.grade(doc, results[0], limits)
        if grades is not None:
            grades.append(grade)
        return {_METRIC: float(grade.right)}

    source: dict[str, Any] = {"dataset_path": benchmark.path, "dataset_name": benchmark.subset}
    if records is not None:
        source = {"custom_dataset": lambda **_: _dataset(benchmark, records)}
    config = _config(benchmark, chat, fewshot, max_new_tokens) | source | {"process_results": process_results}
    try:
        task = ConfigurableTask(config=config)
    except DataError:
        raise
    except Exception as error:  # the library raises dozens of kinds: no such set, split or subset, no network
        raise DataError(
            f"Cannot load the data of '{benchmark.name}'",
            seen=" ".join(str(error).split())[:300],
            expected=f"the hub's {benchmark.path}" if records is None else None,
            remedy=f"name a file: --data {benchmark.name}=FILE.jsonl",
        ) from error
    task.set_fewshot_seed(seed=0)
    for index, record in enumerate(task.test_docs()):
        benchmark.check(record, f"Item {index} of '{benchmark.name}'")
    return task


def _config(benchmark: Benchmark, chat: bool, fewshot: int, max_new_tokens: int | None) -> dict[str, Any]:
    """What the harness is told about a benchmark, beside its data and its grader."""
    return {
        "task": benchmark.name,
        "test_split": benchmark.split,
        "fewshot_split": benchmark.split if fewshot else None,
        "num_fewshot": fewshot,
        "output_type": "generate_until",
        "doc_to_text": lambda doc: benchmark.ask(doc, chat),
        "doc_to_target": lambda doc: _reference(benchmark, doc),
        "generation_kwargs": {
            "until": [] if chat else list(benchmark.until),
            "max_gen_toks": max_new_tokens or benchmark.max_new_tokens,
            "do_sample": False,
        },
        "metric_list": [{"metric": _METRIC, "aggregation": "mean", "higher_is_better": True}],
    }


def _dataset(benchmark: Benchmark, records: Sequence[Record]) -> dict[str, Any]:
    import datasets

    known = [name for names in benchmark.fields for name in names] + list(_OTHERS)
    kept = [{name: record[name] for name in known if name in record} for record in records]
    return {benchmark.split: datasets.Dataset.from_list(kept)}


def _reference(benchmark: Benchmark, record: Record) -> str:
    """The data set's own answer; nothing where there is none, which only examples would need."""
    try:
        return benchmark.reference(record)
    except KeyError:
        return ""


def harness_grades(lm: JForceLM, task: ConfigurableTask, limit: int | None, contender: Contender) -> dict[str, Any]:
    """Run one task through the harness with one contender's answers.

    Returns:
        The harness's own samples, in the order of the data, and its `right` for the whole.
    """
    lm.use(contender)
    name = task.config.task
    found: Mapping[str, Any] = run_harness(
        lm,
        {"tasks": {name: task}, "groups": {}, "group_map": {}},
        limit=limit,
        bootstrap_iters=0,
        apply_chat_template=lm.chat,
        fewshot_as_multiturn=True,
        log_samples=True,
    )
    scores = {key.partition(",")[0]: value for key, value in found["results"][name].items()}
    return {"samples": found["samples"][name], _METRIC: scores[_METRIC]}
