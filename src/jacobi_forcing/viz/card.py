"""A model card in Markdown, with the metadata that model hubs read, from a run's own figures."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import PurePath
from typing import Any

import yaml

from jacobi_forcing.bench.table import markdown
from jacobi_forcing.embedded import BUILTIN
from jacobi_forcing.errors import ArtefactError
from jacobi_forcing.viz.gather import Found
from jacobi_forcing.viz.payback import payback
from jacobi_forcing.viz.sections import Report, quality_line

_FULL = """from transformers import AutoModelForCausalLM, AutoTokenizer

name = "THIS-MODEL"  # the folder, or the name that it has on a hub
model, tokenizer = AutoModelForCausalLM.from_pretrained(name), AutoTokenizer.from_pretrained(name)
{inputs}
out = model.generate(**inputs, custom_generate=name, trust_remote_code=True, max_new_tokens=128)
print(tokenizer.decode(out[0], skip_special_tokens=True))
"""
_ADAPTER = """from transformers import AutoModelForCausalLM, AutoTokenizer

name, adapter = "{base}", "THIS-ADAPTER"  # the base, and the folder with adapter_model.safetensors
model, tokenizer = AutoModelForCausalLM.from_pretrained(name), AutoTokenizer.from_pretrained(name)
{inputs}
out = model.generate(**inputs, custom_generate=adapter, trust_remote_code=True, max_new_tokens=128)
print(tokenizer.decode(out[0], skip_special_tokens=True))
"""
_RAW = 'inputs = tokenizer(["…"], return_tensors="pt")'
_CHAT = """chats = [[{"role": "user", "content": "…"}]]  # as the prompts that it was trained on
inputs = tokenizer.apply_chat_template(chats, add_generation_prompt=True, return_dict=True, return_tensors="pt")"""


def card(found: Found, report: Report) -> str:
    """The model card of a run.

    Raises:
        ArtefactError: There is no report of a run: a card tells of a model that was trained.
    """
    if found.run is None:
        raise ArtefactError("A model card needs the report.json of a run", seen=", ".join(sorted(found.results)))
    run, recipe = found.run, found.run["recipe"]
    adapted = recipe.get("mode", "full") == "adapter"
    head = yaml.safe_dump(metadata(run), sort_keys=False, allow_unicode=True)
    kept = (
        "The base model's weights are as they were. An adapter beside them drafts, and every token is the base's own."
        if adapted
        else "The weights were trained further (Jacobi Forcing, arXiv 2512.14681), so the text may differ from that of "
        "the base. With these weights every decoder writes exactly what greedy decoding of them writes."
    )
    measured = markdown(run["models"]) if run["models"] else "Nothing was measured: the recipe has no evaluation.\n"
    cost = "\n".join(f"| {what} | {much} |" for what, much in payback(run))
    return f"""---
{head}---

# {found.name}

{_base(recipe)} that decodes several tokens a forward pass. {kept}

## What is to be expected

{_bullets(report.verdicts)}
{quality_line(run["models"]) if run["models"] else ""}

## Use

```python
{_use(run, adapted)}```

It needs `pip install jacobi-forcing`.{_without(adapted)} On a CPU, `jacobi_forcing.pack_weights(model)` makes
forwards of several tokens cheaper. Several prompts at once want `tokenizer.padding_side = "left"` and `padding=True`.

## Measured

{measured}
## Training

| what | how much |
| --- | --- |
{cost}

{_rounds(recipe)}
## Not measured

{_bullets(report.missing or ["Nothing is missing."])}
## Provenance

{_provenance(run["provenance"])}"""


def metadata(run: Mapping[str, Any]) -> dict[str, Any]:
    """The header of a card: only what the run knows. A licence is for its publisher to add."""
    recipe = run["recipe"]
    adapted = recipe.get("mode", "full") == "adapter"
    name, source = recipe["model"]["name"], recipe["prompts"]["source"]
    values: dict[str, Any] = {"library_name": "peft" if adapted else "transformers", "pipeline_tag": "text-generation"}
    if _on_hub(name):
        values |= {"base_model": name, "base_model_relation": "adapter" if adapted else "finetune"}
    if _on_hub(source) and not source.endswith((".jsonl", ".json")):
        values["datasets"] = [source]
    return {**values, "tags": ["jacobi-forcing", "parallel-decoding"]}


def _on_hub(name: str) -> bool:
    """Whether a name may be one on a hub: `owner/name`, and neither builtin nor a path."""
    return name != BUILTIN and name.count("/") == 1 and not name.startswith(("/", ".", "~"))


def _base(recipe: Mapping[str, Any]) -> str:
    name = recipe["model"]["name"]
    return f"`{name if _on_hub(name) or name == BUILTIN else PurePath(name).name}`"


def _use(run: Mapping[str, Any], adapted: bool) -> str:
    """Code that decodes with the settings saved beside the weights, on a prompt as those of the training."""
    recipe = run["recipe"]
    name = recipe["model"]["name"]
    inputs = _CHAT if recipe["prompts"].get("template") == "chat" else _RAW
    return (_ADAPTER if adapted else _FULL).format(base=name if _on_hub(name) else "THE-BASE", inputs=inputs)


def _without(adapted: bool) -> str:
    return "" if adapted else " Without it the folder loads as any other model and decodes one token a forward pass."


def _rounds(recipe: Mapping[str, Any]) -> str:
    said = []
    for number, entry in enumerate(recipe["rounds"], 1):
        own = f"AR weight {entry['ar_weight']:g}, mask {entry['mask']}, schedule {entry['schedule']}"
        if recipe.get("mode", "full") == "adapter":
            adapter = recipe["adapter"]
            own = (
                f"rank {adapter['rank']}, {adapter['lines_per_response']} lines a response, states {adapter['states']}"
            )
        said.append(
            f"round {number}: {entry['steps']} steps, n={entry['block_size']}, learning rate "
            f"{entry['learning_rate']:g}, {entry['optimizer']}, {own}"
        )
    return _bullets(said)


def _provenance(record: Mapping[str, Any]) -> str:
    commit = record.get("commit") or {}
    lines = [
        f"command: `{' '.join(record['argv'])}`",
        f"commit: {commit.get('hash', 'not known')}" + (" with changes" if commit.get("dirty") else ""),
        "versions: " + ", ".join(f"{name} {version}" for name, version in record["versions"].items()),
        f"seed: {record.get('seed')}",
        f"made: {record['created']}",
    ]
    return _bullets(lines)


def _bullets(items: list[str]) -> str:
    return "".join(f"- {item}\n" for item in items)
