"""Training a gated adapter: its loss, its states on the fly, its checkpoints."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributions import Categorical, kl_divergence
from transformers import PreTrainedModel

from jacobi_forcing.adapter import GatedAdapter
from jacobi_forcing.training.adapter_config import AdapterConfig
from jacobi_forcing.training.adapter_lines import CleanPass, State, Texts
from jacobi_forcing.training.adapter_rows import LineCollator, Response
from jacobi_forcing.training.adapter_trainer import AdapterTrainer
from tiny_models import VOCAB, tiny_model

each_architecture = pytest.mark.parametrize("arch", ["llama", "gemma3", "gpt2", "gpt_neox"])
N = 5
EOS = 60


def adapted(arch: str, seed: int = 0) -> tuple[PreTrainedModel, GatedAdapter]:
    """A tiny model with an adapter whose product is not zero."""
    model = tiny_model(arch)
    adapter = GatedAdapter.attach(model, rank=3)
    torch.manual_seed(seed)
    for weight in adapter.parameters():
        torch.nn.init.normal_(weight, std=0.1)
    return model, adapter


def greedy_texts(model: PreTrainedModel, count: int = 4) -> list[Response]:
    """Texts of unequal lengths that the base writes itself; every second one is said to end with its last token."""
    rng = random.Random(0)
    texts = []
    for index in range(count):
        prompt = [rng.randrange(VOCAB) for _ in range(3 + 2 * index)]
        text = list(prompt)
        for _ in range(7 + 3 * index):
            text.append(int(base_logits(model, text)[-1].argmax()))
        texts.append(Response(prompt, text[len(prompt) :], index % 2 == 0))
    return texts


@torch.no_grad()
def base_logits(model: PreTrainedModel, ids: list[int]) -> Tensor:
    return model(input_ids=torch.tensor([ids]), use_cache=False).logits[0]


def line_logits(model: PreTrainedModel, adapter: GatedAdapter, before: list[int], line: list[int]) -> Tensor:
    """Logits at a line behind a prefix: one ordinary forward of the whole text, the gate open at the line only."""
    with adapter.gated(torch.arange(len(before), len(before) + len(line))):
        out = model(input_ids=torch.tensor([before + line]), use_cache=False)
    return out.logits[0, len(before) :]


def right_guesses(text: list[int], start: int, line: list[int]) -> int:
    right = 0
    for guess, token in zip(line[1:], text[start + 1 :], strict=False):
        if guess != token:
            break
        right += 1
    return right


def decoded(
    model: PreTrainedModel, adapter: GatedAdapter, text: list[int], start: int, fill: list[list[int]], sweeps: int
) -> tuple[int, list[int]]:
    """The running window, as plain as can be: where its line starts, and the line, after some sweeps."""
    line = [text[start], *fill[0][1:]]
    for sweep in range(1, sweeps + 1):
        if start == len(text) - 1:
            break
        with torch.no_grad():
            predictions = line_logits(model, adapter, text[:start], line).argmax(-1).tolist()
        right = right_guesses(text, start, line)
        guesses = predictions[right + 1 :]
        guesses += fill[sweep][1 + len(guesses) :]
        start = min(start + right + 1, len(text) - 1)
        line = [text[start], *guesses]
    return start, line


def reference_line(
    model: PreTrainedModel, adapter: GatedAdapter, response: Response, start: int, line: list[int], **weights: float
) -> Tensor:
    """The loss of one line, alone."""
    text = response.prompt_ids + response.response_ids
    student = line_logits(model, adapter, text[:start], line)
    teacher = base_logits(model, text)
    right, total = right_guesses(text, start, line), torch.zeros(())
    for slot in range(len(line)):
        position = start + slot
        if start == len(text) - 1 or position > len(text) - 1 or (response.finished and position == len(text) - 1):
            break
        weight = weights["right_weight"] if slot <= right else weights["slot_decay"] ** (slot - right - 1)
        divergence = kl_divergence(Categorical(logits=teacher[position]), Categorical(logits=student[slot]))
        total = total + weight * divergence
    return total


def settings(folder: Any, **changes: Any) -> AdapterConfig:
    values = {
        "output_dir": str(folder),
        "rank": 3,
        "block_size": N,
        "lines_per_response": 6,
        "max_sweeps": 3,
        "states": "drawn",
        "right_weight": 1.0,
        "max_length": 64,
        "per_device_train_batch_size": 2,
        "max_steps": 2,
        "logging_steps": 1,
        "save_strategy": "no",
        "use_cpu": True,
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
        "logits_chunk_size": 7,
    }
    return AdapterConfig(**{**values, **changes})


def gradients(adapter: GatedAdapter) -> list[Tensor]:
    found = [weight.grad.clone() for weight in adapter.parameters()]
    for weight in adapter.parameters():
        weight.grad = None
    return found


@each_architecture
@pytest.mark.parametrize("states", ["drawn", "every"])
def test_loss_and_gradients_equal_those_of_each_line_run_alone(arch: str, states: str, tmp_path: Any) -> None:
    model, adapter = adapted(arch)
    responses = greedy_texts(model)
    weights = {"right_weight": 0.5, "slot_decay": 0.8}
    trainer = AdapterTrainer(model, settings(tmp_path, states=states, **weights), responses)
    items = [trainer.train_dataset[index] for index in range(len(responses))]
    losses = trainer.losses(LineCollator()(items))
    losses.total.backward()
    ours = gradients(trainer.adapter)
    total, lines, moved = torch.zeros(()), 0, 0
    for response, item in zip(responses, items, strict=True):
        text = response.prompt_ids + response.response_ids
        for start, drawn, fill in zip(
            item["starts"].tolist(), item["sweeps"].tolist(), item["fill"].tolist(), strict=True
        ):
            for sweeps in range(4) if states == "every" else [drawn]:
                at, line = decoded(model, adapter, text, start, fill, sweeps)
                moved += at > start + sweeps
                total = total + reference_line(model, adapter, response, at, line, **weights)
                lines += 1
    assert moved, "no guess was ever accepted"
    total = total / lines
    torch.testing.assert_close(losses.total, total, rtol=1e-5, atol=1e-6)
    total.backward()
    theirs = gradients(adapter)
    largest = max(gradient.abs().max() for gradient in theirs)
    for one, other in zip(ours, theirs, strict=True):
        assert (one - other).abs().max() <= 2e-5 * largest
    assert all(p.grad is None for p in model.parameters())


@each_architecture
def test_states_on_the_fly_are_those_of_decoding_line_by_line(arch: str, tmp_path: Any) -> None:
    model, adapter = adapted(arch)
    responses = greedy_texts(model)
    trainer = AdapterTrainer(model, settings(tmp_path), responses)
    items = [trainer.train_dataset[index] for index in range(len(responses))]
    batch = LineCollator()(items)
    texts = Texts(batch["input_ids"], batch["last"], batch["taught"])
    state = State(batch["starts"], batch["fill"][:, :, 0].clone())
    state.ids[..., 0] = texts.at(state.start)
    swept = trainer._swept(CleanPass(trainer.backbone, texts), texts, state, batch["sweeps"], batch["fill"])
    ages = set()
    for row, response in enumerate(responses):
        text = response.prompt_ids + response.response_ids
        for line in range(6):
            sweeps = int(batch["sweeps"][row, line])
            fill = batch["fill"][row, line].tolist()
            start, ids = decoded(model, adapter, text, int(batch["starts"][row, line]), fill, sweeps)
            room = len(text) - start
            assert (int(swept.start[row, line]), swept.ids[row, line].tolist()[:room]) == (start, ids[:room])
            ages.add(sweeps)
    assert ages == {0, 1, 2, 3}


def test_a_text_alone_gives_what_it_gives_in_a_batch(tmp_path: Any) -> None:
    model, _ = adapted("gemma3")
    responses = greedy_texts(model)
    trainer = AdapterTrainer(model, settings(tmp_path), responses)
    items = [trainer.train_dataset[index] for index in range(len(responses))]
    alone = [trainer.losses(LineCollator()([item])) for item in items]
    together = trainer.losses(LineCollator()(items))
    torch.testing.assert_close(together.total, sum(one.total for one in alone) / len(alone))
    assert together.gained == sum(one.gained for one in alone)


@pytest.mark.parametrize("states", ["drawn", "every"])
def test_nothing_behind_the_end_enters_the_loss(states: str, tmp_path: Any) -> None:
    model, _ = adapted("llama")
    (text,) = greedy_texts(model, 1)
    assert text.finished
    trainer = AdapterTrainer(model, settings(tmp_path, states=states), [text])
    batch = LineCollator()([trainer.train_dataset[0]])
    expected = trainer.losses(batch).total
    padded = batch | {"input_ids": torch.cat([batch["input_ids"], torch.full((1, 9), 17)], dim=1)}
    assert trainer.losses(padded).total == expected
    # The end token's own slot teaches nothing, its predecessor's does.
    open_end = trainer.losses(batch | {"taught": batch["last"]}).total
    shorter = trainer.losses(batch | {"taught": batch["taught"] - 1}).total
    assert shorter < expected < open_end


def test_the_clean_text_runs_once_and_only_lines_run_with_gradient(tmp_path: Any) -> None:
    model, _ = adapted("llama")
    trainer = AdapterTrainer(model, settings(tmp_path), greedy_texts(model))
    batch = LineCollator()([trainer.train_dataset[0], trainer.train_dataset[3]])
    seen = []
    hook = model.base_model.register_forward_hook(
        lambda module, args, kwargs, out: seen.append((kwargs["input_ids"].shape[1], out[0].requires_grad)),
        with_kwargs=True,
    )
    trainer.losses(batch)
    hook.remove()
    clean, *sweeps, trained = seen
    assert clean == (batch["input_ids"].shape[1], False)
    assert trained == (6 * N, True)
    # Lines leave once they have had their sweeps.
    assert [with_gradient for _, with_gradient in sweeps] == [False] * 3
    assert sorted((width for width, _ in sweeps), reverse=True) == [width for width, _ in sweeps]
    assert sweeps[-1][0] < 6 * N


def weights(trainer: AdapterTrainer) -> list[Tensor]:
    return [weight.detach().clone() for weight in trainer.adapter.parameters()]


@pytest.mark.parametrize(("arch", "optimizer", "batches"), [("llama", "muon", 1), ("gpt2", "adamw", 2)])
def test_ten_steps_equal_five_and_five_to_the_bit_and_leave_the_base_alone(
    arch: str, optimizer: str, batches: int, tmp_path: Any
) -> None:
    changes = {"max_steps": 10, "save_strategy": "steps", "save_steps": 5, "learning_rate": 1e-2}
    args = settings(tmp_path, optimizer=optimizer, gradient_accumulation_steps=batches, **changes)
    model = tiny_model(arch)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    responses = greedy_texts(model, 6)
    whole = AdapterTrainer(model, args, responses)
    start = weights(whole)
    whole.train()
    assert all((a - b).abs().max() > 1e-4 for a, b in zip(weights(whole), start, strict=True))
    resumed = AdapterTrainer(tiny_model(arch), args, responses)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-5"))
    assert resumed.state.global_step == 10
    assert all(torch.equal(a, b) for a, b in zip(weights(resumed), weights(whole), strict=True))
    logs = [
        [{k: e[k] for k in ("loss", "tokens_per_forward")} for e in t.state.log_history if "loss" in e][-5:]
        for t in (whole, resumed)
    ]
    assert logs[0] == logs[1]
    assert not list((tmp_path / "checkpoint-10").glob("model*"))
    whole.adapter.detach()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    loaded = GatedAdapter.load(model, tmp_path / "checkpoint-10")
    assert all(torch.equal(a, b) for a, b in zip(loaded.parameters(), weights(resumed), strict=True))


def test_four_batches_of_one_text_and_one_batch_of_four_give_the_same_step(tmp_path: Any) -> None:
    shared = {"optim": "sgd", "max_steps": 1, "max_grad_norm": 0.0, "warmup_steps": 0, "learning_rate": 1.0}
    steps = []
    for rows, batches in ((4, 1), (1, 4)):
        model, adapter = adapted("llama")
        start = [weight.detach().clone() for weight in adapter.parameters()]
        args = settings(tmp_path, per_device_train_batch_size=rows, gradient_accumulation_steps=batches, **shared)
        trainer = AdapterTrainer(model, args, greedy_texts(model))
        trainer.train()
        steps.append([after - at for after, at in zip(weights(trainer), start, strict=True)])
    largest = max(step.abs().max() for step in steps[0])
    for one, other in zip(*steps, strict=True):
        assert (one - other).abs().max() <= 1e-5 * largest


def test_it_learns_to_draft_what_the_base_writes(tmp_path: Any) -> None:
    model = tiny_model("llama")
    changes = {"max_steps": 60, "learning_rate": 1e-2, "logging_steps": 20, "rank": 8, "states": "every"}
    trainer = AdapterTrainer(model, settings(tmp_path, **changes), greedy_texts(model, 2))
    trainer.train()
    first, *_, last = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert last["loss"] < 0.5 * first["loss"]
    args = trainer.settings
    lines = 60 * args.per_device_train_batch_size * args.gradient_accumulation_steps * args.lines_per_response
    assert last["train_tokens"] == lines * args.block_size * (args.max_sweeps + 1) == trainer.meter.tokens
    assert last["tokens_per_forward"] > 1.3 * first["tokens_per_forward"]
