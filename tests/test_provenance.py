"""Provenance: records fit to be published, and fingerprints that change exactly when the thing does."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from jacobi_forcing import provenance
from jacobi_forcing.errors import ArtefactError, DataError, ModelError


def tiny_model(seed: int = 0, **changes: object) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    settings = {
        "vocab_size": 32,
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "max_position_embeddings": 32,
    }
    return LlamaForCausalLM(LlamaConfig(**(settings | changes)))


def git(folder: Path, *arguments: str) -> str:
    identity = ["-c", "user.name=Test", "-c", "user.email=test@example.org", "-c", "commit.gpgsign=false"]
    done = subprocess.run(["git", "-C", str(folder), *identity, *arguments], capture_output=True, text=True, check=True)
    return done.stdout.strip()


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A repository with one committed file, `src/a.py`, and an ignored folder `env`."""
    (tmp_path / "src").mkdir()
    (tmp_path / "env").mkdir()
    (tmp_path / "src" / "a.py").write_text("x = 1\n")
    (tmp_path / "env" / "b.py").write_text("y = 1\n")
    (tmp_path / ".gitignore").write_text("env/\n")
    git(tmp_path, "init", "--quiet")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "--quiet", "-m", "first")
    return tmp_path


def test_a_record_survives_json_and_names_what_made_it() -> None:
    record = provenance.collect(seed=7, block_size=16, rates=(1e-3, 2e-3), note=None, nested={"a": [True, "b"]})
    assert json.loads(json.dumps(record)) == record
    assert record["seed"] == 7
    assert record["block_size"] == 16
    assert record["rates"] == [1e-3, 2e-3]
    assert record["nested"] == {"a": [True, "b"]}
    assert set(record["versions"]) == {"python", "torch", "transformers", "jacobi_forcing", "platform"}
    # The registry's name of a build may lack what the module adds, such as +cu130.
    assert torch.__version__.startswith(record["versions"]["torch"])
    assert record["versions"]["python"] == ".".join(map(str, sys.version_info[:3]))
    assert record["commit"] is None or set(record["commit"]) == {"hash", "dirty"}


def test_the_time_of_a_record_is_utc_in_whole_seconds() -> None:
    created = datetime.fromisoformat(provenance.collect()["created"])
    assert created.utcoffset() == timedelta(0)
    assert created.microsecond == 0
    assert abs(datetime.now(UTC) - created) < timedelta(minutes=1)


def test_arguments_lose_the_paths_of_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    outside = tmp_path / "elsewhere" / "model"
    inside = tmp_path / "here"
    inside.mkdir()
    monkeypatch.chdir(inside)
    argv = [
        str(tmp_path / "bin" / "jforce"),
        "run",
        str(inside / "runs" / "a.yaml"),
        str(outside),
        f"--model={outside}",
        f"--out={inside / 'x'}",
        "--data",
        "../data/test.jsonl",
        "--prompt=a = b",
        "what is 1/2?",
        str(inside / ".." / "elsewhere" / "model"),
    ]
    assert provenance.portable_argv(argv) == [
        "jforce",
        "run",
        "runs/a.yaml",
        "model",
        "--model=model",
        "--out=x",
        "--data",
        "../data/test.jsonl",
        "--prompt=a = b",
        "what is 1/2?",
        "model",
    ]


def test_a_path_behind_a_name_and_an_equals_sign_is_made_portable_too() -> None:
    argv = [
        "jforce",
        "--data",
        "gsm8k=/somewhere/else/test.jsonl",
        "--set",
        "prompts.source=/elsewhere/p.jsonl",
        "a = b",
    ]
    assert provenance.portable_argv(argv) == [
        "jforce",
        "--data",
        "gsm8k=test.jsonl",
        "--set",
        "prompts.source=p.jsonl",
        "a = b",
    ]


def test_extra_entries_lose_the_paths_of_this_machine_at_every_depth(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    model = tmp_path / "models" / "m"
    record = provenance.collect(model=model, recipe={"prompts": [str(tmp_path.parent / "p.jsonl")]})
    assert record["model"] == "models/m"
    assert record["recipe"] == {"prompts": ["p.jsonl"]}
    assert str(tmp_path) not in json.dumps({key: record[key] for key in ("model", "recipe")})


def test_an_entry_without_a_json_form_is_refused_by_name() -> None:
    with pytest.raises(DataError, match=r"'stats\.ids\[1\]'.*Tensor"):
        provenance.collect(stats={"ids": [1, torch.tensor(2)]})


def test_an_entry_that_would_hide_a_standard_one_is_refused() -> None:
    with pytest.raises(DataError, match="argv"):
        provenance.collect(argv=["forged"])


def test_the_commit_of_a_clean_and_of_a_changed_checkout(checkout: Path) -> None:
    head = git(checkout, "rev-parse", "HEAD")
    assert provenance.source_commit(checkout / "src") == {"hash": head, "dirty": False}
    (checkout / "notes.txt").write_text("untracked files do not count\n")
    assert provenance.source_commit(checkout / "src") == {"hash": head, "dirty": False}
    (checkout / "src" / "a.py").write_text("x = 2\n")
    assert provenance.source_commit(checkout / "src") == {"hash": head, "dirty": True}


def test_an_installed_package_does_not_take_the_commit_of_the_repository_around_it(checkout: Path) -> None:
    assert provenance.source_commit(checkout / "env") is None


def test_there_is_no_commit_outside_a_repository_or_before_the_first_one(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("x = 1\n")
    assert provenance.source_commit(tmp_path) is None
    git(tmp_path, "init", "--quiet")
    git(tmp_path, "add", ".")
    assert provenance.source_commit(tmp_path) is None


def test_a_missing_git_is_no_error(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(checkout))
    assert provenance.source_commit(checkout / "src") is None


def test_a_hook_of_another_repository_does_not_redirect_the_question(
    checkout: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    head = git(checkout, "rev-parse", "HEAD")
    monkeypatch.setenv("GIT_DIR", str(checkout / "nowhere"))
    assert provenance.source_commit(checkout / "src") == {"hash": head, "dirty": False}


def test_a_model_has_the_same_fingerprint_after_saving_and_loading(tmp_path: Path) -> None:
    for name, tied in (("tied", True), ("untied", False)):
        model = tiny_model(tie_word_embeddings=tied)
        model.save_pretrained(tmp_path / name)
        again = LlamaForCausalLM.from_pretrained(tmp_path / name)
        assert provenance.model_fingerprint(again) == provenance.model_fingerprint(model)


def test_a_model_fingerprint_changes_with_one_value_a_dtype_a_name_or_a_shape() -> None:
    model = tiny_model()
    prints = {provenance.model_fingerprint(model), provenance.model_fingerprint(tiny_model(seed=1))}
    prints.add(provenance.model_fingerprint(tiny_model().to(torch.bfloat16)))
    with torch.no_grad():
        model.model.norm.weight[3] += 1e-6
    prints.add(provenance.model_fingerprint(model))
    four = torch.nn.Linear(4, 1, bias=False)
    torch.nn.init.ones_(four.weight)
    prints.add(provenance.model_fingerprint(four))
    reshaped = torch.nn.Linear(2, 2, bias=False)
    torch.nn.init.ones_(reshaped.weight)
    prints.add(provenance.model_fingerprint(reshaped))
    renamed = torch.nn.Sequential(four)
    prints.add(provenance.model_fingerprint(renamed))
    assert len(prints) == 7
    assert all(len(value) == 64 for value in prints)


def test_a_fingerprint_does_not_depend_on_memory_layout_or_on_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    model = torch.nn.Linear(5, 3)
    expected = provenance.model_fingerprint(model)
    monkeypatch.setattr(provenance, "_CHUNK", 2)
    assert provenance.model_fingerprint(model) == expected
    model.weight = torch.nn.Parameter(model.weight.detach().t().contiguous().t())
    assert not model.weight.is_contiguous()
    assert provenance.model_fingerprint(model) == expected


@pytest.mark.gpu
def test_a_fingerprint_is_the_same_on_the_gpu() -> None:
    model = tiny_model()
    expected = provenance.model_fingerprint(model)
    assert provenance.model_fingerprint(model.to("cuda")) == expected


def test_a_model_without_values_has_no_fingerprint() -> None:
    with torch.device("meta"):
        model = torch.nn.Linear(2, 2)
    with pytest.raises(ModelError, match="meta"):
        provenance.model_fingerprint(model)


def write_files(folder: Path, files: dict[str, str]) -> Path:
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(content)
    return folder


def test_a_folder_fingerprint_depends_on_names_and_bytes_alone(tmp_path: Path) -> None:
    files = {"a.json": "1", "deep/b.txt": "2", "deep/c.txt": ""}
    first = write_files(tmp_path / "first", files)
    second = write_files(tmp_path / "second", dict(reversed(files.items())))
    os.utime(second / "a.json", (0, 0))
    expected = provenance.folder_fingerprint(first)
    assert provenance.folder_fingerprint(str(second)) == expected
    changed = [files | {"a.json": "2"}, files | {"d": ""}, {"a.json": "1", "deep/b.txt": "2"}]
    changed.append({"a.json": "1", "deep/bb.txt": "2", "deep/c.txt": ""})
    prints = {
        provenance.folder_fingerprint(write_files(tmp_path / str(index), content))
        for index, content in enumerate(changed)
    }
    assert len(prints | {expected}) == 5


def test_a_folder_of_links_counts_as_what_they_point_to(tmp_path: Path) -> None:
    real = write_files(tmp_path / "real", {"a": "1"})
    (tmp_path / "links").mkdir()
    (tmp_path / "links" / "a").symlink_to(real / "a")
    assert provenance.folder_fingerprint(tmp_path / "links") == provenance.folder_fingerprint(real)


def test_a_folder_fingerprint_leaves_out_what_it_is_told_to(tmp_path: Path) -> None:
    folder = write_files(tmp_path / "x", {"a": "1"})
    expected = provenance.folder_fingerprint(folder)
    write_files(folder, {"provenance.json": "{}", "deep/x.log": ""})
    assert provenance.folder_fingerprint(folder, ignore=("provenance.json", "*.log")) == expected


def test_a_folder_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(ArtefactError, match=r"missing.*nowhere"):
        provenance.folder_fingerprint(tmp_path / "nowhere")
    (tmp_path / "file").write_text("")
    with pytest.raises(ArtefactError, match="no folder"):
        provenance.folder_fingerprint(tmp_path / "file")
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "link").symlink_to(tmp_path / "gone")
    with pytest.raises(ArtefactError, match="link"):
        provenance.folder_fingerprint(tmp_path / "broken")
