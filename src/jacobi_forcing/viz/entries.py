"""The decoders in two results, in one form whatever the kind, and whether the two can be compared at all."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from jacobi_forcing.errors import DataError
from jacobi_forcing.formats import Result

Form = Mapping[str, Any]
KINDS = ("bench", "run", "eval")
"""Kinds that can be compared."""


@dataclasses.dataclass(frozen=True)
class Request:
    """One request: generated tokens, forward passes, wall seconds."""

    tokens: int
    forwards: int
    seconds: float


@dataclasses.dataclass(frozen=True)
class Entry:
    """One decoder of one model.

    Attributes:
        place: What is compared with what: the model's place in its file.
        model: Its label.
        decoder: Its name.
        block_size: n; None where there is none.
        label: Settings that are not the defaults, in words.
        batch_size: Rows side by side.
        tpf: Tokens per forward.
        tps: Tokens per second.
        speedup: Over `ar` in the same run; 0 where `ar` was not measured.
        solve_rate: None where nothing was graded.
        solve_interval: Its 95 % interval.
        repetition_rate: Answers that end in a loop.
        exact: Answers that equal `ar`'s.
        of: Answers that were compared with it.
        requests: One by one, where they are known.
        asked: Which prompts they answer, where that is known.
        right: Item by item whether the answer is right, where that is known.
    """

    place: int
    model: str
    decoder: str
    block_size: int | None
    label: str
    batch_size: int
    tpf: float
    tps: float
    speedup: float
    solve_rate: float | None
    solve_interval: tuple[float, float] | None
    repetition_rate: float
    exact: int
    of: int
    requests: list[Request] = dataclasses.field(default_factory=list)
    asked: list[int] = dataclasses.field(default_factory=list)
    right: list[bool] | None = None

    @property
    def key(self) -> tuple[int, str, int | None, str, int]:
        """What has to agree for two to be compared."""
        return self.place, self.decoder, self.block_size, self.label, self.batch_size

    @property
    def name(self) -> str:
        """What sentences call it."""
        size = "" if self.block_size is None else f" n={self.block_size}"
        label = f" ({self.label})" if self.label else ""
        return f"{self.model}, {self.decoder}{size}{label}" + (
            f" at batch {self.batch_size}" if self.batch_size > 1 else ""
        )

    def to_dict(self) -> dict[str, Any]:
        """Its figures, for JSON."""
        names = ("model", "tpf", "tps", "speedup", "solve_rate", "solve_interval", "repetition_rate", "exact", "of")
        values = {name: getattr(self, name) for name in names}
        return {**values, "solve_interval": None if self.solve_interval is None else list(self.solve_interval)}


def common_ground(first: Result, second: Result) -> list[str]:
    """Check that two results were measured alike; returns what makes their speeds hard to compare.

    Raises:
        DataError: They were not.
    """
    if first.kind != second.kind or first.kind not in KINDS:
        raise DataError(
            "These results are of kinds that cannot be compared",
            seen=f"{first.kind} and {second.kind}",
            expected="two of " + " or two of ".join(KINDS),
        )
    one, other = _asked(first), _asked(second)
    unlike = [name for name in one if name in other and one[name] != other[name]]
    if unlike:
        name = unlike[0]
        raise DataError(
            f"These results were measured on different things: '{name}' differs",
            seen=f"{one[name]} and {other[name]}",
            remedy="measure both on the same prompts, with the same task and limit",
        )
    notes = [result.note for result in (first, second) if result.note is not None]
    machines = [{_machine(model) for model in _models(result)} for result in (first, second)]
    if machines[0] != machines[1]:
        said = " and ".join(str(sorted(map(str, machine))) for machine in machines)
        notes.append(f"The machines differ ({said}): only TPF and quality compare.")
    return notes


def _machine(model: Form) -> tuple[Any, ...]:
    """What speeds depend on beside the model and its decoder."""
    packed = ("weights packed",) if model.get("packed_weights") else ()
    return (model["device"], model["threads"], model["dtype"], *packed)


def _models(result: Result) -> list[Form]:
    """What holds decoders: models, or the tasks of an evaluation, as a model each."""
    if result.kind != "eval":
        return list(result.value["models"])
    return [
        {**result.value, **task, "label": task["task"], "model": result.value["model"]}
        for task in result.value["tasks"]
    ]


def _asked(result: Result) -> dict[str, Any]:
    """What was asked, in the words of the settings."""
    value = result.value
    if result.kind == "eval":
        names = ("items", "max_new_tokens", "fewshot", "stop_strings")
        tasks = {f"{name} of {task['task']}": task[name] for task in value["tasks"] for name in names}
        return tasks | {f"data of {task['task']}": task["data"]["sha256"] for task in value["tasks"]}
    if result.kind == "bench":
        prompts, models = value["prompts"], value["models"]
    else:
        evaluation = value["recipe"]["evaluation"] or {"prompts": {}}
        prompts, models = evaluation["prompts"], value["models"]
    if not models:
        raise DataError("Nothing was measured in one of these results", remedy="give the recipe an evaluation")
    alike = {f"prompts.{name}": setting for name, setting in prompts.items()}
    for name in ("prompts", "task", "max_new_tokens"):
        alike[f"{name} of the models"] = sorted({str(model[name]) for model in models})
    return alike


def entries(
    first: Result, second: Result, items: tuple[Sequence[Form], Sequence[Form]] = ((), ())
) -> tuple[list[Entry], list[Entry], list[str]]:
    """The decoders of both, and notes.

    Models, and tasks of evaluations, are matched by label where both have some in common, else by place.

    Args:
        first: One result.
        second: The other.
        items: Lines of `items.jsonl` beside each, of evaluations.

    Raises:
        DataError: Labels and numbers of models differ.
    """
    old, new = _models(first), _models(second)
    labels = [model["label"] for model in old]
    shared = [label for label in labels if label in [model["label"] for model in new]]
    notes = []
    if shared:
        pick = [{model["label"]: model for model in models} for models in (old, new)]
        alone = {model["label"] for model in [*old, *new]} - set(shared)
        notes += [f"The model {label} is in one of both only." for label in sorted(alone)]
        old, new = ([models[label] for label in dict.fromkeys(shared)] for models in pick)
    elif len(old) != len(new):
        raise DataError(
            "These results have no model in common",
            seen=f"{', '.join(labels)} and {', '.join(model['label'] for model in new)}",
            expected="the same labels, or as many models in both",
            remedy="measure both in one run: jforce bench --model BASE --compare MODEL --adapter DIR",
        )
    else:
        notes += [f"{a['label']} is compared with {b['label']}." for a, b in zip(old, new, strict=True)]
    return _entries(old, items[0]), _entries(new, items[1]), notes


def _entries(models: Sequence[Form], items: Sequence[Form]) -> list[Entry]:
    return [
        _entry(place, model, decoder, [line for line in items if _answers(line, model, decoder)])
        for place, model in enumerate(models)
        for decoder in model["decoders"]
    ]


def _answers(line: Form, task: Form, decoder: Form) -> bool:
    """Whether a line of an evaluation is this decoder's."""
    return bool(line["task"] == task["label"] and line["settings"] == decoder["settings"])


def _entry(place: int, model: Form, decoder: Form, items: Sequence[Form]) -> Entry:
    quality = model.get("quality") or decoder["quality"]
    interval, kept = quality.get("solve_rate_interval"), decoder.get("requests")
    requests = list(zip(kept["tokens"], kept["forwards"], kept["seconds"], strict=True)) if kept else []
    items = sorted(items, key=lambda line: int(line["item"]))
    requests = requests or [(line["tokens"], line["forwards"], line["seconds"]) for line in items]
    paired = decoder.get("paired") or {}
    return Entry(
        place=place,
        model=str(model["label"]),
        decoder=str(decoder["decoder"]),
        block_size=decoder["block_size"],
        label=decoder.get("label") or "",
        batch_size=int(decoder.get("batch_size", model.get("batch_size", 1))),
        tpf=float(decoder["tokens_per_forward"]),
        tps=float(decoder["tokens_per_second"]),
        speedup=float(decoder["speedup"] or 0.0),
        solve_rate=quality["solve_rate"],
        solve_interval=tuple(interval) if interval else None,
        repetition_rate=float(quality["repetition_rate"]),
        exact=int(decoder.get("exact", paired.get("exact", 0))),
        of=int(decoder.get("of", paired.get("of", 0))),
        requests=[Request(*figures) for figures in requests],
        asked=[line["item"] for line in items] or _prompts(model),
        right=[bool(line["right"]) for line in items] or None,
    )


def _prompts(model: Form) -> list[int]:
    """Which prompts a bench asked, where it says so."""
    known = model.get("items")
    return [int(item["prompt"]) for item in known] if isinstance(known, list) else []
