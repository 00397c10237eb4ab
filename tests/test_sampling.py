"""Sampling with fixed noise: every decoder gives the text of one slow loop, and it follows the model's distribution."""

from __future__ import annotations

import functools
import itertools
import math
from collections import Counter
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    PreTrainedModel,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from decoding import DECODERS, prompt, reference, told_row
from jacobi_forcing import DecodeConfig
from jacobi_forcing.backbone import Backbone
from jacobi_forcing.decode.engine import greedy, make_row, run
from jacobi_forcing.decode.rows import Row
from jacobi_forcing.decode.sampling import GumbelNoise, gumbel, make_choose
from jacobi_forcing.errors import ConfigError
from jacobi_forcing.sweep import Line
from tiny_models import ARCHITECTURES, VOCAB, shared_model, tiny_model

BUDGET = 20
FILTERS = {
    "none": (),
    "top-k": (TopKLogitsWarper(5),),
    "top-p": (TopPLogitsWarper(0.9),),
    "min-p": (MinPLogitsWarper(0.02),),
}


def warpers(temperature: float, name: str = "none") -> LogitsProcessorList:
    return LogitsProcessorList([TemperatureLogitsWarper(temperature), *FILTERS[name]])


def noise_of(seed: int, sample: int, position: int, size: int) -> torch.Tensor:
    """The noise as it is defined, written out again."""
    key = np.random.SeedSequence(seed).generate_state(2, np.uint64)
    generator = np.random.Generator(np.random.Philox(counter=[0, 0, position, sample], key=key))
    return torch.from_numpy(-np.log(generator.standard_exponential(size))).float()


@torch.no_grad()
def slow_text(
    model: PreTrainedModel, ids: Sequence[int], processors: LogitsProcessorList, seed: int, count: int, sample: int = 0
) -> list[int]:
    """One token after the other, each from a forward over the whole text."""
    text = list(ids)
    for position in range(len(ids), len(ids) + count):
        scores = model(torch.tensor([text])).logits[:, -1].float()
        scores = processors(torch.tensor([text]), scores)[0] + noise_of(seed, sample, position, scores.shape[-1])
        text.append(int(scores.argmax()))
    return text[len(ids) :]


@functools.cache
def slow_reference(arch: str, temperature: float, name: str, seed: int, count: int = BUDGET) -> list[int]:
    return slow_text(shared_model(arch), prompt(seed=seed), warpers(temperature, name), seed, count)


def row_of(backbone: Backbone, ids: Sequence[int], config: DecodeConfig, budget: int, sample: int = 0) -> Row:
    row = make_row(backbone, ids, config, [], budget)
    row.sample = sample
    return row


@pytest.mark.parametrize("decoder", DECODERS)
def test_every_seed_gives_one_text_with_every_decoder(decoder: str) -> None:
    model = shared_model("llama")
    settings = itertools.product((0.7, 1.0, 1.5), FILTERS, (1, 2, 3, 7, 16))
    for seed, (temperature, name, block_size) in enumerate(settings):
        expected = slow_reference("llama", temperature, name, seed, 8)
        config = DecodeConfig(decoder=decoder, block_size=block_size)
        row = row_of(Backbone(model), prompt(seed=seed), config, len(expected))
        run(Backbone(model), [row], choose=make_choose(warpers(temperature, name), do_sample=True, seed=seed))
        assert row.generated == expected, (temperature, name, block_size)
    assert seed >= 50


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("decoder", DECODERS)
def test_long_runs_of_sampled_tokens_are_accepted_without_a_change(arch: str, decoder: str) -> None:
    model, lengths = shared_model(arch), set()
    for seed, (temperature, name, block_size) in enumerate(
        [(0.7, "top-p", 4), (1.0, "none", 16), (1.0, "top-k", 4), (1.5, "min-p", 7)]
    ):
        expected = slow_reference(arch, temperature, name, seed)
        row = told_row(prompt(seed=seed), expected, DecodeConfig(decoder=decoder, block_size=block_size), BUDGET)
        run(Backbone(model), [row], choose=make_choose(warpers(temperature, name), do_sample=True, seed=seed))
        assert row.generated == expected
        lengths |= set(row.stats.accepted)
    assert max(lengths) == 1 if decoder == "ar" else max(lengths) >= 4


@pytest.mark.parametrize("decoder", DECODERS)
def test_samples_of_unequal_prompts_side_by_side_are_those_of_each_alone(decoder: str) -> None:
    model, config = shared_model("llama"), DecodeConfig(decoder=decoder, block_size=4)
    wanted = [(length, sample) for length in (3, 11, 30) for sample in (0, 1)]
    rows = [row_of(Backbone(model), prompt(length), config, 6 + length % 4, sample) for length, sample in wanted]
    for (length, _), row in zip(wanted, rows, strict=True):
        row.padding = 30 - length
    choose = make_choose(warpers(1.0), do_sample=True, seed=5)
    run(Backbone(model), rows, choose=choose)
    for (length, sample), row in zip(wanted, rows, strict=True):
        expected = slow_text(model, prompt(length), warpers(1.0), 5, 6 + length % 4, sample)
        assert row.generated == expected
    assert rows[0].generated != rows[1].generated


def test_noise_that_changes_from_sweep_to_sweep_would_be_noticed() -> None:
    """What these tests guard against: a decoder that draws again at each sweep."""
    model, seeds = shared_model("llama"), itertools.count()

    def fresh(logits: torch.Tensor, *sweep: object) -> torch.Tensor:
        return make_choose(warpers(1.0), do_sample=True, seed=next(seeds))(logits, *sweep)  # type: ignore[arg-type]  # all

    expected = slow_reference("llama", 1.0, "none", 0)
    row = row_of(Backbone(model), prompt(), DecodeConfig(decoder="window", block_size=4), BUDGET)
    run(Backbone(model), [row], choose=fresh)
    assert row.generated[0] == expected[0]
    assert row.generated != expected


# The distribution ------------------------------------------------------------------------------------------------

LENGTH, SMALL = 3, 8


@functools.cache
def small_model() -> PreTrainedModel:
    return tiny_model("llama", vocab_size=SMALL, seed=1)


@functools.cache
def exact(temperature: float, name: str) -> torch.Tensor:
    """Probability of every text [8] * LENGTH, float64, from forwards over every prefix and the library's filters."""
    joint, processors = torch.ones((), dtype=torch.float64), warpers(temperature, name)
    for length in range(LENGTH):
        texts = torch.tensor([[1, 2, 3, *tail] for tail in itertools.product(range(SMALL), repeat=length)])
        with torch.no_grad():
            scores = processors(texts, small_model()(texts).logits[:, -1].float())
        joint = joint[..., None] * scores.double().softmax(-1).reshape([SMALL] * (length + 1))
    return joint


def drawn(decoder: str, processors: LogitsProcessorList, draws: int) -> torch.Tensor:
    """How often each text was drawn, [8] * LENGTH."""
    counts = torch.zeros([SMALL] * LENGTH, dtype=torch.float64)
    config, backbone = DecodeConfig(decoder=decoder, block_size=3), Backbone(small_model())
    choose = make_choose(processors, do_sample=True, seed=0)
    for begin in range(0, draws, 1000):
        rows = [row_of(backbone, [1, 2, 3], config, LENGTH, sample) for sample in range(begin, begin + 1000)]
        run(backbone, rows, choose=choose)
        for text, count in Counter(tuple(row.generated) for row in rows).items():
            counts[text] += count
    return counts


def p_value(counts: torch.Tensor, probabilities: torch.Tensor) -> float:
    """Of Pearson's chi-square test; texts that are expected fewer than 5 times are counted together."""
    expected = probabilities * counts.sum()
    rare = expected < 5
    expected = torch.cat([expected[~rare], expected[rare].sum()[None]])
    seen = torch.cat([counts[~rare], counts[rare].sum()[None]])
    statistic = ((seen - expected) ** 2 / expected).sum()
    return float(torch.special.gammaincc(torch.tensor((len(expected) - 1) / 2, dtype=torch.float64), statistic / 2))


@pytest.mark.parametrize(
    ("decoder", "temperature", "name", "draws"),
    [
        ("window", 0.7, "none", 20_000),
        ("window", 1.0, "none", 20_000),
        ("window", 0.7, "top-k", 5_000),
        ("recycle", 1.5, "top-p", 5_000),
    ],
)
def test_samples_follow_the_distribution_of_the_model(decoder: str, temperature: float, name: str, draws: int) -> None:
    counts, probabilities = drawn(decoder, warpers(temperature, name), draws), exact(temperature, name)
    p = p_value(counts, probabilities)
    print(f"{decoder}, temperature {temperature}, {name}: p = {p:.3f}")
    assert counts.sum() == draws
    assert counts[probabilities == 0].sum() == 0
    assert p > 1e-3
    # Nor would any samples do: another temperature is told apart.
    assert p_value(counts, exact(temperature + 0.15, name)) < 1e-6


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_sampling_near_temperature_zero_is_greedy(arch: str) -> None:
    backbone = Backbone(shared_model(arch))
    # Between two logits 0.0003 apart, as gemma3 has at its 19th token, even this temperature chooses at random.
    for processors in (warpers(0.001), LogitsProcessorList([TopKLogitsWarper(1)])):
        row = row_of(backbone, prompt(), DecodeConfig(block_size=4), 18)
        run(backbone, [row], choose=make_choose(processors, do_sample=True, seed=0))
        assert row.generated == reference(arch)[:18]


# The noise -------------------------------------------------------------------------------------------------------


def test_noise_is_standard_gumbel_and_independent_between_seeds_samples_and_positions() -> None:
    size, noises = 20_000, [GumbelNoise(seed) for seed in (0, 1, 2**70)]
    rows = torch.stack([noise.draw(sample, at, size) for noise in noises for sample in (0, 1) for at in (0, 1, 900)])
    assert rows.dtype == torch.float32
    assert rows.isfinite().all()
    # Four standard errors: of the mean, of the variance (the excess kurtosis is 2.4), and of a correlation.
    assert (rows.mean(dim=1) - 0.577216).abs().max() < 4 * math.pi / math.sqrt(6 * size)
    assert (rows.var(dim=1) / (math.pi**2 / 6) - 1).abs().max() < 4 * math.sqrt(4.4 / size)
    assert (rows.corrcoef() - torch.eye(len(rows))).abs().max() < 4 / math.sqrt(size)


def test_noise_is_finite_where_the_generator_draws_zero() -> None:
    assert np.isfinite(gumbel(np.array([0.0, 5e-324, 1e300]))).all()


def test_noise_is_the_same_in_whatever_order_it_is_asked_for_and_kept_for_one_sweep_only() -> None:
    noise, cpu = GumbelNoise(3), torch.device("cpu")
    places = [(0, 7), (1, 7), (0, 7), (0, 8)]
    found = noise.at(places, 50, cpu)
    torch.testing.assert_close(found, torch.stack([noise_of(3, *place, 50) for place in places]), atol=0, rtol=0)
    torch.testing.assert_close(noise.at(places[::-1], 50, cpu), found.flip(0), atol=0, rtol=0)
    for position in range(9, 30):
        noise.at([(0, position), (0, position + 1)], 50, cpu)
        assert len(noise._kept) == 2
    torch.testing.assert_close(noise.at(places, 50, cpu), found, atol=0, rtol=0)


def first_choice(seed: int | None, device: str = "cpu") -> list[int]:
    row = row_of(Backbone(shared_model("llama")), [1, 2], DecodeConfig(), 30)
    choose = make_choose(None, do_sample=True, seed=seed)
    return choose(torch.zeros(1, 9, VOCAB, device=device), [row], [[Line(list(range(10)), 0)]], 1)[0].tolist()


def test_without_a_seed_the_global_generator_of_torch_decides() -> None:
    torch.manual_seed(1)
    first, second = first_choice(None), first_choice(None)
    torch.manual_seed(1)
    assert [first_choice(None), first_choice(None)] == [first, second]
    assert first != second
    assert first_choice(4) == first_choice(4)


@pytest.mark.gpu
def test_a_seed_gives_the_same_tokens_on_a_gpu() -> None:
    assert first_choice(4, "cuda") == first_choice(4)


def test_what_samples_nothing_is_the_greedy_choice_of_the_engine() -> None:
    assert make_choose(None, do_sample=False, seed=None) is greedy
    assert make_choose(LogitsProcessorList(), do_sample=False, seed=3) is greedy


def test_a_negative_seed_is_refused() -> None:
    with pytest.raises(ConfigError, match="seen: -1"):
        make_choose(None, do_sample=True, seed=-1)


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_sampling_at_a_low_temperature_is_greedy_up_to_the_first_near_tie(arch: str) -> None:
    """At T = 0.01 two logits that are 0.0003 apart are a fair coin, in any sampler; a gap of 0.25 is 25 T."""
    model, text = shared_model(arch), reference(arch)
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([[*prompt(), *text]])).logits[0, len(prompt()) - 1 : -1]
    top = logits.topk(2).values
    close = ((top[:, 0] - top[:, 1]) < 0.25).nonzero().flatten().tolist()
    clear = close[0] if close else len(text)
    assert clear >= 2
    cold = LogitsProcessorList([TemperatureLogitsWarper(0.01)])
    for decoder in DECODERS:
        row = make_row(Backbone(model), prompt(), DecodeConfig(decoder, 6), [], clear)
        run(Backbone(model), [row], choose=make_choose(cold, do_sample=True, seed=3))
        assert row.generated == text[:clear]
