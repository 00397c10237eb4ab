"""What a search found: every setting's speed beside its exactness, surfaces, and the setting to take."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from jacobi_forcing.backbone import Backbone
from jacobi_forcing.bench.contestants import AR, label_of
from jacobi_forcing.bench.halving import Step
from jacobi_forcing.bench.journal import Journal, Place, rate
from jacobi_forcing.bench.roofline import device_name, model_form
from jacobi_forcing.bench.surface import fit_surface
from jacobi_forcing.config import DecodeConfig, Task
from jacobi_forcing.evaluate.quality import quality_of
from jacobi_forcing.loading import Loaded
from jacobi_forcing.trajectories.prompts import Prompt

Calls = Mapping[Place, Mapping[str, Any]]


def judged(
    loaded: Loaded,
    prompts: Sequence[Prompt],
    settings: Sequence[DecodeConfig],
    steps: Mapping[str, Sequence[Step]],
    journal: Journal,
    task: Task,
) -> dict[str, Any]:
    """Judge the searches that were made; where there are two, the first one counts and the other is held against it.

    Args:
        loaded: Model and tokenizer.
        prompts: All that were asked.
        settings: What was searched, `ar` first.
        steps: Of each search, by its name.
        journal: Their calls.
        task: How answers are graded.

    Returns:
        The part of a result that depends on measurements.
    """
    backbone = Backbone(loaded.model)
    name, *others = steps
    calls = journal.of(name)
    found = [_setting(index, config, calls) for index, config in enumerate(settings)]
    rungs = {which: [_rung(step) for step in made] for which, made in steps.items()}
    best = _best(found, [0, *steps[name][-1].left])
    ar = [ids for batch in range(len({place[1] for place in calls})) for ids in calls[0, batch, 0]["ids"]]
    return {
        **model_form(backbone),
        "device_name": device_name(backbone.device),
        "search": name,
        "runs": {which: len(journal.of(which)) for which in steps},
        "rungs": rungs,
        "quality": quality_of(ar, prompts, loaded.tokenizer, backbone.eos_ids, task).to_dict(),
        "settings": found,
        "surfaces": _surfaces(found),
        "best": best,
        "comparison": _comparison(found, best, steps[others[0]], settings, journal.of(others[0])) if others else None,
    }


def _rung(step: Step) -> dict[str, Any]:
    return {
        "batches": step.rung.batches,
        "repeats": step.rung.repeats,
        "measured": step.measured,
        "left": step.left,
    }


def _setting(index: int, config: DecodeConfig, calls: Calls) -> dict[str, Any]:
    """One setting over all of its calls. Its TPS is told for the prompts that `ar` was measured on, all of them.

    A setting that was dropped early has seen few prompts: its speed-up over `ar` on these stands for its speed.
    """
    places = sorted({(batch, repeat) for one, batch, repeat in calls if one == index})
    whole = sorted({(batch, repeat) for one, batch, repeat in calls if one == 0})
    own, pace, ar = rate(calls, index, places), rate(calls, 0, places), rate(calls, 0, whole)
    assert own is not None and pace is not None and ar is not None
    mine = [calls[index, *place] for place in places]
    once = [calls[index, batch, repeat] for batch, repeat in places if repeat == 0]
    wrong = {kind: sum(call[kind] for call in once) for kind in ("near_ties", "faults")}
    # A fault in any of the repeats is a fault.
    wrong["faults"] = max(wrong["faults"], *(call["faults"] for call in mine))
    of = sum(call["of"] for call in once)
    return {
        "index": index,
        "decoder": config.decoder,
        "block_size": None if config.decoder == AR else config.block_size,
        "label": label_of(config),
        "settings": config.to_dict(),
        "batches": len(once),
        "runs": len(mine),
        "tokens": sum(call["tokens"] for call in once),
        "forwards": sum(call["forwards"] for call in once),
        "tokens_per_forward": sum(call["tokens"] for call in once) / sum(call["forwards"] for call in once),
        "speedup": own / pace,
        "tokens_per_second": own / pace * ar,
        "exact": of - wrong["near_ties"] - wrong["faults"],
        **wrong,
        "of": of,
    }


def _best(found: Sequence[dict[str, Any]], among: Sequence[int]) -> dict[str, Any]:
    """The fastest without a fault, `ar` included: where nothing is faster, it is the setting to take."""
    right = [found[index] for index in among if not found[index]["faults"]]
    return max(right, key=lambda one: float(one["tokens_per_second"]))


def _comparison(
    found: Sequence[dict[str, Any]],
    best: dict[str, Any],
    steps: Sequence[Step],
    settings: Sequence[DecodeConfig],
    calls: Calls,
) -> dict[str, Any]:
    """How near to the full grid's best the short search's setting comes, by the full grid's own runs.

    Which setting the short search picks is told by its own runs alone.
    """
    among = [0, *steps[-1].left]
    own = {index: _setting(index, settings[index], calls) for index in among}
    picked = found[max(among, key=lambda index: float(own[index]["tokens_per_second"]))]
    share = picked["tokens_per_second"] / best["tokens_per_second"]
    return {"picked": picked["index"], "best": best["index"], "ratio": share}


def _surfaces(found: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """A surface for each decoder with candidates, K and r; `window` is `recycle` without candidates."""
    families: dict[tuple[str, int, float], list[tuple[int, int, float]]] = {}
    right = [one for one in found if not one["faults"]]
    windows = [one for one in right if one["decoder"] == "window"]
    for one in right:
        if one["decoder"] in ("recycle", "multiblock"):
            config = one["settings"]
            key = (one["decoder"], config["num_blocks"], config["spawn_ratio"])
            families.setdefault(key, []).append(_point(one, config["candidates"]))
    for key, points in families.items():
        if key[0] == "recycle":
            points += [_point(one, 0) for one in windows]
    surfaces = []
    for (decoder, blocks, ratio), points in families.items():
        surface = fit_surface(sorted(points))
        if surface is not None:
            only = {"num_blocks": blocks, "spawn_ratio": ratio} if decoder == "multiblock" else {}
            measured = [list(point) for point in sorted(points)]
            surfaces.append({"decoder": decoder, **only, "measured": measured, **surface.to_dict()})
    return surfaces


def _point(one: Mapping[str, Any], candidates: int) -> tuple[int, int, float]:
    return int(one["block_size"]), candidates, float(one["tokens_per_second"])
