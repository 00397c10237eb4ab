from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

from benching import load_tiny
from jacobi_forcing.adapter import GatedAdapter
from jacobi_forcing.backbone import Backbone
from jacobi_forcing.bench import cost, roofline
from jacobi_forcing.bench.knee import bend, knee, recommended
from jacobi_forcing.bench.profile import profile
from jacobi_forcing.bench.roofline import Limits, Work, measure_limits, work_of
from jacobi_forcing.cli.app import main
from jacobi_forcing.errors import ConfigError, MissingExtraError
from jacobi_forcing.loading import Loaded
from jacobi_forcing.viz.canvas import check_figure
from result_schemas import assert_valid
from tiny_folder import save_tiny
from tiny_models import tiny_model

SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> Loaded:
    return load_tiny(tmp_path_factory.mktemp("model"))


# Knee -------------------------------------------------------------------------------------------------------------


def test_the_knee_is_where_the_latency_leaves_that_of_one_token() -> None:
    flat_to_64 = {size: 10.0 + 0.5 * max(0, size - 64) for size in SIZES}
    assert knee(flat_to_64, 0.0) == 64
    assert knee(flat_to_64, 0.2) == 68  # 10 + 0.5 * 4 = 12
    assert knee(dict.fromkeys(SIZES, 3.0), 0.1) == 256
    assert knee({1: 1.0, 2: 2.0, 4: 1.0}, 0.2) == 1, "what comes back after a hump is not flat"
    assert knee({1: 1.0, 2: 1.1, 4: 1.3}, 0.2) == 3


def test_the_bend_finds_the_flat_part_and_the_slope_behind_it() -> None:
    found = bend({size: 10.0 + 0.5 * max(0, size - 64) for size in SIZES})
    assert found.tokens == pytest.approx(64, rel=0.02)
    assert found.flat == pytest.approx(10, rel=0.02)
    assert found.slope == pytest.approx(0.5, rel=0.02)
    assert found.error < 0.01


def test_a_line_from_the_start_has_no_flat_part_and_noise_is_told_as_an_error() -> None:
    line = bend({size: 2.0 + 1.0 * (size - 1) for size in SIZES})
    assert (line.tokens, line.flat, line.slope) == pytest.approx((1, 2, 1), rel=0.02)
    noisy = bend({size: (2.0 + size) * (1.2 if place % 2 else 0.8) for place, size in enumerate(SIZES)})
    assert 0.1 < noisy.error < 0.3
    falling = bend({1: 3.0, 2: 2.0, 4: 1.0})
    assert (falling.tokens, falling.slope) == (4, 0.0)
    assert 1 < falling.flat < 3


@pytest.mark.parametrize("tokens", [1, 2, 5, 31, 32, 100, 256, 300, 5000])
def test_recommended_sweeps_stay_within_the_tokens(tokens: int) -> None:
    if tokens < 4:
        assert recommended(tokens) == []
        return
    window, *others = recommended(tokens)
    assert window["decoder"] == "window"
    for setting in (window, *others):
        size = int(setting["block_size"])
        assert size & (size - 1) == 0
        assert setting["tokens"] == size * (int(setting.get("candidates", 0)) + 1) <= tokens
    assert bool(others) == (tokens >= 32)
    if tokens == 256:  # the paper's setting on an H200
        assert others == [{"decoder": "recycle", "block_size": 64, "candidates": 3, "tokens": 256}]


# Roofline ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("arch", ["llama", "qwen3", "gemma3", "gpt2", "gpt_neox"])
def test_the_work_of_a_forward_is_counted_as_torch_counts_it(arch: str) -> None:
    from torch.utils.flop_counter import FlopCounterMode

    model = tiny_model(arch, attn_implementation="eager")  # torch does not count the fused kernel
    work = work_of(Backbone(model))
    tokens = 7
    with FlopCounterMode(display=False) as counter, torch.inference_mode():
        model(input_ids=torch.ones(1, tokens, dtype=torch.long), use_cache=False)
    assert work.flops(tokens, 0) == pytest.approx(counter.get_total_flops(), rel=0.02)
    unique = sum(parameter.numel() for parameter in model.parameters())
    assert 0.3 * unique < work.weights <= unique


def test_bytes_are_weights_once_and_the_kv_of_the_context() -> None:
    work = Work(weights=100, matmul=90, adapter=8, kv=6, attention=4, vocabulary=10, itemsize=2)
    assert work.bytes(1, 20) == 2 * (100 + 6 * 22 + 10)
    assert work.bytes(4, 20, rows=3, gated=True) == 2 * (108 + 3 * (6 * 28 + 40))
    assert work.flops(4, 20) == 4 * (180 + 4 * 24)
    assert work.flops(5, 20, rows=2, gated=True) == 2 * (5 * (180 + 4 * 25) + 2 * 8 * 2)


def test_an_adapter_is_counted_apart_and_tied_weights_once() -> None:
    model = tiny_model("llama", tie_word_embeddings=True)
    before = work_of(Backbone(model))
    assert before.weights == sum(parameter.numel() for parameter in model.parameters())
    adapter = GatedAdapter.attach(model, rank=2)
    after = work_of(Backbone(model))
    assert after.weights == before.weights
    assert after.adapter == sum(layer.lora_A.numel() + layer.lora_B.numel() for layer in adapter.layers.values())


def test_limits_are_positive_rates(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(roofline, "_SHORTEST", 0.0)
    found = measure_limits(torch.device("cpu"), torch.float32, 3 << 20)
    assert found.working_set == 3 << 20
    assert found.bytes_per_second > 1e8
    assert found.flops_per_second > 1e8


def test_a_limit_that_was_measured_in_a_bad_moment_is_raised_to_what_was_reached(
    loaded: Loaded, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("jacobi_forcing.bench.profile.measure_limits", lambda *_: Limits(1.0, 1.0, 1 << 20, 256))
    result = profile(loaded, tokens=[8], contexts=[8], repeats=2)
    points = result["contexts"][0]["points"]
    assert result["limits"]["bytes_per_second"] * (1 + 1e-9) >= max(p["bytes"] / p["seconds"] for p in points) > 1
    assert result["limits"]["flops_per_second"] * (1 + 1e-9) >= max(p["flops"] / p["seconds"] for p in points) > 1
    assert all(point["bound_seconds"] <= point["seconds"] * (1 + 1e-9) for point in points)


# The whole --------------------------------------------------------------------------------------------------------


def test_a_profile_holds_every_size_at_every_context_and_fits_its_schema(
    loaded: Loaded, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(roofline, "_SHORTEST", 0.0)
    rounds: list[tuple[int, int]] = []
    result = profile(
        loaded,
        tokens=[4, 2],
        contexts=[8, 9999],
        repeats=2,
        on_progress=lambda done, total: rounds.append((done, total)),
    )
    assert [entry["context"] for entry in result["contexts"]] == [8, 256 - 4]
    for entry in result["contexts"]:
        assert [point["tokens"] for point in entry["points"]] == [1, 2, 4]
        assert entry["points"][0]["ratio"] == 1.0
        for point in entry["points"]:
            assert point["low"] <= point["seconds"] <= point["high"]
            share = max(point["bandwidth_share"], point["compute_share"])
            assert 0 < share <= 1 + 1e-9
            assert share == pytest.approx(point["bound_seconds"] / point["seconds"])
    assert rounds[-1] == (cost.WARM_UP + 2, cost.WARM_UP + 2)
    assert result["recommended"]["tokens"] == min(entry["knee"]["tokens"] for entry in result["contexts"])


def test_with_an_adapter_half_of_the_tokens_are_gated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = load_tiny(tmp_path)
    monkeypatch.setattr(roofline, "_SHORTEST", 0.0)
    adapter = GatedAdapter.attach(loaded.model, rank=2)
    seen: list[tuple[int, int]] = []
    layer = next(iter(adapter.layers.values()))

    def look(module: torch.nn.Module, args: tuple[torch.Tensor]) -> None:
        index = layer.gate.index
        gated = index.stop - index.start if layer.gate.open and isinstance(index, slice) else 0
        seen.append((args[0].shape[1], gated))

    layer.register_forward_pre_hook(look)
    assert profile(loaded, tokens=[5], contexts=[8], repeats=1)["adapter"] is True
    assert set(seen[2:]) == {(1, 0), (5, 2)}


@pytest.mark.parametrize(
    "wrong",
    [{"tokens": [0]}, {"tokens": [1]}, {"contexts": [0]}, {"repeats": 0}, {"tolerance": -1.0}, {"tokens": [256]}],
)
def test_wrong_numbers_are_refused(loaded: Loaded, wrong: dict[str, list[int]]) -> None:
    with pytest.raises(ConfigError):
        profile(loaded, **wrong)  # type: ignore[arg-type]  # wrong on purpose


def test_the_verb_writes_figures_and_a_drawing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(roofline, "_SHORTEST", 0.0)
    save_tiny(tmp_path / "model")
    call = ["profile", "-m", "model", "-n", "2", "-n", "4", "--context", "8", "--repeats", "2"]
    assert main([*call, "-o", "profile.json", "--figure", "profile.svg"]) == 0
    said = capsys.readouterr()
    report = json.loads(said.out.splitlines()[-1])
    assert_valid(report, "profile")
    assert json.loads(Path("profile.json").read_text()) == report
    assert "cost(n)/cost(1)" in said.out and "knee at" in said.out
    assert "</svg>" in Path("profile.svg").read_text()
    assert main([*call, "--json", "--figure", "profile.png"]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    assert_valid(json.loads(line))
    assert Path("profile.png").read_bytes().startswith(b"\x89PNG")


def test_a_figure_that_cannot_be_drawn_is_refused_before_measuring(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"ends in \.png or \.svg"):
        check_figure("profile.bmp")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(MissingExtraError, match=r"jacobi-forcing\[eval\]"):
        check_figure("profile.png")
