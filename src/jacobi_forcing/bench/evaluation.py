"""Tasks through the harness, with quality and speed out of one run, and each decoder paired with `ar` item by item."""

from __future__ import annotations

import dataclasses
import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from jacobi_forcing.bench.contestants import AR, label_of
from jacobi_forcing.bench.cost import cost_ratios
from jacobi_forcing.bench.exactness import Mismatch, find_mismatch
from jacobi_forcing.evaluate.benchmarks import Benchmark, Grade, Record
from jacobi_forcing.evaluate.harness import Contender, JForceLM
from jacobi_forcing.evaluate.harness_tasks import harness_grades, make_task
from jacobi_forcing.evaluate.journal import Answer
from jacobi_forcing.evaluate.quality import Quality
from jacobi_forcing.evaluate.sandbox import Isolation, SandboxLimits
from jacobi_forcing.evaluate.statistics import Wilson, mcnemar, paired_bootstrap
from jacobi_forcing.trajectories.prompts import Prompt


@dataclasses.dataclass(frozen=True)
class Judged:
    """One decoder's answers to all items of a task, and their grades, in the order of the items."""

    contender: Contender
    answers: list[Answer]
    grades: list[Grade]
    score: float

    @property
    def right(self) -> list[bool]:
        """Item by item."""
        return [grade.right for grade in self.grades]

    @property
    def tokens(self) -> int:
        """Generated tokens, end tokens included."""
        return sum(answer.tokens for answer in self.answers)

    @property
    def forwards(self) -> int:
        """Forward passes, prefill included, summed over items."""
        return sum(answer.forwards for answer in self.answers)

    @property
    def seconds(self) -> float:
        """Wall time, prefill included."""
        return sum(answer.seconds for answer in self.answers)

    @property
    def pace(self) -> float:
        """TPS, tokens per second."""
        return self.tokens / self.seconds

    @property
    def median_slots(self) -> int:
        """The size of forward that it runs behind the prefills, tokens; 1 where it runs none."""
        counts: Counter[int] = Counter()
        for answer in self.answers:
            counts.update({int(size): count for size, count in answer.slots.items()})
        return round(statistics.median(counts.elements())) if counts else 1

    @property
    def quality(self) -> Quality:
        """What the answers are worth."""
        return Quality(
            answers=len(self.answers),
            tokens=self.tokens,
            finished=sum(answer.finished for answer in self.answers),
            repeating=sum(answer.repeats for answer in self.answers),
            solved=Wilson.of_counts(sum(self.right), len(self.right)),
        )


def run_task(
    lm: JForceLM,
    benchmark: Benchmark,
    *,
    records: Sequence[Record] | None,
    limit: int | None = None,
    max_new_tokens: int | None = None,
    fewshot: int = 0,
    limits: SandboxLimits | None = None,
    on_grading: Callable[[str], None] | None = None,
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Answer and grade one task with all of the model's contenders.

    Args:
        lm: The model and its contenders; `ar` among them is what the others are compared with.
        benchmark: The task.
        records: Its rows; None loads them from the hub.
        limit: First items only.
        max_new_tokens: Longest answer, tokens; the benchmark's own by default.
        fewshot: Solved examples before each prompt.
        limits: What generated code may use.
        on_grading: Told the decoder whose answers are graded next.

    Returns:
        The task's result for JSON, and a line for each item and decoder.

    Raises:
        ConfigError, DataError: See `make_task` and `JForceLM.generate_until`.
    """
    grades: list[Grade] = []
    task = make_task(
        benchmark,
        records=records,
        chat=lm.chat,
        max_new_tokens=max_new_tokens,
        fewshot=fewshot,
        limits=limits,
        grades=grades,
    )
    judged = []
    for contender in lm.contenders:
        grades.clear()
        if on_grading is not None:
            on_grading(contender.decode.decoder)
        found = harness_grades(lm, task, limit, contender)
        items = [sample["doc_id"] for sample in found["samples"]]
        answers = [lm.journal.answers[benchmark.name, item, contender.key] for item in items]
        judged.append(Judged(contender, answers, list(grades), found["right"]))
    until = [] if lm.chat else list(benchmark.until)
    result = {
        "task": benchmark.name,
        "items": len(judged[0].answers),
        "max_new_tokens": max_new_tokens or benchmark.max_new_tokens,
        "fewshot": fewshot,
        "stop_strings": until,
        "decoders": _decoders(lm, judged),
        "isolation": _isolation(judged),
    }
    return result, _lines(judged, task.test_docs())


def _decoders(lm: JForceLM, judged: list[Judged]) -> list[dict[str, Any]]:
    ar = next((one for one in judged if one.contender.decode.decoder == AR), None)
    rows, backbone = lm.batch_size, lm.backbone
    lengths = [answer.prompt_tokens + answer.tokens // 2 for answer in judged[0].answers]
    costs = cost_ratios(backbone, [one.median_slots for one in judged], round(statistics.median(lengths)), rows=rows)
    return [_decoder(lm, one, ar, costs[one.median_slots]["ratio"]) for one in judged]


def _decoder(lm: JForceLM, one: Judged, ar: Judged | None, cost: float) -> dict[str, Any]:
    decode = one.contender.decode
    plain = decode.decoder == AR
    return {
        "decoder": decode.decoder,
        "block_size": None if plain else decode.block_size,
        "settings": decode.to_dict(),
        "label": "" if plain else label_of(decode),
        "quality": one.quality.to_dict(),
        "tokens": one.tokens,
        "forwards": one.forwards,
        "tokens_per_forward": one.tokens / one.forwards,
        "seconds": one.seconds,
        "tokens_per_second": one.pace,
        "median_seconds": statistics.median(answer.seconds for answer in one.answers),
        "speedup": None if ar is None else one.pace / ar.pace,
        "median_slots": one.median_slots,
        "cost_ratio": None if plain else cost,
        "failures": dict(Counter(g.detail.partition(":")[0] for g in one.grades if g.detail)),
        "paired": None if ar is None or plain else _paired(lm, one, ar),
    }


def _paired(lm: JForceLM, one: Judged, ar: Judged) -> dict[str, Any]:
    """The decoder against `ar`, item by item."""
    mismatches = _mismatches(lm, one, ar)
    only_this = sum(mine and not other for mine, other in zip(one.right, ar.right, strict=True))
    only_ar = sum(other and not mine for mine, other in zip(one.right, ar.right, strict=True))
    low, high = paired_bootstrap([float(right) for right in one.right], [float(right) for right in ar.right])
    return {
        "exact": len(one.answers) - len(mismatches),
        "near_ties": sum(mismatch.near_tie for mismatch in mismatches),
        "faults": sum(not mismatch.near_tie for mismatch in mismatches),
        "of": len(one.answers),
        "differ": [mismatch.prompt for mismatch in mismatches],
        "mismatches": [mismatch.to_dict() for mismatch in mismatches],
        "only_this": only_this,
        "only_ar": only_ar,
        "graded_otherwise": [
            answer.item for answer, mine, other in zip(one.answers, one.right, ar.right, strict=True) if mine != other
        ],
        "mcnemar_p": mcnemar(only_this, only_ar),
        "difference": (only_this - only_ar) / len(one.answers),
        "difference_interval": [round(low, 4), round(high, 4)],
        "median_speedup": statistics.median(
            (mine.tokens / mine.seconds) / (other.tokens / other.seconds)
            for mine, other in zip(one.answers, ar.answers, strict=True)
        ),
    }


def _mismatches(lm: JForceLM, one: Judged, ar: Judged) -> list[Mismatch]:
    """Answers that are not `ar`'s, each told from a near tie. A stop string may end a text anywhere."""
    found = []
    for mine, other in zip(one.answers, ar.answers, strict=True):
        prompt = Prompt(mine.item, "", lm.prompts[mine.task, mine.item])
        stopped = mine.finished and mine.ids[-1] not in lm.backbone.eos_ids
        mismatch = find_mismatch(lm.backbone, prompt, mine.ids, other.ids, None if stopped else mine.limit)
        if mismatch is not None:
            found.append(mismatch)
    return found


def _isolation(judged: list[Judged]) -> dict[str, Any] | None:
    """The walls that stood around all the code that was run."""
    walls = [grade.isolation for one in judged for grade in one.grades if grade.isolation is not None]
    if not walls:
        return None
    names = [field.name for field in dataclasses.fields(Isolation)]
    weakest = Isolation(**{name: all(getattr(wall, name) for wall in walls) for name in names})
    return {**dataclasses.asdict(weakest), "sentence": weakest.sentence()}


def _lines(judged: list[Judged], records: Sequence[Record]) -> list[dict[str, Any]]:
    return [
        {
            **dataclasses.asdict(answer),
            "id": _name(records[answer.item], answer.item),
            "decoder": one.contender.decode.decoder,
            "settings": one.contender.decode.to_dict(),
            "tokens": answer.tokens,
            "answer": grade.answer,
            "right": grade.right,
            "detail": grade.detail,
        }
        for one in judged
        for answer, grade in zip(one.answers, one.grades, strict=True)
    ]


def _name(record: Record, item: int) -> str:
    """What the data set calls an item."""
    return str(record.get("task_id") or record.get("unique_id") or item)
