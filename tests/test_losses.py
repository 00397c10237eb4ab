from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from jacobi_forcing.backbone import Backbone
from jacobi_forcing.errors import ConfigError
from jacobi_forcing.losses import LossItems, loss_items, position_losses, reduce_losses
from jacobi_forcing.mask import KINDS, visible
from jacobi_forcing.packing import PackedRows
from jacobi_forcing.schedule import nearest_state, noise_ratios
from jacobi_forcing.tags import Tags, layout
from jacobi_forcing.training.collator import Collator
from jacobi_forcing.trajectories.store import Trajectory
from reference_losses import Plain, random_trajectory, reference_losses
from tiny_models import ARCHITECTURES, shared_model, tiny_model

AR_WEIGHT = 0.7
BLOCK = 4
WINDOW = 3
# Whole blocks, a shorter last block, a last block of the end token alone, and responses that the limit cut off.
TRAJECTORIES = [
    random_trajectory(1, 5, 12, BLOCK),
    random_trajectory(2, 3, 10, BLOCK, finished=False),
    random_trajectory(3, 7, 9, BLOCK),
    random_trajectory(4, 1, 1, BLOCK),
    random_trajectory(5, 2, 8, BLOCK, finished=False),
]


def plain(trajectory: Trajectory) -> Plain:
    noisy = [
        states[nearest_state(noise_ratios(states), (block % WINDOW) / WINDOW)]
        for block, states in enumerate(trajectory.states)
    ]
    clean = [states[-1] for states in trajectory.states]
    return Plain(trajectory.prompt_ids, noisy, clean, trajectory.finished)


def batch(max_length: int = 64, **options: str) -> dict[str, torch.Tensor]:
    rows = PackedRows(TRAJECTORIES, max_length=max_length, window_size=WINDOW)
    assert 1 < len(rows) < len(TRAJECTORIES), "several samples in a row, several rows, some padding"
    return Collator(None, **options)([rows[index] for index in range(len(rows))])


def packed(model, inputs, mask="noise_conditioned", chunk_size=7, temperature=1.0):
    backbone, tags = Backbone(model), Tags.of(inputs["tags"])
    items = LossItems(**{name: inputs[name] for name in LossItems._fields})
    additive = backbone.attention_mask(visible(tags, tags, mask), tags.position, tags.position)
    hidden = backbone.hidden(inputs["input_ids"], tags.position, additive)
    values = position_losses(backbone, hidden, items, chunk_size, temperature)
    return reduce_losses(*values, blocks=items.blocks, targets=items.targets, ar_weight=AR_WEIGHT)


def gradients(model, loss) -> dict[str, torch.Tensor]:
    model.zero_grad()
    loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_same_gradients(ours, theirs, tolerance):
    assert ours.keys() == theirs.keys()
    largest = max(gradient.abs().max() for gradient in theirs.values())
    for name in theirs:
        difference = (ours[name] - theirs[name]).abs().max()
        assert difference <= tolerance * largest, f"{name}: {difference:.3g}, largest gradient {largest:.3g}"


@pytest.mark.parametrize("mask", KINDS)
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_packed_losses_and_gradients_equal_those_computed_block_by_block(arch, mask):
    model = shared_model(arch)
    consistency, ar = reference_losses(model, [plain(trajectory) for trajectory in TRAJECTORIES], mask, WINDOW)
    expected = gradients(model, consistency + AR_WEIGHT * ar)
    losses = packed(model, batch(), mask)
    assert consistency > 0.1, "the example teaches something"
    torch.testing.assert_close(losses.consistency, consistency, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(losses.ar, ar, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(losses.total, consistency + AR_WEIGHT * ar, rtol=1e-5, atol=1e-5)
    assert_same_gradients(gradients(model, losses.total), expected, 1e-5)


@pytest.mark.parametrize("arch", ["llama", "gpt2"])
@pytest.mark.parametrize("positions", ["all", "from_mismatch"])
@pytest.mark.parametrize("reduction", ["block", "token"])
@pytest.mark.parametrize("temperature", [1.0, 2.5])
def test_each_option_of_the_loss_equals_the_reference(arch, positions, reduction, temperature):
    model, options = shared_model(arch), {"positions": positions, "reduction": reduction}
    plains = [plain(trajectory) for trajectory in TRAJECTORIES]
    consistency, ar = reference_losses(model, plains, "noise_conditioned", WINDOW, temperature=temperature, **options)
    expected = gradients(model, consistency + AR_WEIGHT * ar)
    losses = packed(model, batch(**options), temperature=temperature)
    torch.testing.assert_close(losses.consistency, consistency, rtol=1e-5, atol=1e-5)
    assert_same_gradients(gradients(model, losses.total), expected, 1e-5)


def test_each_option_of_the_loss_makes_a_difference():
    model = shared_model("llama")
    values = [
        packed(model, batch(positions=positions, reduction=reduction), temperature=temperature).consistency.item()
        for positions in ("all", "from_mismatch")
        for reduction in ("block", "token")
        for temperature in (1.0, 2.5)
    ]
    assert len({round(value, 4) for value in values}) == len(values)


def test_a_block_without_a_wrong_token_teaches_nothing_from_its_first_mismatch_on():
    tags = Tags.of(layout(1, 4, 2, False)[0][None])
    # P | k0: 5 6  c0: 5 6 | k1: 7 9  c1: 7 8
    items = loss_items(torch.tensor([[1, 5, 6, 5, 6, 7, 9, 7, 8]]), tags, "from_mismatch")
    assert items.has_student.tolist() == [False, False, False, False, True]
    assert items.student[-1] == 6
    assert (int(items.blocks), int(items.targets)) == (1, 4)
    assert int(loss_items(torch.tensor([[1, 5, 6, 5, 6, 7, 9, 7, 8]]), tags, reduction="token").blocks) == 4


@pytest.mark.parametrize("arch", ["llama", "gpt2"])
def test_consistency_loss_alone_has_the_gradient_of_the_reference(arch):
    model = shared_model(arch)
    consistency, _ = reference_losses(model, [plain(trajectory) for trajectory in TRAJECTORIES], "noise_conditioned")
    expected = gradients(model, consistency)
    assert_same_gradients(gradients(model, packed(model, batch()).consistency), expected, 1e-5)


def test_loss_does_not_depend_on_the_size_of_a_chunk():
    model, inputs = shared_model("llama"), batch()
    whole = packed(model, inputs, chunk_size=10_000)
    expected = gradients(model, whole.total)
    for chunk_size in (1, 7):
        losses = packed(model, inputs, chunk_size=chunk_size)
        torch.testing.assert_close(losses, whole, rtol=1e-6, atol=1e-6)
        assert_same_gradients(gradients(model, losses.total), expected, 1e-6)


@pytest.mark.parametrize("arch", ["llama", "gemma3"])
def test_activations_computed_twice_give_the_same_gradients(arch):
    model, inputs, calls = tiny_model(arch).train(), batch(), []
    model.base_model.layers[0].mlp.register_forward_pre_hook(lambda *_: calls.append(1))
    kept = packed(model, inputs)
    expected = gradients(model, kept.total)
    assert len(calls) == 1
    model.activation_checkpointing_enable()
    again = packed(model, inputs)
    torch.testing.assert_close(again, kept, rtol=1e-6, atol=1e-6)
    assert_same_gradients(gradients(model, again.total), expected, 1e-6)
    assert len(calls) == 3, "the layer runs again in the backward pass"


class Largest(TorchDispatchMode):
    """Remembers how many values the largest tensor had that any operation made."""

    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        sizes = [leaf.numel() for leaf in tree_flatten(out)[0] if isinstance(leaf, torch.Tensor)]
        self.numel = max(self.numel, *sizes, 0)
        return out


def test_no_tensor_of_length_times_vocabulary_is_made_forward_or_backward():
    vocab, chunk_size = 8000, 3
    model, inputs = tiny_model("llama", vocab_size=vocab, hidden_size=8, num_attention_heads=2), batch()
    length = inputs["input_ids"].shape[1]
    with Largest() as largest:
        packed(model, inputs, chunk_size=chunk_size).total.backward()
    assert model.lm_head.weight.grad.abs().sum() > 0
    # The weights of the head are the largest tensor there is: a row's logits would be larger.
    assert largest.numel == model.lm_head.weight.numel() < length * vocab / 5
    assert chunk_size * vocab < largest.numel


def test_loss_positions_of_a_finished_response_equal_the_list_typed_by_hand():
    # 0 P  1 P | 2 k0a 3 k0b  4 c0a 5 c0b | 6 k1a  7 c1a = end
    tags = Tags.of(layout(2, 3, 2, True)[0][None])
    items = loss_items(torch.tensor([[10, 11, 90, 91, 20, 21, 92, 22]]), tags)
    assert items.query.tolist() == [1, 4, 5]
    assert items.student.tolist() == [1, 2, 3]
    assert items.has_student.tolist() == [False, True, True]
    assert items.target.tolist() == [20, 21, 22]
    # The second block is the end token alone, and nothing may be predicted from there.
    assert (int(items.blocks), int(items.targets)) == (1, 3)


def test_loss_positions_of_an_unfinished_response_equal_the_list_typed_by_hand():
    tags = Tags.of(layout(2, 3, 2, False)[0][None])
    items = loss_items(torch.tensor([[10, 11, 90, 91, 20, 21, 92, 22]]), tags)
    assert items.query.tolist() == [1, 4, 5, 7]
    assert items.student.tolist() == [1, 2, 3, 6]
    assert items.has_student.tolist() == [False, True, True, True]
    assert items.target.tolist() == [20, 21, 22, -100]
    assert (int(items.blocks), int(items.targets)) == (2, 3)


def test_loss_positions_do_not_cross_from_one_sample_into_the_next():
    first, second = layout(1, 2, 2, True)[0], layout(1, 2, 2, True)[0].clone()
    second[0] = 1
    tags = Tags.of(torch.cat([first, second], dim=-1)[None])
    items = loss_items(torch.tensor([[1, 90, 91, 2, 3, 4, 92, 93, 5, 6]]), tags)
    assert items.query.tolist() == [0, 3, 5, 8]
    assert items.target.tolist() == [2, 3, 5, 6]
    assert items.student.tolist() == [0, 1, 5, 6]


def test_padding_and_what_follows_the_end_token_enter_no_loss():
    model, inputs = shared_model("llama"), batch()
    before = packed(model, inputs)
    tags = Tags.of(inputs["tags"])
    inputs["input_ids"][tags.sample < 0] = 17
    torch.testing.assert_close(packed(model, inputs), before, rtol=0, atol=0)
    assert not tags.ends.flatten()[inputs["query"]].any()
    assert (tags.sample.flatten()[inputs["query"]] >= 0).all()


def test_block_that_is_clean_behind_clean_context_teaches_nothing():
    model = shared_model("llama")
    trajectories = [random_trajectory(1, 5, 12, BLOCK)]
    inputs = Collator()([PackedRows(trajectories, max_length=64, window_size=1)[0]])
    assert packed(model, inputs).consistency.item() == pytest.approx(0, abs=1e-6)


def test_the_teacher_gets_no_gradient():
    torch.manual_seed(0)
    items = LossItems(
        query=torch.tensor([0]),
        student=torch.tensor([1]),
        target=torch.tensor([-100]),
        has_student=torch.tensor([True]),
        blocks=torch.tensor(1),
        targets=torch.tensor(0),
    )

    class Model:
        def logits(self, hidden):
            return hidden

    hidden = torch.randn(1, 2, 6, requires_grad=True)
    reduce_losses(*position_losses(Model(), hidden, items), blocks=1, targets=0, ar_weight=1.0).total.backward()
    assert not hidden.grad[0, 0].any()
    teacher, student = hidden[0].detach().softmax(dim=-1)
    torch.testing.assert_close(hidden.grad[0, 1], student - teacher)


def test_without_gradients_the_loss_is_the_same():
    model, inputs = shared_model("llama"), batch()
    with torch.no_grad():
        silent = packed(model, inputs)
    torch.testing.assert_close(silent, packed(model, inputs), rtol=0, atol=0)


def test_chunk_of_nothing_is_refused():
    with pytest.raises(ConfigError, match="at least 1 position"):
        packed(shared_model("llama"), batch(), chunk_size=0)
