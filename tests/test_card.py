from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from importlib import metadata
from importlib.metadata import version
from pathlib import Path

import pytest
import yaml
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, dynamic_module_utils

from jacobi_forcing import DecodeConfig, GatedAdapter, save_custom_generate
from jacobi_forcing.errors import ArtefactError
from jacobi_forcing.viz.card import card
from jacobi_forcing.viz.gather import gather
from jacobi_forcing.viz.sections import build
from result_forms import Form, decoder, model, run, save_run
from tiny_folder import save_tiny

BASE = model("base", decoder("window", 16, tpf=1.1, tps=60.0, cost=1.8))
TRAINED = model("round 1", decoder("window", 16, tpf=4.0, tps=250.0, cost=1.6))


@pytest.fixture
def place(tmp_path: Path) -> Path:
    return save_run(tmp_path / "my-run", run(BASE, TRAINED))


def adapted(name: str, template: str = "raw") -> Form:
    """The report of a run that trained an adapter beside a base of this name."""
    report = run(BASE, TRAINED)
    changes: Form = {"mode": "adapter"}
    for part, change in (("model", {"name": name}), ("prompts", {"template": template})):
        changes[part] = {**report["recipe"][part], **change}
    return {**report, "recipe": {**report["recipe"], **changes}}


def shown_code(text: str) -> str:
    (code,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    return str(code).replace("max_new_tokens=128", "max_new_tokens=5")


def test_a_card_begins_with_what_hubs_read_and_has_table_cost_and_provenance(place: Path) -> None:
    found = gather(place)
    text = card(found, build(found))
    head = yaml.safe_load(text.split("---")[1])
    assert head == {
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "base_model": "owner/base",
        "base_model_relation": "finetune",
        "datasets": ["owner/prompts"],
        "tags": ["jacobi-forcing", "parallel-decoding"],
    }
    for part in (
        "| round 1 | window |",
        "| break-even | 20,000 generated",
        "command: `jforce run`",
        "custom_generate=name",
    ):
        assert part in text
    with pytest.raises(ArtefactError, match="needs the report"):
        found.run = None
        card(found, build(found))


def test_a_card_of_an_adapter_says_that_the_text_is_the_bases(tmp_path: Path) -> None:
    found = gather(save_run(tmp_path / "run", adapted("/x/my-base")))
    text = card(found, build(found))
    assert yaml.safe_load(text.split("---")[1])["library_name"] == "peft"
    assert "every token is the base's own" in text and "custom_generate=adapter" in text
    assert "/x/" not in text


@pytest.fixture
def package_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The library copies a model's code into a cache, and looks for the package among those that are installed."""
    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(metadata, "version", lambda name: "99" if name == "jacobi-forcing" else version(name))
    yield
    for name in [name for name in sys.modules if name.startswith("transformers_modules")]:
        del sys.modules[name]


def check_shown(code: str) -> int:
    """Run it, see that it wrote something, and return the length of its prompt."""
    names: Form = {}
    exec(code, names)
    length = int(names["inputs"]["input_ids"].shape[1])
    assert names["out"].shape[1] > length
    return length


def test_the_code_that_a_card_shows_works(place: Path, tmp_path: Path, package_found: None) -> None:
    folder = save_tiny(tmp_path / "tiny")
    save_custom_generate(folder, DecodeConfig(block_size=4))
    found = gather(place)
    code = shown_code(card(found, build(found))).replace("THIS-MODEL", str(folder))
    check_shown(code)


def test_the_code_that_a_card_of_an_adapter_shows_works_with_the_saved_settings(
    tmp_path: Path, package_found: None
) -> None:
    folder = save_tiny(tmp_path / "tiny")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = "{% for one in messages %}<{{ one.role }}> {{ one.content }}{% endfor %}"
    tokenizer.save_pretrained(folder)
    plain = AutoModelForCausalLM.from_pretrained(folder)
    assert isinstance(plain, PreTrainedModel)
    GatedAdapter.attach(plain, rank=2).save(tmp_path / "adapter", base="base", decode=DecodeConfig(block_size=4))
    lengths = []
    for template in ("raw", "chat"):
        found = gather(save_run(tmp_path / template, adapted("/x/my-base", template)))
        code = shown_code(card(found, build(found)))
        code = code.replace("THIS-ADAPTER", str(tmp_path / "adapter")).replace("THE-BASE", str(folder))
        lengths.append(check_shown(code))
    assert lengths[1] > lengths[0]
