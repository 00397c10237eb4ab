"""Publish the adapter of a run: at most 25 MB under `models/`, with a card, the exact recipe and its provenance.

    python scripts/publish_adapter.py runs/smollm2-orders-adapter models/smollm2-orders \
        --base-name HuggingFaceTB/SmolLM2-135M-Instruct

The weights are rounded to bfloat16, which halves them (rank 32 on SmolLM2-135M: 9.8 M weights, 19.5 MB). Rounding can
change drafts, and so the speed, but no text: the line that verifies never runs through the adapter. Before anything is
written, both are decoded on a few held-out prompts and compared with the base. The folder appears only when it is whole
and without faults (`faults`, which a test asks about every folder under `models/`).
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import yaml

from jacobi_forcing import provenance
from jacobi_forcing.adapter import GatedAdapter
from jacobi_forcing.adapter_file import SETTINGS, WEIGHTS
from jacobi_forcing.backbone import Backbone
from jacobi_forcing.config import DecodeConfig, RecipeConfig
from jacobi_forcing.entry import DECODE, FOLDER
from jacobi_forcing.errors import ArtefactError, guarded
from jacobi_forcing.evaluate.quality import answers
from jacobi_forcing.files import check_new_folder, contents, new_folder, read_json, write_json, write_text
from jacobi_forcing.loading import Loaded, load
from jacobi_forcing.trajectories.prompts import Prompt, load_prompts
from jacobi_forcing.viz.card import card
from jacobi_forcing.viz.gather import Found, gather
from jacobi_forcing.viz.sections import build

MOST = 25_000_000
"""Bytes of a published folder."""
CARD, RECIPE, PROVENANCE = "README.md", "recipe.yaml", "provenance.json"
_PATH = re.compile(r"(?:^|[\s\"'=`(])/[\w.-]+/", re.MULTILINE)
"""An absolute path, as it stands in text."""
_MADE = ("argv", "commit", "versions", "created", "base", "rounded_to", "checked")


def faults(folder: Path) -> list[str]:
    """What a published folder lacks or has too much of; nothing where it is in order."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    size = sum(path.stat().st_size for path in files)
    found = [f"{size} bytes, and {MOST} are allowed"] if size > MOST else []
    found += [f"{path.name} is not safetensors" for path in files if path.suffix in (".bin", ".pt", ".pth", ".pkl")]
    needed = (CARD, RECIPE, PROVENANCE, SETTINGS, WEIGHTS)
    missing = [name for name in needed if not (folder / name).is_file()]
    if missing:
        return [*found, *(f"there is no {name}" for name in missing)]
    text = (folder / CARD).read_text(encoding="utf-8")
    header = yaml.safe_load(text.split("---\n")[1]) if text.startswith("---\n") else None
    if not isinstance(header, dict) or "tags" not in header:
        found.append(f"{CARD} has no metadata that hubs read")
    if "## Measured" not in text:
        found.append(f"{CARD} tells of no measurement")
    record = json.loads((folder / PROVENANCE).read_text(encoding="utf-8"))
    found += [f"{PROVENANCE} does not tell '{name}'" for name in _MADE if name not in record]
    RecipeConfig.from_dict(yaml.safe_load((folder / RECIPE).read_text(encoding="utf-8")))
    for path in (folder / name for name in (CARD, RECIPE, PROVENANCE, SETTINGS)):
        if _PATH.search(path.read_text(encoding="utf-8")):
            found.append(f"{path.name} holds a path of the machine that it was made on")
    return found


def public_recipe(recipe: dict[str, Any], base: str) -> RecipeConfig:
    """The recipe of a run with the base's public name, and without paths of this machine."""
    value = RecipeConfig.from_dict(recipe)
    named = dataclasses.replace(value.model, name=base)
    prompts = dataclasses.replace(value.prompts, source=provenance.portable(value.prompts.source))
    evaluation = value.evaluation
    if evaluation is not None:
        source = provenance.portable(evaluation.prompts.source)
        evaluation = dataclasses.replace(evaluation, prompts=dataclasses.replace(evaluation.prompts, source=source))
    output = provenance.portable(value.output)
    return dataclasses.replace(value, model=named, prompts=prompts, evaluation=evaluation, output=output)


def decoded(loaded: Loaded, prompts: list[Prompt], asked: argparse.Namespace, decode: DecodeConfig | None) -> Any:
    """Ids of greedy answers, and tokens per forward."""
    backbone = Backbone(loaded.model)
    ids, stats = answers(
        backbone, prompts, max_new_tokens=asked.max_new_tokens, batch_size=asked.batch_size, decode=decode
    )
    return ids, round(stats.tokens_per_forward, 4)


def checked(
    loaded: Loaded, original: Path, rounded: Path, recipe: RecipeConfig, decode: DecodeConfig, asked: argparse.Namespace
) -> dict[str, Any]:
    """Decode held-out prompts by the base, and drafted for by both adapters; refuses where a text differs."""
    held_out = recipe.evaluation.prompts if recipe.evaluation is not None else recipe.prompts
    held_out = dataclasses.replace(held_out, source=asked.data or held_out.source)
    context = Backbone(loaded.model).context_length
    prompts = load_prompts(dataclasses.replace(held_out, limit=asked.prompts), loaded.tokenizer, context_length=context)
    expected, _ = decoded(loaded, prompts, asked, None)
    told: dict[str, Any] = {"prompts": len(prompts), "decode": decode.to_dict()}
    for name, folder in (("float32", original), ("bfloat16", rounded)):
        adapter = GatedAdapter.load(loaded.model, folder)
        ids, tpf = decoded(loaded, prompts, asked, decode)
        adapter.detach()
        same = sum(mine == other for mine, other in zip(ids, expected, strict=True))
        told[name] = {"tokens_per_forward": tpf, "equal_to_base": same}
        if same < len(prompts):
            raise SystemExit(f"{len(prompts) - same} of {len(prompts)} texts are not the base's; seen with {name}")
    return told


def describe(found: Found, base: str, told: dict[str, Any], remark: str = "") -> str:
    """The run's model card, with what publishing changed, and a remark where there is one."""
    assert found.run is not None
    run = {**found.run, "recipe": {**found.run["recipe"], "model": {**found.run["recipe"]["model"], "name": base}}}
    one, other = told["float32"], told["bfloat16"]
    return card(dataclasses.replace(found, run=run), build(found)) + (
        f"\n## As published\n\nThe adapter's weights are rounded to bfloat16. On {told['prompts']} held-out prompts "
        f"the texts equal the base's, {other['equal_to_base']} of {told['prompts']}, and `{told['decode']['decoder']}` "
        f"n={told['decode']['block_size']} takes {other['tokens_per_forward']:.2f} tokens a forward (before rounding "
        f"{one['tokens_per_forward']:.2f}).{' ' * bool(remark)}{remark}\n"
    )


def refuse_other(target: Path) -> None:
    """Refuse a target that holds anything but an earlier publication: publishing replaces what is there.

    Raises:
        ArtefactError: Says what is there.
    """
    check_new_folder(target)
    there = contents(target)
    if there and not all((target / name).is_file() for name in (PROVENANCE, RECIPE, SETTINGS)):
        raise ArtefactError(
            f"'{target}' holds something else than a published adapter, and would be replaced",
            seen=there,
            expected=f"no folder, an empty one, or an earlier publication ({PROVENANCE}, {RECIPE}, {SETTINGS})",
            remedy="name the adapter's own folder, such as models/NAME",
        )


def adapter_run(run: Path, extra: list[Path]) -> tuple[Found, dict[str, Any]]:
    """What the folder of a run of an adapter holds, and its recipe.

    Raises:
        ArtefactError: The folder is no such run's.
    """
    found = gather(run, extra) if (run / "report.json").is_file() else None
    recipe: dict[str, Any] = {} if found is None or found.run is None else found.run["recipe"]
    if found is None or recipe.get("mode") != "adapter":
        raise ArtefactError(
            f"'{run}' is no run of an adapter",
            seen=f"mode: {recipe['mode']}" if "mode" in recipe else "no report.json of a run",
            expected="the output of `jforce run` with a recipe of mode: adapter, run to its end",
            remedy="name its folder, the one that report.json lies in",
        )
    return found, recipe


def publish(run: Path, target: Path, asked: argparse.Namespace) -> dict[str, Any]:
    """Fill the folder; returns what the check said."""
    refuse_other(target)
    found, trained = adapter_run(run, asked.extra)
    model = run / "model"
    recipe = RecipeConfig.from_dict(trained)
    settings = dataclasses.replace(recipe.model, name=asked.base or recipe.model.name, adapter=None)
    decode = DecodeConfig.from_dict(read_json(model / FOLDER / DECODE))
    decode = dataclasses.replace(decode, block_size=asked.block_size or decode.block_size)
    loaded = load(settings)
    with tempfile.TemporaryDirectory() as temporary:
        adapter = GatedAdapter.load(loaded.model, model)
        adapter.save(temporary, asked.base_name, decode, dtype=torch.bfloat16)
        adapter.detach()
        told = checked(loaded, model, Path(temporary), recipe, decode, asked)
        with new_folder(target) as folder:
            adapter = GatedAdapter.load(loaded.model, temporary)
            adapter.save(folder, asked.base_name, decode, dtype=torch.bfloat16)
            adapter.detach()
            made = {name: value for name, value in read_json(model / PROVENANCE).items() if name != "model"}
            fingerprint = provenance.model_fingerprint(loaded.model)
            base = {"name": asked.base_name, "fingerprint": fingerprint}
            write_json(folder / PROVENANCE, {**made, "base": base, "rounded_to": "bfloat16", "checked": told})
            write_text(folder / RECIPE, public_recipe(trained, asked.base_name).to_yaml())
            write_text(folder / CARD, describe(found, asked.base_name, told, asked.remark))
            wrong = faults(folder)
            if wrong:
                raise SystemExit("Not published: " + "; ".join(wrong))
    return told


def main() -> None:
    """Publish one run's adapter; the last line is JSON."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("run", type=Path, help="output folder of a recipe with mode: adapter")
    parser.add_argument("target", type=Path, help="folder to publish in, such as models/NAME; an old one is replaced")
    parser.add_argument("--base-name", required=True, help="public name of the base, for card and adapter_config.json")
    parser.add_argument("--base", help="folder of the base on this machine; by default the one of the run")
    parser.add_argument(
        "--with", dest="extra", type=Path, action="append", default=[], help="a result file for the card"
    )
    parser.add_argument("--data", help="file of held-out prompts; by default the recipe's, looked for here")
    parser.add_argument("--block-size", type=int, help="n that decodes by default; otherwise the run's")
    parser.add_argument("--remark", default="", help="a sentence for the end of the card, such as one about the base")
    parser.add_argument("--prompts", type=int, default=8, help="held-out prompts to compare both adapters on")
    parser.add_argument("--max-new-tokens", type=int, default=96)
    parser.add_argument("--batch-size", type=int, default=4)
    asked = parser.parse_args()
    told = publish(asked.run, asked.target, asked)
    size = sum(path.stat().st_size for path in asked.target.rglob("*") if path.is_file())
    print(json.dumps({"kind": "published", "folder": asked.target.name, "bytes": size, "checked": told}))


if __name__ == "__main__":
    sys.exit(guarded(main))
