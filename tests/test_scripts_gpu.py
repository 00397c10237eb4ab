"""The run of SmolLM2 on a lent GPU: what travels there and back, its limits of time, and the whole path on a CPU."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import carried
import gpu_smollm2
from gpu_clock import OutOfTimeError, Pace, within
from gpu_plan import TINY, Plan, Sizes
from gpu_prepare import wanted
from jacobi_forcing.adapter import GatedAdapter
from jacobi_forcing.config import ModelConfig, RecipeConfig
from jacobi_forcing.embedded import BUILTIN, base_folder
from jacobi_forcing.loading import load
from jacobi_forcing.recipe.settings import recipe_of
from tiny_folder import save_prompts


def call(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["gpu_smollm2.py", *arguments])
    return gpu_smollm2.main()


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkout in which `runs/` is ignored; the working folder."""
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    (tmp_path / ".gitignore").write_text("runs/\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_file_in_parts_comes_back_whole(tmp_path):
    file = tmp_path / "base"
    file.write_bytes(bytes(range(256)) * 41)
    sizes = carried.sizes_of(file.stat().st_size, 4000)
    assert len(sizes) == 3 and max(sizes) - min(sizes) <= 1
    folders = [tmp_path / str(index) for index in range(3)]
    manifest = carried.split(file, list(zip(folders, sizes, strict=True)))
    joined = carried.join(json.loads(json.dumps(manifest)), folders[::-1], tmp_path / "new" / "base")
    assert joined.read_bytes() == file.read_bytes()


def test_a_folder_travels_in_one_file(tmp_path):
    folder = tmp_path / "folder"
    for name in ("a.txt", "deep/er/b.bin"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(name.encode())
    (folder / "empty").mkdir()
    back = carried.unpack(carried.pack(folder, tmp_path / "folder.tar"), tmp_path / "back")
    assert {path.relative_to(back).as_posix() for path in back.rglob("*")} == {
        *("a.txt", "deep", "deep/er", "deep/er/b.bin", "empty")
    }
    assert (back / "deep/er/b.bin").read_bytes() == b"deep/er/b.bin"


@pytest.mark.parametrize(("name", "kind"), [("../x", tarfile.REGTYPE), ("/x", tarfile.REGTYPE), ("x", tarfile.SYMTYPE)])
def test_a_file_that_leads_out_of_the_folder_is_refused(tmp_path, name, kind):
    with tarfile.open(tmp_path / "f.tar", "w") as archive:
        entry = tarfile.TarInfo(name)
        entry.type, entry.linkname = kind, "/etc"
        archive.addfile(entry)
    with pytest.raises(SystemExit, match="no plain file or folder within"):
        carried.unpack(tmp_path / "f.tar", tmp_path / "back")
    assert {path.name for path in tmp_path.iterdir()} == {"f.tar"}


def test_a_damaged_and_a_missing_part_are_named(tmp_path):
    file = tmp_path / "base"
    file.write_bytes(b"a" * 10)
    manifest = carried.split(file, [(tmp_path / "one", 4), (tmp_path / "two", 6)])
    part = tmp_path / "two" / "base.2"
    part.write_bytes(b"aaaaab")
    with pytest.raises(SystemExit, match=r"base\.2 is damaged; sha256"):
        carried.join(manifest, [tmp_path / "one", tmp_path / "two"], tmp_path / "whole")
    part.unlink()
    with pytest.raises(SystemExit, match=r"base\.2 is missing.*first call"):
        carried.join(manifest, [tmp_path / "one", tmp_path / "two"], tmp_path / "whole")
    assert not (tmp_path / "whole").exists()


def test_parts_that_do_not_make_up_the_file_are_refused(tmp_path):
    (tmp_path / "base").write_bytes(b"a" * 10)
    with pytest.raises(ValueError, match="do not make up 10"):
        carried.split(tmp_path / "base", [(tmp_path, 4), (tmp_path, 5)])


def test_work_is_interrupted_where_its_time_ends_and_older_limits_stay():
    with pytest.raises(OutOfTimeError, match="after 100 s"), within(100):
        with pytest.raises(OutOfTimeError, match="after 0 s"), within(0.05):
            time.sleep(5)
        raise OutOfTimeError("cut short after 100 s")


def test_the_pace_is_that_of_the_last_work_without_its_beginning(monkeypatch):
    now = iter([0.0, 9.0, 10.0, 12.0, 14.0, 20.0, 21.0])
    monkeypatch.setattr(time, "perf_counter", lambda: next(now))
    pace = Pace()
    for done in (1, 2, 3, 4, 5):
        pace.progress(done, 5)
    assert pace.seconds == pytest.approx(5 / 3)
    pace.progress(1, 9)
    assert pace.seconds is None, "other work has begun"
    pace.progress(2, 9)
    assert pace.seconds == 1.0


def plan(carried: Path, sizes: Sizes) -> Plan:
    return Plan(BUILTIN, "cpu", Path("runs/work"), carried, sizes)


@pytest.mark.parametrize("mode", ["adapter", "full"])
def test_rounds_fill_the_time_and_are_recipes(tmp_path, mode):
    taken = {"collect-1": {"seconds": 25.6}, "train-1": {"seconds": 6.0}}
    made, sizes = plan(tmp_path, Sizes()), Sizes()
    rounds = made.rounds("orders", mode, 308.0, 0.25, taken)
    recipe = recipe_of(made.recipe("orders", mode, rounds))
    assert isinstance(recipe, RecipeConfig) and recipe.model.dtype == "bfloat16"
    assert [settings.block_size for settings in recipe.rounds] == [16, 32]
    assert recipe.rounds[1].prompts_offset == recipe.rounds[0].prompts_limit
    steps = sum(settings.steps or 0 for settings in recipe.rounds)
    # 4 s are fixed; a step takes 0.25 s, and 0.1 s to collect each of the 8 new responses that it brings along.
    begin = 2 * (6.0 - sizes.pace_steps * 0.25)
    assert steps == int((308.0 - begin) / (0.25 + 0.1 * 8))
    assert made.rounds("orders", mode, 0.0, 0.25, taken)[1]["steps"] == 1, "however little there is"


def test_problems_that_were_carried_are_a_second_domain(tmp_path, repository, monkeypatch):
    problems = save_prompts(tmp_path / "problems.jsonl", 9)
    prepare = ["prepare", "--model", str(base_folder()), "--wheels", "--gsm8k", str(problems)]
    with pytest.raises(SystemExit, match="go together"):
        call(monkeypatch, *prepare)
    call(monkeypatch, *prepare, "--gsm8k-held-out", str(problems))
    made = plan(Path("runs/gpu"), Sizes())
    assert list(made.domains()) == ["orders", "gsm8k"]
    lines = Path(made.domains()["gsm8k"]["train"]["source"]).read_text().splitlines()
    assert len(lines) == 9 and all(json.loads(line).keys() == {"question"} for line in lines), "no answers"
    taken = {"collect-1": {"seconds": 1.0}, "train-1": {"seconds": 1.0}}
    rounds = made.rounds("gsm8k", "adapter", 300.0, 0.1, taken)
    assert [settings["prompts_limit"] for settings in rounds] == [4, 4], "no more than there are"
    assert made.evaluation("gsm8k", 50, (16,)).prompts.answer_field == "answer"


def test_as_many_prompts_are_timed_as_there_is_time_for(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["gpu_smollm2.py"])
    session = gpu_smollm2.Session(
        argparse.Namespace(
            **{"device": "cpu", "output": tmp_path, "carried": tmp_path, "work": tmp_path, "model": BUILTIN},
            **{"tiny": False, "minutes": 1.0},
        )
    )
    assert session.timed("orders", 100.0) == gpu_smollm2.FIRST_TIMED, "nothing is known yet"
    monkeypatch.setattr(Pace, "seconds", 3.0)
    found = {"decoders": [{"tokens": gpu_smollm2.FIRST_TIMED * 50}]}
    monkeypatch.setattr(gpu_smollm2, "measure_model", lambda *arguments, **options: found)
    assert session.measure("orders", "base", 100.0) is found
    assert session.timed("orders", 100.0) == 20
    monkeypatch.setattr(Plan, "tokens", lambda self, domain: 160)
    assert session.timed("gsm8k", 100.0) == int(60 / (160 * 3 / 50)), "answers may be as long as they are allowed"


def test_what_does_not_fit_or_would_travel_twice_is_refused(repository, monkeypatch):
    prepare = ["prepare", "--model", str(base_folder()), "--wheels"]
    with pytest.raises(SystemExit, match="ignored by git"):
        call(monkeypatch, *prepare, "--carried", "elsewhere")
    with pytest.raises(SystemExit, match="Two calls do not hold it"):
        call(monkeypatch, *prepare, "--limit-mib", "1.1")


def test_wheels_are_those_that_the_project_is_developed_with():
    assert [line.split("==")[0] for line in wanted()] == ["gguf", "transformers"]


@pytest.mark.timeout(300)  # seconds where nobody else is at work
def test_the_whole_path_there_and_back(repository, monkeypatch, capsys):
    assert call(monkeypatch, "prepare", "--model", str(base_folder()), "--wheels") == 0
    told = capsys.readouterr().out
    for folder in ("first", "second"):
        assert f"carry: runs/gpu/{folder}" in told
        assert len(list(Path("runs/gpu", folder).glob("model.tar.*"))) == 1
    arguments = ["run", "--tiny", "--device", "cpu", "--minutes", "9", "--output", "out"]
    assert call(monkeypatch, *arguments) == 0
    found = json.loads(Path("out/gpu_smollm2.json").read_text())
    assert found == json.loads(capsys.readouterr().out.splitlines()[-1])
    assert all(part["ok"] and part["seconds"] < part["allotted"] for part in found["parts"].values())
    assert found["parts"]["base"]["found"]["bytes"] == sum(
        path.stat().st_size for path in Path("runs/gpu").glob("*/model.tar.*")
    )
    for mode in ("adapter", "full"):
        assert set(found["parts"][f"orders, {mode}"]["found"]["stages"]) == {
            *(f"{stage}-{number}" for stage in ("collect", "train") for number in (1, 2))
        }
        decoders = found["parts"][f"orders, {mode}, measured"]["found"]["decoders"]
        assert {(one["decoder"], one["block_size"]) for one in decoders} >= {("window", 16), ("window", 32)}
    assert sorted(path.name for path in Path("out").iterdir()) == ["gpu_smollm2.json", "orders-adapter.tar.1"]

    assert call(monkeypatch, "unpack", "out", "home") == 0
    trained = load_file(repository / "runs/gpu-work/orders-adapter/round-2/model/adapter_model.safetensors")
    weights = load_file(repository / "home/orders/adapter_model.safetensors")
    assert all(torch.equal(weights[name], value.bfloat16()) for name, value in trained.items())
    adapter = GatedAdapter.load(load(ModelConfig(BUILTIN)).model, "home/orders")
    assert adapter.rank == 32 and any(bool(weight.any()) for weight in adapter.parameters())
    assert {path.name for path in Path("home/orders").iterdir()} >= {"recipe.yaml", "round-2-log.jsonl"}


@pytest.mark.timeout(300)  # seconds where nobody else is at work
def test_a_part_that_fails_or_is_cut_short_costs_no_other_and_its_adapter_is_kept(repository, monkeypatch):
    whole = gpu_smollm2.run_recipe

    def stopped_in_the_second_round(recipe, *, reporter):
        def begin(stage: str, title: str) -> None:
            if stage == "train-2":
                raise OutOfTimeError("cut short after 7 s")

        reporter.begin = begin
        return whole(recipe, reporter=reporter)

    def fault(*arguments, **options):
        raise ZeroDivisionError("on the device")

    monkeypatch.setattr(gpu_smollm2, "run_recipe", stopped_in_the_second_round)
    monkeypatch.setattr(gpu_smollm2, "measure_model", fault)
    monkeypatch.setattr(gpu_smollm2.Session, "parts", lambda self: _few(self))
    assert call(monkeypatch, "run", "--tiny", "--model", BUILTIN, "--device", "cpu", "--output", "out") == 1
    found = json.loads(Path("out/gpu_smollm2.json").read_text())
    assert "ZeroDivisionError: on the device" in found["parts"]["orders, base"]["error"]
    trained = found["parts"]["orders, adapter"]
    assert trained["ok"] and trained["found"]["cut_short"] == "cut short after 7 s"
    assert "OutOfTimeError" in found["parts"]["orders, full"]["error"]
    call(monkeypatch, "unpack", "out", "home")
    first = load_file("runs/gpu-work/orders-adapter/round-1/model/adapter_model.safetensors")
    assert all(torch.equal(value, first[name].bfloat16()) for name, value in _weights("home/orders").items())


def _few(session: gpu_smollm2.Session) -> list[tuple[str, float, object]]:
    """The last of them has too little time."""
    return [
        ("orders, base", 0.0, lambda _: session.measure("orders", "base", 60.0)),
        ("orders, adapter", 0.0, lambda _: session.train("orders", "adapter", 600.0)),
        ("orders, full", 1.0, lambda _: session.train("orders", "full", 0.1)),
    ]


def _weights(folder: str) -> dict[str, torch.Tensor]:
    return load_file(Path(folder) / "adapter_model.safetensors")


def test_tiny_and_real_runs_differ_in_size_alone():
    assert TINY.batch < Sizes().batch and TINY.most_steps < Sizes().most_steps


def test_a_run_without_a_gpu_says_where_it_can_be_tried(monkeypatch):
    if torch.cuda.is_available():
        pytest.skip("there is a CUDA device here")
    with pytest.raises(SystemExit, match="--tiny --device cpu"):
        call(monkeypatch, "run")
