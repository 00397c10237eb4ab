"""Contestants against each other on the same weights, prompts and machine, in one run.

Every batch of prompts is decoded by every contestant in turn before the next batch begins, and the order turns with the
batches: a machine that slows down slows all of them. Each contestant's first answer at each batch size is thrown away.
`ar` is always among them: at every batch size it is what speed-ups and exactness are measured against, and it is
itself compared with the library's own greedy `generate`.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Sequence

from jacobi_forcing.backbone import Backbone
from jacobi_forcing.bench.contestants import AR, LIBRARY, Contestant, Turn, contestants
from jacobi_forcing.bench.cost import cost_ratios
from jacobi_forcing.bench.exactness import find_mismatch
from jacobi_forcing.bench.overhead import Overhead, overheads
from jacobi_forcing.bench.results import Cost, DecoderResult, ModelResult, never_drafts
from jacobi_forcing.bench.strata import Traits, traits_of
from jacobi_forcing.config import DecodeConfig, Task
from jacobi_forcing.errors import ConfigError, DataError
from jacobi_forcing.evaluate.quality import quality_of
from jacobi_forcing.loading import Loaded
from jacobi_forcing.trajectories.prompts import Prompt


def bench(
    loaded: Loaded,
    prompts: Sequence[Prompt],
    *,
    decode: Sequence[DecodeConfig],
    max_new_tokens: int,
    task: Task = "none",
    label: str | None = None,
    rivals: Sequence[Contestant] = (),
    batch_sizes: Sequence[int] = (1,),
    overhead: bool = False,
    base: Sequence[Traits] | None = None,
    on_progress: Callable[[int, int], None] | None = None,
) -> ModelResult:
    """Measure decoders on one model.

    Args:
        loaded: Model and tokenizer.
        prompts: What to answer, at least one. They are cut in order into batches of each size; a last one that would
            be smaller is left out.
        decode: The decoders; `ar` and the library's generate are added.
        max_new_tokens: Longest answer, tokens; less where the model's context ends before.
        task: How answers are graded; none reports looping and finished answers only.
        label: What tables call the model; its name by default.
        rivals: Further decoders of the library, see `prompt_lookup` and `assisted`; measured at a batch of one.
        batch_sizes: Rows decoded side by side.
        overhead: Also measure what the decoding loop costs beside the forwards, on the first prompt.
        base: How hard the same prompts are for the base model, its own result's `traits`; by default this model is it.
        on_progress: Told prompts done and prompts in all, over all batch sizes.

    Raises:
        ConfigError: A batch size is below 1, or rivals are asked for and a batch of one is not.
        DataError: There are too few prompts, or the task needs answers that are not there.
    """
    _check(prompts, sizes := sorted(set(batch_sizes)), rivals)
    backbone, everyone = Backbone(loaded.model), contestants(decode, rivals)
    tell = _teller(sum(len(prompts) // size * size for size in sizes), on_progress)
    known, results, costs = list(base or ()), list[DecoderResult](), list[Cost]()
    for size in sizes:
        batches = [prompts[start : start + size] for start in range(0, len(prompts) - size + 1, size)]
        field = [contestant for contestant in everyone if size == 1 or not contestant.single]
        found = _race(loaded, backbone, batches, field, max_new_tokens, tell)
        judged = _judge(loaded, backbone, batches, field, found, task)
        # The smallest batches come first and take the most prompts: what they told is known.
        known = _traits(loaded, backbone, batches, judged, task, known)
        results += _finished(judged, backbone, batches, known, costs)
    return ModelResult(
        label=label or loaded.config.name,
        model=loaded.config.name,
        dtype=str(backbone.dtype).removeprefix("torch."),
        device=backbone.device.type,
        packed_weights=backbone.packed_weights,
        max_new_tokens=max_new_tokens,
        task=task,
        prompts=len(prompts),
        decoders=results,
        cost=costs,
        overhead=_overheads(loaded, prompts[0], everyone, max_new_tokens) if overhead else [],
        traits=results[0].traits,
    )


def _overheads(loaded: Loaded, prompt: Prompt, everyone: Sequence[Contestant], max_new_tokens: int) -> list[Overhead]:
    ours = [contestant.decode for contestant in everyone if contestant.decode is not None]
    return overheads(loaded, prompt, ours, max_new_tokens)


def _check(prompts: Sequence[Prompt], sizes: Sequence[int], rivals: Sequence[Contestant]) -> None:
    if not sizes or sizes[0] < 1:
        raise ConfigError("A batch size is too small", seen=list(sizes), expected="at least 1")
    if 1 not in sizes and any(rival.single for rival in rivals):
        raise ConfigError(
            "These decoders of the library take one row at a time",
            seen=", ".join(rival.name for rival in rivals),
            remedy="measure a batch size of 1 as well",
        )
    if not prompts:
        raise DataError("There is nothing to measure", seen="0 prompts", expected="at least 1")
    if sizes[-1] > len(prompts):
        raise DataError(
            f"There are too few prompts for a batch of {sizes[-1]}",
            seen=f"{len(prompts)} prompts",
            remedy="raise the limit of prompts, or leave that batch size out",
        )


def _teller(total: int, on_progress: Callable[[int, int], None] | None) -> Callable[[int], None]:
    done = 0

    def tell(count: int) -> None:
        nonlocal done
        done += count
        if on_progress is not None:
            on_progress(done, total)

    return tell


def _race(
    loaded: Loaded,
    backbone: Backbone,
    batches: Sequence[Sequence[Prompt]],
    field: Sequence[Contestant],
    max_new_tokens: int,
    tell: Callable[[int], None],
) -> list[list[Turn]]:
    """Each contestant's timed calls, batch by batch, after one that is thrown away."""
    found: list[list[Turn]] = [[] for _ in field]
    for contestant in field:
        contestant.take(loaded, backbone, batches[0], max_new_tokens)
    for index, batch in enumerate(batches):
        for step in range(len(field)):
            place = (index + step) % len(field)
            found[place].append(field[place].take(loaded, backbone, batch, max_new_tokens))
        tell(len(batch))
    return found


def _judge(
    loaded: Loaded,
    backbone: Backbone,
    batches: Sequence[Sequence[Prompt]],
    field: Sequence[Contestant],
    found: Sequence[list[Turn]],
    task: Task,
) -> list[DecoderResult]:
    """Compare the answers of each contestant with those of `ar` to the same batches, and grade them."""
    library, ar = found[0], found[1]
    asked = [prompt for batch in batches for prompt in batch]
    results = []
    for contestant, turns in zip(field, found, strict=True):
        reference = library if turns is ar else ar
        answers = [ids for turn in turns for ids in turn.ids]
        others = [ids for turn in reference for ids in turn.ids]
        limits = [turn.limit for turn in turns for _ in turn.ids]
        mismatches = [
            mismatch
            for prompt, ids, other, limit in zip(asked, answers, others, limits, strict=True)
            if (mismatch := find_mismatch(backbone, prompt, ids, other, limit)) is not None
        ]
        results.append(
            DecoderResult(
                contestant,
                len(batches[0]),
                turns,
                ar,
                LIBRARY if turns is ar else AR,
                mismatches,
                quality_of(answers, asked, loaded.tokenizer, backbone.eos_ids, task),
            )
        )
    return results


def _traits(
    loaded: Loaded,
    backbone: Backbone,
    batches: Sequence[Sequence[Prompt]],
    results: Sequence[DecoderResult],
    task: Task,
    base: Sequence[Traits],
) -> list[Traits]:
    asked = [prompt for batch in batches for prompt in batch]
    answers = [ids for turn in results[1].turns for ids in turn.ids]
    return traits_of(loaded, backbone, asked, answers, task, base)


def _costs(
    backbone: Backbone, batches: Sequence[Sequence[Prompt]], results: Sequence[DecoderResult]
) -> dict[int, Cost]:
    """What forwards of the sizes that the contestants ran cost, amid answers of the usual length."""
    asked = [prompt for batch in batches for prompt in batch]
    answers = [ids for turn in results[1].turns for ids in turn.ids]
    context = round(statistics.median(len(p.ids) + len(ids) / 2 for p, ids in zip(asked, answers, strict=True)))
    rows = len(batches[0])
    found = cost_ratios(backbone, [result.median_slots for result in results], context, rows=rows)
    return {slots: Cost(rows, slots, context, **figures) for slots, figures in found.items()}


def _finished(
    results: Sequence[DecoderResult],
    backbone: Backbone,
    batches: Sequence[Sequence[Prompt]],
    traits: list[Traits],
    costs: list[Cost],
) -> list[DecoderResult]:
    """With the cost of the forwards that each ran, added to `costs`, and what its requests were like."""
    here = _costs(backbone, batches, results)
    costs += here.values()
    ratios = [None if never_drafts(one.contestant) else here[one.median_slots].ratio for one in results]
    return [dataclasses.replace(one, cost_ratio=r, traits=traits) for one, r in zip(results, ratios, strict=True)]
