"""Fixed buffers and few shapes: the same text, and nothing to compile anew from sweep to sweep. One wait per sweep."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch

from decoding import DECODERS, ours, prompt, reference, told_row
from jacobi_forcing import DecodeConfig
from jacobi_forcing.backbone import Backbone
from jacobi_forcing.cache import KVCache
from jacobi_forcing.decode.engine import make_row, run, sweeps
from jacobi_forcing.errors import CacheError
from jacobi_forcing.sweep import Line, Lines, sweep_logits
from test_decode_cache import check
from tiny_models import ARCHITECTURES, VOCAB, shared_model, tiny_model

each_architecture = pytest.mark.parametrize("arch", ARCHITECTURES)
HANDFUL = 6


def told(arch: str, config: DecodeConfig, lengths: tuple[int, ...] = (11,), budget: int = 40) -> list[Any]:
    return [told_row(prompt(length), reference(arch, length), config, budget, wrong=0.3) for length in lengths]


@each_architecture
@pytest.mark.parametrize("decoder", DECODERS)
def test_the_text_and_the_cache_are_the_same(arch: str, decoder: str) -> None:
    for block_size in (4, 16):
        config = DecodeConfig(decoder, block_size, static_shapes=True)
        assert ours(shared_model(arch), prompt(), 40, **config.to_dict()) == reference(arch)
        rows = told(arch, config, (3, 40, 11), budget=24)
        for seats, cache in sweeps(Backbone(shared_model(arch)), rows):
            at_work = [row for row in seats if not row.finished]
            if at_work:
                check(shared_model(arch), at_work, _without_finished(seats, cache))
        assert [row.generated for row in rows] == [reference(arch, length)[:24] for length in (3, 40, 11)]


class _without_finished:  # noqa: N801 - reads as a call
    """The cache of the rows that are still at work."""

    def __init__(self, seats: list[Any], cache: KVCache) -> None:
        self._cache = cache
        self._at_work = [index for index, row in enumerate(seats) if not row.finished]
        self.pending = cache.pending
        self.lengths = [cache.lengths[index] for index in self._at_work]
        self.width = max(self.lengths, default=0)

    def content(self, row: int) -> Any:
        return self._cache.content(self._at_work[row])


def shapes_of(model: torch.nn.Module, work: Callable[[], None]) -> Counter[tuple[Any, ...]]:
    """How often each combination of shapes was asked of the model."""
    seen: Counter[tuple[Any, ...]] = Counter()

    def note(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        masks = kwargs["attention_mask"]
        masks = list(masks.values()) if isinstance(masks, dict) else [masks]
        layers = kwargs["cache"].layers
        keys = tuple(layers[0].keys.shape) if layers else None
        seen[tuple(kwargs["input_ids"].shape), tuple(mask is None or tuple(mask.shape) for mask in masks), keys] += 1

    handle = model.register_forward_pre_hook(note, with_kwargs=True)
    try:
        work()
    finally:
        handle.remove()
    return seen


@pytest.mark.parametrize("arch", ["llama", "gemma3"])
@pytest.mark.parametrize("decoder", DECODERS)
@pytest.mark.parametrize("block_size", [4, 16])
def test_a_long_run_needs_a_handful_of_shapes(arch: str, decoder: str, block_size: int) -> None:
    model = tiny_model(arch, max_position_embeddings=512)
    config = DecodeConfig(decoder, block_size, static_shapes=True)
    row = make_row(Backbone(model), prompt(), config, [], 200)
    seen = shapes_of(model, lambda: run(Backbone(model), [row]))
    assert sum(seen.values()) == row.stats.forwards > 20
    assert len(seen) <= HANDFUL
    # Prompts of another length share them.
    more = shapes_of(model, lambda: run(Backbone(model), [make_row(Backbone(model), prompt(13), config, [], 190)]))
    assert len(seen.keys() | more.keys()) <= HANDFUL


def test_without_fixed_shapes_every_sweep_has_its_own() -> None:
    model = shared_model("llama")
    row = make_row(Backbone(model), prompt(), DecodeConfig("window", 4), [], 40)
    assert len(shapes_of(model, lambda: run(Backbone(model), [row]))) > 20


def test_rows_that_have_finished_leave_by_halves() -> None:
    model = shared_model("llama")
    config = DecodeConfig("window", 4, static_shapes=True)
    rows = [make_row(Backbone(model), prompt(), config, [], budget) for budget in (4, 8, 12, 16, 20, 24, 28, 32)]
    sizes = [len(seats) for seats, _ in sweeps(Backbone(model), rows)]
    assert set(sizes) <= {8, 4, 2, 1}
    assert [row.generated for row in rows] == [reference("llama")[: 4 * (index + 1)] for index in range(8)]


@pytest.mark.parametrize("decoder", ["ar", "window", "recycle"])
def test_a_compiled_model_is_compiled_a_handful_of_times(decoder: str) -> None:
    torch._dynamo.reset()
    logging.getLogger("torch.__trace").setLevel(logging.WARNING)
    model, compiled = tiny_model("llama"), []

    def backend(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., Any]:
        compiled.append(graph)
        return graph.forward

    plain = model.forward
    config = DecodeConfig(decoder, 4, candidates=2, static_shapes=True)
    counts = []
    try:
        model.forward = torch.compile(plain, backend=backend, dynamic=False)
        for length in (11, 13, 12):
            row = make_row(Backbone(model), prompt(length), config, [], 40)
            run(Backbone(model), [row])
            assert row.generated == reference("llama", length)
            counts.append(len(compiled))
    finally:
        model.forward = plain
        torch._dynamo.reset()
    assert 1 <= counts[0] <= counts[-1] <= HANDFUL
    # Prompts of other lengths bring nothing new once each size has been met.
    assert counts[2] == counts[1]


def test_a_sweep_that_does_not_fit_is_refused() -> None:
    backbone = Backbone(shared_model("llama"))
    cache = backbone.new_cache(1, capacity=8)
    with pytest.raises(CacheError, match="at most 8 slots"), torch.inference_mode():
        sweep_logits(backbone, cache, Lines.pack([[Line(range(1, 10), 0)]]))


@pytest.mark.parametrize("decoder", DECODERS)
@pytest.mark.parametrize("static_shapes", [False, True])
def test_host_and_device_meet_once_per_sweep(
    decoder: str, static_shapes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU each of these waits for all that was asked of the device; there, `make test` has no GPU to ask."""
    meetings: Counter[str] = Counter()
    for name in ("tolist", "item", "cpu", "numpy", "__bool__", "__int__", "__float__", "__index__"):
        original = getattr(torch.Tensor, name)

        def counted(self: torch.Tensor, *args: Any, _name: str = name, _original: Any = original) -> Any:
            meetings[_name] += 1
            return _original(self, *args)

        monkeypatch.setattr(torch.Tensor, name, counted)
    rows = told("llama", DecodeConfig(decoder, 4, static_shapes=static_shapes), (3, 11))
    run(Backbone(shared_model("llama")), rows)
    assert meetings.total() == max(row.stats.forwards for row in rows)


def test_logits_are_made_only_where_they_are_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    model, widths = shared_model("llama"), []
    head = model.get_output_embeddings()
    handle = head.register_forward_hook(lambda module, args, out: widths.append(out.shape[1]))
    try:
        row = make_row(Backbone(model), prompt(40), DecodeConfig("window", 4), [], 20)
        run(Backbone(model), [row])
    finally:
        handle.remove()
    assert widths[0] == 5  # of 44 slots: the prompt's last token and the draft
    assert max(widths[1:]) == 4
    assert head.out_features == VOCAB
