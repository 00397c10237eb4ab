"""Results apart by kind of request: long and short answers, easy and hard ones.

An average over a benchmark hides whom the speed-up goes to. What is hard is told by the base model (whether it is
right, and how unsure it is along its own greedy answer) and by the length of the reference answer.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from jacobi_forcing.backbone import Backbone
from jacobi_forcing.bench.contestants import Turn
from jacobi_forcing.config import Task
from jacobi_forcing.evaluate.tasks import grade
from jacobi_forcing.loading import Loaded
from jacobi_forcing.sweep import Line, Lines, sweep_logits
from jacobi_forcing.trajectories.prompts import Prompt

_CHUNK = 64  # positions whose distribution is made at a time
_BY = ("response_tokens", "base_right", "answer_tokens", "entropy")


@dataclasses.dataclass(frozen=True)
class Traits:
    """What is known of a request beside its timing.

    Attributes:
        prompt: Index of the prompt in its source.
        prompt_tokens: Its length, tokens.
        response_tokens: Length of the model's greedy answer, tokens, the end token included.
        base_right: Whether the base model's greedy answer is right; None where nothing is graded.
        answer_tokens: Length of the reference answer, tokens; None where there is none.
        entropy: Mean entropy of the base model's next-token distribution along its own greedy answer, nats.
    """

    prompt: int
    prompt_tokens: int
    response_tokens: int
    base_right: bool | None
    answer_tokens: int | None
    entropy: float

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return dataclasses.asdict(self)


def traits_of(
    loaded: Loaded,
    backbone: Backbone,
    prompts: Sequence[Prompt],
    responses: Sequence[Sequence[int]],
    task: Task,
    base: Sequence[Traits] | None = None,
) -> list[Traits]:
    """Find the traits of requests.

    Args:
        loaded: Model and tokenizer.
        backbone: The same model.
        prompts: What was asked.
        responses: The model's own greedy answers, ids.
        task: How answers are graded; none grades nothing.
        base: Traits of the same prompts as another model, the base, found them: then difficulty is taken from there.
    """
    known = {traits.prompt: traits for traits in base or ()}
    found = []
    for prompt, ids in zip(prompts, responses, strict=True):
        own = known.get(prompt.index)
        if own is None:
            own = Traits(
                prompt.index,
                len(prompt.ids),
                len(ids),
                _right(loaded, prompt, ids, task),
                None if prompt.answer is None else len(loaded.tokenizer(prompt.answer)["input_ids"]),
                mean_entropy(backbone, prompt.ids, ids),
            )
        found.append(dataclasses.replace(own, prompt_tokens=len(prompt.ids), response_tokens=len(ids)))
    return found


def _right(loaded: Loaded, prompt: Prompt, ids: Sequence[int], task: Task) -> bool | None:
    if task == "none" or prompt.answer is None:
        return None
    (text,) = loaded.tokenizer.batch_decode([list(ids)], skip_special_tokens=True)
    return grade(task, text, prompt.answer)


@torch.inference_mode()
def mean_entropy(backbone: Backbone, prompt: Sequence[int], answer: Sequence[int]) -> float:
    """Mean entropy, nats, of the model's next-token distribution at every token of an answer."""
    text = [*prompt, *answer[:-1]]
    keep = torch.arange(len(prompt) - 1, len(text), device=backbone.device)
    lines = Lines.pack([[Line(text, 0)]], backbone.device)
    logits = sweep_logits(backbone, backbone.new_cache(), lines, keep)[0]
    total = 0.0
    for part in logits.split(_CHUNK):
        shares = torch.softmax(part.float(), dim=-1)
        total -= float(torch.xlogy(shares, shares).sum())
    return total / len(answer)


def strata(
    turns: Sequence[Turn], pace: Sequence[Turn], traits: Sequence[Traits], wrong: Sequence[int]
) -> list[dict[str, Any]]:
    """Speed and exactness of one contestant, apart by each trait.

    A number splits the requests into thirds as near as ties allow; a trait that is the same for all, or not known, is
    left out. Wall time belongs to a batch: rates are told of batches of one only.

    Args:
        turns: The contestant's timed calls.
        pace: Those of `ar` on the same batches.
        traits: Of all requests, in the order of the calls' rows.
        wrong: Indices of the prompts whose answer is not the reference's, token for token.

    Returns:
        For each trait and group: `by`, `low` and `high` (the least and greatest value in it), `requests`, `tokens`,
        `forwards`, `tokens_per_forward`, `tokens_per_second`, `speedup`, `exact` and `of`.
    """
    alone = all(len(turn.ids) == 1 for turn in turns)
    rows = [(len(ids), forwards) for turn in turns for ids, forwards in zip(turn.ids, turn.each, strict=True)]
    found = []
    for by in _BY:
        values = [getattr(one, by) for one in traits]
        if any(value is None for value in values):
            continue
        groups = thirds(values)
        for group in groups if len(groups) > 1 else []:
            tokens, forwards = (sum(rows[place][part] for place in group) for part in (0, 1))
            inside = [values[place] for place in group]
            missed = sum(traits[place].prompt in wrong for place in group)
            found.append(
                {
                    "by": by,
                    "low": min(inside),
                    "high": max(inside),
                    "requests": len(group),
                    "tokens": tokens,
                    "forwards": forwards,
                    "tokens_per_forward": tokens / forwards,
                    **(_rates(turns, pace, group) if alone else {"tokens_per_second": None, "speedup": None}),
                    "exact": len(group) - missed,
                    "of": len(group),
                }
            )
    return found


def thirds(values: Sequence[float]) -> list[list[int]]:
    """Places of the low, middle and high values, near to a third each; equal values stay together."""
    order = sorted(range(len(values)), key=lambda place: values[place])
    cuts = [count for count in range(1, len(order)) if values[order[count - 1]] != values[order[count]]]
    chosen = {min(cuts, key=lambda cut: abs(3 * cut - part * len(order))) for part in (1, 2)} if cuts else set()
    edges = [0, *sorted(chosen), len(order)]
    return [sorted(order[start:end]) for start, end in itertools.pairwise(edges)]


def _rates(turns: Sequence[Turn], pace: Sequence[Turn], group: Sequence[int]) -> Mapping[str, float]:
    rates = [
        sum(calls[place].tokens for place in group) / sum(calls[place].seconds for place in group)
        for calls in (turns, pace)
    ]
    return {"tokens_per_second": rates[0], "speedup": rates[0] / rates[1]}
