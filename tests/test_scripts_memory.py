"""The scripts that measure memory and look at a GPU: their whole path, on tiny models."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys

import pytest
import torch

import gpu_check
import measure_memory
from tiny_folder import save_tiny


def test_a_row_has_as_many_tokens_as_is_asked_for():
    row = measure_memory.row
    for length in (257, 300, 1024):
        assert row(length, 50)["input_ids"].shape == (1, length)
        assert (row(length, 50)["tags"][0, 0] == 0).all(), "one sample, no padding"


def test_memory_of_a_step_with_logits_in_chunks_and_at_once(tmp_path):
    # A vocabulary that makes logits the largest thing there is.
    from tiny_models import tiny_model

    save_tiny(tmp_path / "model")
    large = tiny_model("llama", vocab_size=20_000, max_position_embeddings=3000)
    large.save_pretrained(tmp_path / "model")
    measure = measure_memory
    found = {
        logits: measure.case(
            argparse.Namespace(
                model=str(tmp_path / "model"),
                **{"device": "cpu", "dtype": "float32", "lengths": [2400], "logits": logits, "checkpointing": False},
            )
        )
        for logits in measure.LOGITS
    }
    assert found["chunked"]["loss"] == pytest.approx(found["dense"]["loss"], rel=1e-5)
    positions = found["dense"]["loss_positions"]
    assert positions == found["chunked"]["loss_positions"] < 2400
    # Noisy and clean logits of every position at once, against those of 512.
    assert found["dense"]["peak_bytes"] - found["chunked"]["peak_bytes"] > 4 * 20_000 * (positions - 512)


@pytest.mark.slow
def test_each_case_runs_in_a_process_of_its_own(tmp_path):
    save_tiny(tmp_path / "model")
    command = [sys.executable, str(measure_memory.__file__), "--model", str(tmp_path / "model")]
    done = subprocess.run(
        [*command, "--lengths", "200", "250"], capture_output=True, text=True, timeout=110, check=False
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert [(case["tokens"], case["logits"]) for case in found["cases"]] == [
        *((200, "chunked"), (200, "dense"), (250, "chunked"), (250, "dense"))
    ]
    assert set(found["bytes_per_token"]) == {"chunked", "dense"}
    assert str(tmp_path) not in done.stdout.splitlines()[-1]


@pytest.mark.slow
def test_the_look_at_a_gpu_runs_on_a_cpu_with_tiny_models(tmp_path, monkeypatch, capsys):
    arguments = ["gpu_check.py", "--tiny", "--device", "cpu", "--output", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", arguments)
    assert gpu_check.main() == 0
    found = json.loads((tmp_path / "gpu_check.json").read_text())
    assert found == json.loads(capsys.readouterr().out.splitlines()[-1])
    assert found["parts"]["compilations"]["found"]["graphs"] <= 3
    assert sum("dense mask" in name for name in found["parts"]) == 3


def test_the_parts_of_the_look_at_a_gpu_that_need_no_kernel_run_quickly(tmp_path):
    check = gpu_check.Check(torch.device("cpu"), True, tmp_path / "gpu_check.json")
    with torch.compiler.set_stance("force_eager"):
        check.part("exactness", check.exactness)
        check.part("7B", lambda: check.step("7B", 256, False))
        check.part("fault", lambda: 1 / 0)
    found = json.loads((tmp_path / "gpu_check.json").read_text())["parts"]
    assert [part["ok"] for part in found.values()] == [True, True, False]
    assert len({entry["dense"] for entry in found["exactness"]["found"].values()}) == 4, "the masks differ"
    assert "ZeroDivisionError" in found["fault"]["error"]
    assert found["7B"]["found"]["trained"] == "lora, checkpointing" and found["7B"]["found"]["loss"] > 0


def test_the_look_at_a_gpu_says_where_it_can_be_tried(monkeypatch):
    if torch.cuda.is_available():
        pytest.skip("there is a CUDA device here")
    monkeypatch.setattr(sys, "argv", ["gpu_check.py"])
    with pytest.raises(SystemExit, match="--tiny --device cpu"):
        gpu_check.main()
