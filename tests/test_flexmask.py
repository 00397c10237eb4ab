"""FlexAttention for packed rows: the same rule, the same numbers, three lengths. Its backward pass needs a GPU."""

from __future__ import annotations

import random

import pytest
import torch
from torch._dynamo.utils import counters
from torch.nn.attention.flex_attention import create_mask

from jacobi_forcing.backbone import Backbone
from jacobi_forcing.config import AdapterSettings, RoundConfig
from jacobi_forcing.errors import ConfigError
from jacobi_forcing.flexmask import SQUARE, block_mask, bucket_lengths, padded_length, row_mask
from jacobi_forcing.losses import LossItems, position_losses, reduce_losses
from jacobi_forcing.mask import KINDS, visible
from jacobi_forcing.packing import PackedRows
from jacobi_forcing.recipe.settings import check_mode
from jacobi_forcing.tags import Tags
from jacobi_forcing.training import Collator, JacobiForcingConfig, JacobiForcingTrainer
from jacobi_forcing.training.attention import takes_flex
from reference_losses import random_trajectory
from test_losses import assert_same_gradients, gradients
from test_trainer import settings
from tiny_models import ARCHITECTURES, shared_model, tiny_model

MAX_LENGTH = 300
TRAJECTORIES = [
    random_trajectory(sample, 5 + sample, 40 + 9 * sample, 4, finished=sample % 2 > 0) for sample in range(6)
]
FLEXIBLE = [arch for arch in ARCHITECTURES if arch != "gpt2"]


def batch(buckets: tuple[int, ...] = ()) -> dict[str, torch.Tensor]:
    rows = PackedRows(TRAJECTORIES, max_length=MAX_LENGTH, window_size=3)
    return Collator(None, buckets=buckets)([rows[index] for index in range(len(rows))])


BUCKETS = bucket_lengths(MAX_LENGTH)
PADDED = batch(BUCKETS)


@pytest.fixture
def eagerly():
    """The library compiles the kernel; here its plain form is run, which makes the same numbers from the same mask."""
    with torch.compiler.set_stance("force_eager"):
        yield


# The mask ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("window", [None, 6])
def test_the_rule_and_the_squares_are_those_of_the_dense_mask(kind, window):
    tags = Tags.of(PADDED["tags"])
    expected = visible(tags, tags, kind)
    if window is not None:
        expected &= tags.position[:, :, None] - tags.position[:, None, :] < window
    mask = block_mask(tags, kind, window)
    rows, length = tags.sample.shape
    assert torch.equal(create_mask(mask.mask_mod, rows, 1, length, length, device="cpu")[:, 0], expected)
    squares = expected.view(rows, length // SQUARE, SQUARE, length // SQUARE, SQUARE)
    assert torch.equal(mask.to_dense()[:, 0].bool(), squares.any(4).any(2))
    for row in range(rows):
        for place in range(length // SQUARE):
            count = int(mask.full_kv_num_blocks[row, 0, place])
            full = sorted(mask.full_kv_indices[row, 0, place, :count].tolist())
            assert full == squares[row, place].all(2).all(0).nonzero().flatten().tolist()


def test_every_square_kind_occurs_in_the_example():
    mask = block_mask(Tags.of(batch((1024,))["tags"]), "noise_conditioned")
    assert mask.full_kv_num_blocks.sum() > 0 and mask.kv_num_blocks.sum() > 0
    assert (mask.to_dense() == 0).any()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("arch", FLEXIBLE)
def test_hidden_states_equal_those_behind_the_dense_mask(arch, kind, eagerly):
    backbone = Backbone(shared_model(arch))
    tags = Tags.of(PADDED["tags"])
    with torch.no_grad():
        dense = row_mask(backbone, tags, kind, flex=False)
        expected = backbone.hidden(PADDED["input_ids"], tags.position, dense)
        with backbone.flex():
            found = backbone.hidden(PADDED["input_ids"], tags.position, row_mask(backbone, tags, kind, flex=True))
    real = tags.sample >= 0
    assert real.any() and not real.all()
    torch.testing.assert_close(found[real], expected[real], rtol=1e-4, atol=1e-4)
    assert backbone.model.config._attn_implementation == "sdpa", "what decodes runs what it ran before"


def test_rows_of_a_wrong_length_or_an_unknown_mask_are_refused():
    tags = Tags.of(batch()["tags"])
    with pytest.raises(ConfigError, match=r"wrong length for FlexAttention.*a multiple of 128"):
        block_mask(tags, "noise_conditioned")
    with pytest.raises(ConfigError, match="Unknown mask"):
        block_mask(Tags.of(PADDED["tags"]), "causal")


# Lengths -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("longest", [100, 128, 300, 2048, 2049, 16_384])
def test_twenty_lengths_are_padded_to_three_at_most(longest):
    buckets = bucket_lengths(longest)
    assert all(bucket % SQUARE == 0 for bucket in buckets) and longest <= buckets[-1] < longest + SQUARE
    generator = random.Random(longest)
    lengths = [generator.randint(1, longest) for _ in range(20)]
    padded = [padded_length(length, buckets) for length in lengths]
    assert len(set(padded)) <= 3
    assert all(length <= longer for length, longer in zip(lengths, padded, strict=True))
    with pytest.raises(ConfigError, match="longer than every bucket"):
        padded_length(buckets[-1] + 1, buckets)


def test_a_batch_is_as_long_as_a_bucket_and_its_losses_do_not_change():
    assert PADDED["input_ids"].shape[1] in BUCKETS
    model = shared_model("llama")

    def of(inputs):
        backbone, tags = Backbone(model), Tags.of(inputs["tags"])
        hidden = backbone.hidden(
            inputs["input_ids"], tags.position, row_mask(backbone, tags, "noise_conditioned", flex=False)
        )
        items = LossItems(**{name: inputs[name] for name in LossItems._fields})
        values = position_losses(backbone, hidden, items, 50)
        return reduce_losses(*values, blocks=items.blocks, targets=items.targets, ar_weight=1.0)

    plain, longer = of(batch()), of(PADDED)
    torch.testing.assert_close(longer, plain, rtol=1e-5, atol=1e-5)
    assert_same_gradients(gradients(model, longer.total), gradients(model, plain.total), 1e-5)
    changed = {**PADDED, "input_ids": PADDED["input_ids"].clone()}
    changed["input_ids"][Tags.of(PADDED["tags"]).sample < 0] = 17
    torch.testing.assert_close(of(changed), longer, rtol=0, atol=0)


def test_a_short_batch_is_filled_up_with_rows_that_teach_nothing():
    rows = PackedRows(TRAJECTORIES, max_length=MAX_LENGTH, window_size=3)
    plain, filled = (Collator(None, buckets=BUCKETS, rows=count)([rows[0]]) for count in (0, 3))
    assert filled["input_ids"].shape[0] == 3 and (filled["tags"][1:, 0] == -1).all()
    for name in ("query", "student", "target", "blocks", "targets", "noise_ratios"):
        assert torch.equal(filled[name], plain[name]), name


@pytest.mark.slow
def test_twenty_lengths_compile_three_kernels_at_most():
    torch._dynamo.reset()
    counters.clear()
    backbone, longest = Backbone(tiny_model("llama", hidden_size=64, max_position_embeddings=600)), 600
    generator, buckets, seen = random.Random(0), bucket_lengths(longest), set()
    for sample in range(20):
        response = generator.randint(50, (longest - 4) // 2)
        rows = PackedRows([random_trajectory(sample, 4, response, 4)], max_length=longest, window_size=3)
        inputs = Collator(None, buckets=buckets)([rows[0]])
        ids, tags = inputs["input_ids"], Tags.of(inputs["tags"])
        seen.add(ids.shape[1])
        with torch.no_grad(), backbone.flex():
            found = backbone.hidden(ids, tags.position, row_mask(backbone, tags, "noise_conditioned", flex=True))
        with torch.no_grad():
            dense = row_mask(backbone, tags, "noise_conditioned", flex=False)
            expected = backbone.hidden(ids, tags.position, dense)
        real = tags.sample >= 0
        torch.testing.assert_close(found[real], expected[real], rtol=1e-4, atol=1e-4)
    assert len(seen) == len(buckets) == 3
    assert 1 <= counters["stats"]["unique_graphs"] <= 3


# Who runs it -------------------------------------------------------------------------------------------------------


def test_the_setting_chooses_the_kernel():
    backbone, cuda, cpu = Backbone(shared_model("llama")), torch.device("cuda"), torch.device("cpu")
    assert takes_flex("auto", cuda, backbone) and takes_flex("flex", cuda, backbone)
    assert not takes_flex("auto", cpu, backbone) and not takes_flex("sdpa", cuda, backbone)
    assert not takes_flex("auto", cuda, Backbone(shared_model("gpt2"))), "the library has no such kernel for it"
    with pytest.raises(ConfigError, match="GPT2LMHeadModel cannot run FlexAttention"):
        takes_flex("flex", cuda, Backbone(shared_model("gpt2")))
    dropping = Backbone(tiny_model("qwen2", attention_dropout=0.1))
    assert not takes_flex("auto", cuda, dropping)
    with pytest.raises(ConfigError, match="dropout in its attention"):
        takes_flex("flex", cuda, dropping)
    with pytest.raises(
        ConfigError, match=r"no backward pass on this device; seen: attention: flex on cpu.*auto or sdpa"
    ):
        takes_flex("flex", cpu, backbone)


def test_training_on_a_cpu_refuses_flex_and_takes_sdpa_by_itself(tmp_path):
    with pytest.raises(ConfigError, match="no backward pass on this device"):
        JacobiForcingTrainer(tiny_model("llama"), settings(tmp_path, attention="flex", max_length=300), TRAJECTORIES)
    with pytest.raises(ConfigError, match="one of auto, flex, sdpa"):
        settings(tmp_path, attention="eager")
    trainer = JacobiForcingTrainer(tiny_model("llama"), settings(tmp_path, max_length=300), TRAJECTORIES)
    assert trainer.flex is False and trainer.data_collator.buckets == ()
    of_round = JacobiForcingConfig.from_round(RoundConfig(4, 1, attention="sdpa"), str(tmp_path), use_cpu=True)
    assert of_round.attention == "sdpa"
    with pytest.raises(ConfigError, match=r"rounds\[0\]\.attention.*no meaning"):
        check_mode("adapter", [RoundConfig(4, 1, attention="sdpa")], AdapterSettings())


def test_evaluating_through_flex_gives_the_loss_of_sdpa(tmp_path, eagerly):
    # Without gradients the kernel runs on a CPU too, so the trainer's own path is tested here.
    args = settings(tmp_path, max_length=300)
    plain = JacobiForcingTrainer(tiny_model("llama"), args, TRAJECTORIES, eval_trajectories=TRAJECTORIES)
    expected = plain.evaluate()["eval_loss"]
    flex = JacobiForcingTrainer(tiny_model("llama"), args, TRAJECTORIES, eval_trajectories=TRAJECTORIES)
    flex.flex, flex.data_collator.buckets = True, bucket_lengths(300)
    assert flex.evaluate()["eval_loss"] == pytest.approx(expected, rel=1e-4)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("checkpointing", [False, True])
def test_training_through_flex_gives_the_weights_of_sdpa(tmp_path, kind, checkpointing):
    found = []
    for attention in ("sdpa", "auto"):
        args = settings(
            tmp_path,
            **{"attention": attention, "mask": kind, "use_cpu": False, "max_length": 300, "optim": "sgd"},
            **{"activation_checkpointing": checkpointing, "lr_scheduler_type": "constant"},
        )
        model = tiny_model("llama", hidden_size=64)  # heads of 16, the least that the kernel takes
        trainer = JacobiForcingTrainer(model, args, TRAJECTORIES)
        assert trainer.flex is (attention == "auto")
        trainer.train()
        found.append({name: value.cpu() for name, value in trainer.model.state_dict().items()})
    for name, value in found[0].items():
        torch.testing.assert_close(found[1][name], value, rtol=1e-3, atol=1e-4)
