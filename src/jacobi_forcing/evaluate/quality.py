"""Quality of greedy answers: solved, looping, finished. Printed wherever speed is."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from jacobi_forcing.backbone import Backbone
from jacobi_forcing.config import DecodeConfig, Task
from jacobi_forcing.decode.engine import make_row, run
from jacobi_forcing.decode.stats import DecodeStats, RowStats, one_by_one
from jacobi_forcing.errors import DataError
from jacobi_forcing.evaluate.statistics import Wilson
from jacobi_forcing.evaluate.tasks import grade, grade_parts
from jacobi_forcing.trajectories.prompts import Prompt
from jacobi_forcing.trajectories.responses import greedy_responses

LOOP_PERIODS = 3
"""An answer loops when its end repeats the same tokens this many times over ..."""
LOOP_TOKENS = 16
"""... and for at least this many tokens."""
LOOP_LONGEST = 64
"""Longest stretch that is looked for, tokens."""


@dataclasses.dataclass(frozen=True)
class Quality:
    """What a set of answers is worth.

    Attributes:
        answers: Number of answers.
        tokens: Their tokens, end tokens included.
        finished: Answers that ended with an end token within the budget.
        repeating: Answers that loop, see `loops`.
        solved: Right answers with the interval; None where answers are not known.
        parts: Answers that came so far, for tasks that are graded in steps; see `grade_parts`.
    """

    answers: int
    tokens: int
    finished: int
    repeating: int
    solved: Wilson | None
    parts: Mapping[str, Wilson] = dataclasses.field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Counts and shares for JSON; `solve_rate` and its interval are null where answers are not known.

        `parts` is there only for tasks that are graded in steps.
        """
        solved = self.solved
        parts = {name: {"count": part.count, **_share(part)} for name, part in self.parts.items()}
        return {
            "answers": self.answers,
            "mean_tokens": round(self.tokens / self.answers, 2) if self.answers else 0.0,
            "finished_rate": self.finished / self.answers if self.answers else 0.0,
            "repetition_rate": self.repeating / self.answers if self.answers else 0.0,
            "solved": None if solved is None else solved.count,
            "solve_rate": None if solved is None else solved.share,
            "solve_rate_interval": None if solved is None else _share(solved)["interval"],
            **({"parts": parts} if parts else {}),
        }


def _share(part: Wilson) -> dict[str, Any]:
    return {"share": part.share, "interval": [round(part.low, 4), round(part.high, 4)]}


def loops(ids: Sequence[int], eos_ids: Sequence[int] = ()) -> bool:
    """Whether an answer ends in a loop.

    It does when, end tokens put aside, its last tokens are one stretch of p tokens over and over: for some p from 1 to
    `LOOP_LONGEST`, the last max(`LOOP_PERIODS` * p, `LOOP_TOKENS`) tokens each equal the one p places before, the
    first p of them excepted. A loop that the answer leaves again does not count.
    """
    text = list(ids)
    while text and text[-1] in eos_ids:
        text.pop()
    for period in range(1, LOOP_LONGEST + 1):
        tail = max(LOOP_PERIODS * period, LOOP_TOKENS)
        if tail > len(text):
            if LOOP_PERIODS * period > len(text):
                return False
            continue
        if text[-tail + period :] == text[-tail:-period]:
            return True
    return False


def quality_of(
    responses: Sequence[Sequence[int]],
    prompts: Sequence[Prompt],
    tokenizer: PreTrainedTokenizerBase,
    eos_ids: Sequence[int],
    task: Task = "none",
) -> Quality:
    """Judge answers that are there already.

    Args:
        responses: Token ids of each answer, without the prompt.
        prompts: The prompts that they answer, in the same order.
        tokenizer: Turns ids into the text that is graded.
        eos_ids: Ids that end an answer.
        task: How answers are graded; none leaves `solved` empty.

    Raises:
        DataError: The task needs reference answers and a prompt has none.
    """
    ends = set(eos_ids)
    solved, parts = None, dict[str, Wilson]()
    if task != "none":
        texts = tokenizer.batch_decode([list(ids) for ids in responses], skip_special_tokens=True)
        pairs = [(text, _answer(prompt)) for text, prompt in zip(texts, prompts, strict=True)]
        solved = Wilson.of_counts(sum(grade(task, *pair) for pair in pairs), len(pairs))
        steps = [grade_parts(task, *pair) for pair in pairs]
        parts = {
            name: Wilson.of_counts(sum(step[name] for step in steps), len(steps))
            for name in (steps[0] if steps else ())
        }
    return Quality(
        answers=len(responses),
        tokens=sum(map(len, responses)),
        finished=sum(bool(ids) and ids[-1] in ends for ids in responses),
        repeating=sum(loops(ids, eos_ids) for ids in responses),
        solved=solved,
        parts=parts,
    )


def answers(
    backbone: Backbone,
    prompts: Sequence[Prompt],
    *,
    max_new_tokens: int,
    batch_size: int,
    decode: DecodeConfig | None = None,
    vocabulary: Sequence[int] | None = None,
    on_progress: Callable[[int, int], None] | None = None,
) -> tuple[list[list[int]], DecodeStats]:
    """Greedy answers to many prompts, side by side.

    Args:
        backbone: The model.
        prompts: Prompts of any lengths; those of similar length share a batch.
        max_new_tokens: Longest answer, tokens; less where the model's context ends before.
        batch_size: Answers side by side.
        decode: The decoder; None or `ar` generates one token a forward.
        vocabulary: Ids that the tokenizer has, for `draft_init="vocabulary"`.
        on_progress: Told answers done and answers in all, after every batch.

    Returns:
        Token ids of each answer in the order of `prompts`, and the counts of each.
    """
    training = backbone.model.training
    backbone.model.eval()
    eos_ids = backbone.eos_ids
    found: dict[int, list[int]] = {}
    stats: dict[int, RowStats] = {}
    order = sorted(range(len(prompts)), key=lambda index: len(prompts[index].ids))
    try:
        for start in range(0, len(order), batch_size):
            batch = order[start : start + batch_size]
            ids = [prompts[index].ids for index in batch]
            limits = [budget(backbone, len(prompt), max_new_tokens) for prompt in ids]
            if decode is None or decode.decoder == "ar":
                with torch.inference_mode():
                    responses = greedy_responses(backbone, ids, limits, eos_ids)
                counts = [one_by_one(len(response)) for response in responses]
            else:
                rows = [
                    make_row(backbone, prompt, decode, eos_ids, limit, vocabulary)
                    for prompt, limit in zip(ids, limits, strict=True)
                ]
                run(backbone, rows)
                responses, counts = [row.generated for row in rows], [row.stats for row in rows]
            found.update(zip(batch, responses, strict=True))
            stats.update(zip(batch, counts, strict=True))
            if on_progress is not None:
                on_progress(len(found), len(prompts))
    finally:
        backbone.model.train(training)
    return [found[index] for index in range(len(prompts))], DecodeStats([stats[i] for i in range(len(prompts))])


def budget(backbone: Backbone, prompt_tokens: int, max_new_tokens: int) -> int:
    """Tokens that may follow a prompt: `max_new_tokens`, or what the context leaves, at least 1."""
    limit = backbone.context_length
    return max_new_tokens if limit is None else max(1, min(max_new_tokens, limit - prompt_tokens))


def _answer(prompt: Prompt) -> str:
    if prompt.answer is None:
        raise DataError(
            f"Prompt {prompt.index} has no reference answer",
            remedy="name the key that holds it as answer_field, or set task to none",
        )
    return prompt.answer
