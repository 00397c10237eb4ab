from __future__ import annotations

import time
from typing import Any

import pytest
import torch

from benching import MULTIBLOCK, RECYCLE, WINDOW, load_tiny, prompts_for
from jacobi_forcing.backbone import Backbone
from jacobi_forcing.bench import bench, overheads
from jacobi_forcing.bench.overhead import _Journal, _loop, _replay
from jacobi_forcing.config import DecodeConfig
from jacobi_forcing.decode.engine import make_row
from jacobi_forcing.loading import Loaded
from jacobi_forcing.sweep import Lines

AR = DecodeConfig(decoder="ar")
STATIC = DecodeConfig(decoder="recycle", block_size=4, candidates=2, static_shapes=True)


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> Loaded:
    return load_tiny(tmp_path_factory.mktemp("model"), "gemma3")


@pytest.mark.parametrize("decode", [AR, WINDOW, RECYCLE, MULTIBLOCK, STATIC], ids=lambda decode: decode.decoder)
@torch.inference_mode()
def test_the_replay_computes_what_the_loop_computed(loaded: Loaded, decode: DecodeConfig) -> None:
    prompt = prompts_for(loaded)[2]
    seen: list[tuple[Any, ...]] = []

    def record(_model: Any, _args: Any, kwargs: dict[str, Any], output: Any) -> None:
        masks = kwargs["attention_mask"]
        masks = masks if isinstance(masks, dict) else {"all": masks}
        shapes = {kind: None if mask is None else tuple(mask.shape) for kind, mask in masks.items()}
        length = kwargs["cache"].layers[0].keys.shape if decode.static_shapes else kwargs["cache"].get_seq_length()
        seen.append((kwargs["input_ids"].tolist(), kwargs["position_ids"].tolist(), shapes, length, output.logits))

    journal = _Journal(loaded.model)
    handle = loaded.model.register_forward_hook(record, with_kwargs=True)
    try:
        row = make_row(journal, prompt.ids, decode, journal.eos_ids, 16)
        assert len(_loop(journal, row)) == row.stats.forwards
        assert len(_replay(Backbone(loaded.model), journal)) == row.stats.forwards
    finally:
        handle.remove()
    loop, replay = seen[: len(seen) // 2], seen[len(seen) // 2 :]
    assert [call[:4] for call in loop] == [call[:4] for call in replay]
    for ours, theirs in zip(loop, replay, strict=True):
        torch.testing.assert_close(ours[4], theirs[4], rtol=0, atol=0)


def test_every_decoder_has_its_overhead(loaded: Loaded) -> None:
    found = overheads(loaded, prompts_for(loaded)[0], [AR, WINDOW, STATIC], 8, repeats=2)
    assert [entry.decode for entry in found] == [AR, WINDOW, STATIC]
    assert found[0].sweeps == 8
    for entry in found:
        assert entry.sweep_seconds > 0 and entry.forward_seconds > 0
        assert entry.ratio > 0.5 and entry.ratio_in_loop > 1
    assert found[2].to_dict()["label"] == "candidates=2, static_shapes=True"
    assert found[0].to_dict()["block_size"] is None


def test_time_spent_outside_the_forward_is_told_from_time_within(
    loaded: Loaded, monkeypatch: pytest.MonkeyPatch
) -> None:
    pause, real = 0.02, Lines.pack

    def slow_pack(*args: Any, **kwargs: Any) -> Lines:
        time.sleep(pause)
        return real(*args, **kwargs)

    def slow_layer(*_: Any) -> None:
        time.sleep(pause)

    layer = loaded.model.model.layers[0]
    handle = layer.register_forward_hook(slow_layer)
    try:
        (even,) = overheads(loaded, prompts_for(loaded)[0], [AR], 5, repeats=2)
        monkeypatch.setattr(Lines, "pack", slow_pack)
        (double,) = overheads(loaded, prompts_for(loaded)[0], [AR], 5, repeats=2)
    finally:
        handle.remove()
    assert even.forward_seconds > pause and double.forward_seconds > pause
    assert even.ratio < 1.4 and even.ratio_in_loop < 1.4
    assert 1.5 < double.ratio < 2.4 and 1.5 < double.ratio_in_loop < 2.4


def test_an_answer_of_one_token_is_measured_at_its_prefill(loaded: Loaded) -> None:
    (only,) = overheads(loaded, prompts_for(loaded)[0], [AR], 1, repeats=1)
    assert only.sweeps == 1 and only.ratio > 0


def test_the_bench_reports_it_for_ar_and_every_decoder(loaded: Loaded) -> None:
    found = bench(loaded, prompts_for(loaded, 1), decode=[WINDOW], max_new_tokens=4, overhead=True)
    assert [entry["decoder"] for entry in found.to_dict()["overhead"]] == ["ar", "window"]
    assert bench(loaded, prompts_for(loaded, 1), decode=[], max_new_tokens=2).overhead == []
