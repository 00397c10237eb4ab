"""Costs by formula, from a model's config alone: for a machine that is not there.

Memory of training: weights, gradients and moments of what is trained; what each layer keeps for the backward pass; the
additive mask; one chunk of logits. Time: multiplications over the speed that is assumed, or weights over bandwidth,
whichever is slower.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

from jacobi_forcing.config import RecipeConfig, RoundConfig
from jacobi_forcing.embedded import BUILTIN
from jacobi_forcing.errors import ConfigError
from jacobi_forcing.files import count_lines
from jacobi_forcing.recipe.planning.costs import CollectCost, Costs, MeasureCost, TrainCost
from jacobi_forcing.recipe.planning.shape import BYTES, Shape, shape_of
from jacobi_forcing.recipe.settings import round_prompts, sweeps_blocks

PROMPT = 200
"""Length of a prompt that nobody has measured, tokens."""
SWEEPS_PER_SLOT = 0.8
"""Sweeps until a block has converged, as a share of its slots, for a model that was not trained for it."""
LOGITS_CHUNK = 512
"""Loss positions whose logits exist at a time."""
_DISK = 500e6  # bytes a second, for checkpoints


@dataclasses.dataclass(frozen=True)
class Hardware:
    """What is assumed of a device.

    Attributes:
        tflops: Multiplications and additions that training sustains, 1e12 a second.
        bandwidth: What reading weights sustains, 1e9 bytes a second.
    """

    tflops: float = 300.0
    bandwidth: float = 2000.0


def computed_costs(recipe: RecipeConfig, hardware: Hardware) -> Costs:
    """Reckon the costs of a recipe.

    Raises:
        ConfigError: The number of prompts is not known without reading their source.
        ModelError: There is no such model or config.
    """
    shape = shape_of(recipe.model)
    collect = tuple(_collect(recipe, index, shape, hardware) for index in range(len(recipe.rounds)))
    train = tuple(_train(recipe, settings, shape, hardware) for settings in recipe.rounds)
    assumptions = (
        f"{hardware.tflops:g} TFLOP/s and {hardware.bandwidth:g} GB/s are sustained",
        f"every response has all of its {recipe.collect.max_new_tokens} tokens, every prompt {PROMPT}",
        f"a block of n converges in {SWEEPS_PER_SLOT:g} n sweeps",
        "a forward with a draft costs as much as one over a token: right where reading the weights takes the time",
    )
    return Costs(collect, train, _measure(recipe, shape, hardware), "assumed", assumptions)


def weight_bytes(recipe: RecipeConfig, shape: Shape) -> float:
    """The model's weights as it decodes, bytes."""
    plain = shape.parameters * BYTES[recipe.model.dtype]
    if recipe.model.quantization == "none":
        return plain
    # NormalFloat with quantised scales takes 4.13 bits a weight; embeddings and norms stay as they are.
    small = sum(width * height for _, width, height in shape.linear)
    return small * 4.13 / 8 + (shape.parameters - small) * BYTES[recipe.model.dtype]


def trained_weights(recipe: RecipeConfig, shape: Shape) -> int:
    """How many weights learn."""
    if recipe.mode == "adapter":
        return shape.adapter(recipe.adapter.rank, recipe.adapter.targets)
    if recipe.peft.method != "none":
        return shape.adapter(recipe.peft.rank, recipe.peft.targets)
    return shape.parameters


def training_memory(recipe: RecipeConfig, settings: RoundConfig, shape: Shape) -> dict[str, float]:
    """Bytes of each part of a training step at its peak.

    Returns:
        `weights`, `gradients`, `optimizer`, `activations`, `mask`, `logits`.
    """
    trained = trained_weights(recipe, shape)
    few = trained != shape.parameters
    mixed = recipe.model.dtype != "float32"
    if recipe.mode == "full" and few:
        weights = weight_bytes(recipe, shape) + 4 * trained
    else:
        weights = 4.0 * shape.parameters + (4 * trained if few else 0)
        weights += 2 * shape.parameters if mixed else 0  # autocast's copies
    muon = settings.optimizer == "muon"
    moments = (4 * (trained if few else shape.matrices)) if muon else 8 * trained
    moments += 8 * (shape.parameters - shape.matrices) if muon and not few else 0
    tokens = settings.batch_size * settings.max_length
    element = 2 if mixed else 4
    one = element * tokens * (8 * shape.hidden + 6 * shape.queries + 4 * shape.inner)
    kept = shape.layers * one
    if settings.gradient_checkpointing:
        kept = shape.layers * element * tokens * shape.hidden + one
    dense = recipe.mode == "full" and settings.batch_size * settings.max_length**2
    return {
        "weights": weights,
        "gradients": 4.0 * trained,
        "optimizer": float(moments),
        "activations": float(kept),
        "mask": float(dense * (element + 2)),
        "logits": float(2 * LOGITS_CHUNK * shape.vocab * 4 * 3),
    }


def _collect(recipe: RecipeConfig, index: int, shape: Shape, hardware: Hardware) -> CollectCost:
    settings, block = recipe.collect, recipe.rounds[index].block_size
    length, batch = settings.max_new_tokens, settings.batch_size
    flops = 2 * (shape.parameters - shape.table)
    forward = _forward(flops, batch, weight_bytes(recipe, shape), hardware)
    greedy = length * forward / batch
    sweeps = SWEEPS_PER_SLOT * block if sweeps_blocks(recipe, recipe.rounds[index]) else 0
    # A sweep runs over every slot that is still wrong: on average half of them.
    swept = flops * length * (1 + sweeps / 2) / (hardware.tflops * 1e12)
    states = 2 + sweeps
    cache = batch * (PROMPT + 2 * length) * shape.layers * 2 * shape.keys * BYTES[recipe.model.dtype]
    return CollectCost(
        responses=prompt_count(recipe, index),
        seconds_per_response=greedy + swept,
        tokens_per_response=length,
        bytes_per_response=4 * (PROMPT + length * states) / 2,  # Parquet packs them to about a half
        memory=weight_bytes(recipe, shape) + cache + 4.0 * batch * shape.vocab,
        fixed_seconds=weight_bytes(recipe, shape) / _DISK,
    )


def _train(recipe: RecipeConfig, settings: RoundConfig, shape: Shape, hardware: Hardware) -> TrainCost:
    tokens = settings.batch_size * settings.gradient_accumulation_steps * settings.max_length
    trained = trained_weights(recipe, shape)
    # A forward is 2 operations a weight and token, a backward 4: half of it for the gradients of the weights.
    passes = 6 if trained == shape.parameters else 4
    passes += 2 if settings.gradient_checkpointing else 0
    attention = passes * shape.layers * shape.queries * settings.max_length  # both products, half of the square
    flops: float = tokens * (passes * (shape.parameters - shape.table) + attention)
    if settings.states == "on_policy":
        # Drafts, half of the row, are swept while training: half of a trajectory, over half of the slots, on average.
        flops += tokens * (shape.parameters - shape.table) * SWEEPS_PER_SLOT * settings.block_size / 4
    adam = 3 if settings.optimizer == "adamw" else 2
    checkpoint = 4.0 * trained * adam
    whole = recipe.mode == "full" and (trained == shape.parameters or recipe.peft.merge)
    return TrainCost(
        seconds_per_step=flops / (hardware.tflops * 1e12),
        tokens_per_step=tokens,
        memory=sum(training_memory(recipe, settings, shape).values()),
        fixed_seconds=weight_bytes(recipe, shape) / _DISK,
        checkpoint_seconds=checkpoint / _DISK,
        checkpoint_bytes=checkpoint,
        model_bytes=shape.parameters * BYTES[recipe.model.dtype] if whole else 4.0 * trained,
    )


def _measure(recipe: RecipeConfig, shape: Shape, hardware: Hardware) -> MeasureCost:
    flops = 2 * (shape.parameters - shape.table)
    one = _forward(flops, 1, weight_bytes(recipe, shape), hardware)
    if recipe.evaluation is None:
        return MeasureCost(0, 0, 0, 0, one, 1.0)
    settings = recipe.evaluation
    many = _forward(flops, settings.batch_size, weight_bytes(recipe, shape), hardware)
    length = settings.max_new_tokens
    cache = settings.batch_size * (PROMPT + length) * shape.layers * 2 * shape.keys * BYTES[recipe.model.dtype]
    return MeasureCost(
        seconds_per_answer=length * many / settings.batch_size,
        seconds_per_timed=length * one * (2 + len(settings.decode)),
        memory=weight_bytes(recipe, shape) + cache,
        fixed_seconds=weight_bytes(recipe, shape) / _DISK,
        ar_seconds_per_token=one,
        cost_ratio=1.0,
    )


def _forward(flops: float, rows: int, weights: float, hardware: Hardware) -> float:
    """Seconds of a forward over one token of each row: weights are read, or used, whichever takes longer."""
    return max(weights / (hardware.bandwidth * 1e9), rows * flops / (hardware.tflops * 1e12))


def prompt_count(recipe: RecipeConfig, index: int) -> int:
    """Prompts of a round, as far as the settings or a file tell.

    Raises:
        ConfigError: They do not.
    """
    prompts = round_prompts(recipe, index)
    path = Path(prompts.source)
    if path.is_file() and prompts.source != BUILTIN:
        left = max(0, count_lines(path) - prompts.offset)
        return left if prompts.limit is None else min(left, prompts.limit)
    if prompts.limit is None:
        raise ConfigError("How many prompts there are is not known without reading them", remedy="set prompts.limit")
    return prompts.limit
