"""Published adapters: what lies under `models/` is small, described and of known origin, and how it gets there."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file

import publish_adapter as publishing
import seen_unseen
from jacobi_forcing import DecodeConfig, generate
from jacobi_forcing.adapter_file import SETTINGS, WEIGHTS
from jacobi_forcing.config import ModelConfig, RecipeConfig
from jacobi_forcing.errors import ArtefactError
from jacobi_forcing.loading import load
from jacobi_forcing.recipe import load_recipe, run_recipe
from test_recipe_adapter import ADAPTER
from tiny_folder import save_prompts, save_tiny

ROOT = Path(__file__).resolve().parents[1]


ASKED = argparse.Namespace(
    **{"base_name": "owner/tiny", "base": None, "data": None, "extra": [], "remark": "Of a tiny base."},
    **{"block_size": 2, "prompts": 4, "max_new_tokens": 12, "batch_size": 2},
)


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("published")
    save_tiny(folder / "model")
    prompts = save_prompts(folder / "prompts.jsonl", 12)
    recipe = {**ADAPTER, "model": {**ADAPTER["model"], "name": str(folder / "model")}}
    recipe["prompts"] = {**recipe["prompts"], "source": str(prompts)}
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        run_recipe(load_recipe("recipe.yaml"))
        publishing.publish(Path("run"), Path("models/tiny"), ASKED)
        yield folder


def test_every_folder_under_models_is_in_order() -> None:
    """Of those that belong to the project: a base that somebody has fetched there does not."""
    command = ["git", "ls-files", "-z", "models"]
    listing = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if listing.returncode != 0:
        pytest.skip("not a git checkout, so there is no list of the project's files")
    for folder in sorted({ROOT / "models" / Path(name).parts[1] for name in listing.stdout.split("\0") if name}):
        assert publishing.faults(folder) == [], folder.name


def test_what_is_published_is_in_order_and_half_as_large(published: Path) -> None:
    place = published / "models/tiny"
    assert publishing.faults(place) == []
    weights = load_file(place / WEIGHTS)
    assert {weight.dtype for weight in weights.values()} == {torch.bfloat16}
    own = load_file(published / "run/model" / WEIGHTS)
    assert all(torch.equal(weight, own[name].bfloat16()) for name, weight in weights.items())
    assert json.loads((place / SETTINGS).read_text())["base_model_name_or_path"] == "owner/tiny"


def test_the_card_the_recipe_and_the_provenance_tell_of_the_run_and_of_no_machine(published: Path) -> None:
    place = published / "models/tiny"
    recipe = RecipeConfig.from_dict(yaml.safe_load((place / "recipe.yaml").read_text()))
    assert (recipe.model.name, recipe.prompts.source) == ("owner/tiny", "prompts.jsonl")
    assert recipe.rounds == load_recipe(published / "recipe.yaml").rounds
    text = (place / "README.md").read_text()
    assert yaml.safe_load(text.split("---\n")[1])["base_model"] == "owner/tiny"
    assert (
        "rounded to bfloat16. On 4 held-out prompts the texts equal the base's, 4 of 4, and `window` n=2 takes" in text
    )
    assert text.endswith(" Of a tiny base.\n")
    assert json.loads((place / "custom_generate/decode.json").read_text())["block_size"] == 2
    record = json.loads((place / "provenance.json").read_text())
    assert record["checked"]["bfloat16"]["equal_to_base"] == 4
    assert record["base"]["name"] == "owner/tiny"
    for path in place.rglob("*.*"):
        if path.suffix != ".safetensors":
            assert str(published) not in path.read_text()


def test_the_base_takes_it_and_decodes_as_before(published: Path) -> None:
    base, adapted = (
        load(ModelConfig(str(published / "model"), device="cpu", adapter=adapter)).model
        for adapter in (None, str(published / "models/tiny"))
    )
    assert all(part.dtype == torch.float32 for part in adapted.parameters())
    ids = torch.tensor([[5, 6, 7, 8]])
    expected = base.generate(ids, do_sample=False, max_new_tokens=20)  # type: ignore[operator]  # a mixin's
    found = generate(adapted, ids, decode=DecodeConfig("window", 8), do_sample=False, max_new_tokens=20)
    assert torch.equal(found, expected)


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda place: (place / "README.md").unlink(), "there is no README.md"),
        (lambda place: (place / "provenance.json").unlink(), "there is no provenance.json"),
        (lambda place: (place / "README.md").write_text("# Good"), "has no metadata"),
        (lambda place: (place / "README.md").write_text("---\ntags: [x]\n---\n"), "tells of no measurement"),
        (lambda place: (place / "weights.bin").write_bytes(b"x"), "is not safetensors"),
        (lambda place: (place / "more.txt").write_bytes(b"x" * 25_000_000), "are allowed"),
        (lambda place: (place / "provenance.json").write_text('{"argv": "/some/x"}'), "holds a path of the machine"),
        (lambda place: (place / "provenance.json").write_text("{}"), "does not tell 'versions'"),
    ],
)
def test_a_folder_that_lacks_something_is_told_of(published: Path, tmp_path: Path, spoil: object, said: str) -> None:
    place = tmp_path / "tiny"
    shutil.copytree(published / "models/tiny", place)
    assert callable(spoil)
    spoil(place)
    assert any(said in fault for fault in publishing.faults(place))


def test_a_run_that_is_none_of_an_adapter_is_refused(published: Path, tmp_path: Path) -> None:
    report = json.loads((published / "run/report.json").read_text())
    report["recipe"]["mode"] = "full"
    with pytest.raises(ArtefactError, match=r"no run of an adapter; seen: no report\.json .* mode: adapter"):
        publishing.publish(tmp_path, tmp_path / "out", ASKED)
    (tmp_path / "report.json").write_text(json.dumps(report))
    with pytest.raises(ArtefactError, match=r"no run of an adapter; seen: mode: full; .* mode: adapter"):
        publishing.publish(tmp_path, tmp_path / "out", ASKED)
    assert not (tmp_path / "out").exists()


def test_only_an_earlier_publication_is_replaced(published: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def loaded(*_: object) -> None:
        raise AssertionError("the target is looked at first")

    monkeypatch.setattr(publishing, "load", loaded)
    monkeypatch.chdir(published)
    for target, said in (("models", "seen: tiny;"), ("recipe.yaml", "seen: a file;"), (".", "seen: the current")):
        with pytest.raises(ArtefactError, match=said):
            publishing.publish(Path("run"), Path(target), ASKED)
    assert publishing.faults(published / "models/tiny") == []
    for target in ("models/tiny", "models/new"):
        publishing.refuse_other(Path(target))


def test_the_script_ends_in_one_line_where_the_input_is_wrong(published: Path) -> None:
    command = [sys.executable, str(ROOT / "scripts/publish_adapter.py"), "run", "models", "--base-name", "owner/tiny"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(command, cwd=published, env=environment, capture_output=True, text=True, check=False)
    (line,) = done.stderr.splitlines()
    assert done.returncode == 2 and line.startswith("Error: 'models' holds something else than a published adapter")


def test_a_run_is_measured_on_what_it_learnt_from_and_on_what_it_did_not(
    published: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    data = published / "prompts.jsonl"
    command = ["seen_unseen.py", "run", "--base", str(published / "model"), "--seen", str(data), "--unseen", str(data)]
    monkeypatch.setattr(sys, "argv", [*command, "--limit", "2", "--block-size", "4"])
    seen_unseen.main()
    *said, last = capsys.readouterr().out.splitlines()
    lines = json.loads(last)["lines"]
    assert [(line["prompts"], line["answers"]) for line in lines] == [("seen", 2), ("unseen", 2)]
    assert all(line["tokens_per_forward"] >= 1.0 for line in lines)
    # Each is what decoding those prompts takes.
    recipe = load_recipe("recipe.yaml")
    assert recipe.evaluation is not None
    loaded = load(ModelConfig(str(published / "model"), device="cpu", adapter=str(published / "run/model")))
    for line, offset in zip(lines, (recipe.prompts.offset, recipe.evaluation.prompts.offset), strict=True):
        asked = [json.loads(text)["question"] for text in data.read_text().splitlines()][offset : offset + 2]
        forwards = tokens = 0
        for text in asked:
            inputs = loaded.tokenizer([text], return_tensors="pt")["input_ids"]
            out = generate(
                loaded.model,
                inputs,
                decode=DecodeConfig(block_size=4),
                max_new_tokens=recipe.evaluation.max_new_tokens,
                return_dict_in_generate=True,
            )
            forwards, tokens = forwards + out.stats.forwards, tokens + out.stats.tokens
        assert line["tokens_per_forward"] == round(tokens / forwards, 4)
    assert len(said) == 2 and said[0].startswith("seen: TPF ")


def test_seen_and_unseen_want_a_finished_run(tmp_path: Path) -> None:
    with pytest.raises(ArtefactError):
        seen_unseen.recipe_of(argparse.Namespace(run=tmp_path))
