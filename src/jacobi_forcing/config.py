"""Settings as frozen dataclasses, units in each field's help."""

from __future__ import annotations

import dataclasses
from typing import Literal

from jacobi_forcing.errors import ConfigError
from jacobi_forcing.schema import Config, option

Decoder = Literal["ar", "jacobi", "window", "recycle", "multiblock"]
DraftInit = Literal["prompt", "vocabulary", "last", "pool"]
FirstState = Literal["prompt", "vocabulary"]
AnswerFilter = Literal["finished", "no_repetition", "final_answer", "unit_tests"]
CollectExecutor = Literal["local", "ray"]
Schedule = Literal["progressive", "random", "reverse"]
LossPositions = Literal["all", "from_mismatch"]
LossReduction = Literal["block", "token"]
States = Literal["stored", "on_policy"]
SchedulePhase = Literal["fixed", "random"]
Mask = Literal["noise_conditioned", "noise_conditioned_window", "intra_window_clean", "clean_context"]
Template = Literal["auto", "chat", "raw"]
Task = Literal["none", "word_problems", "gsm8k", "orders", "math", "mbpp"]
Optimizer = Literal["adamw", "muon"]
Mode = Literal["full", "adapter"]
AdapterStates = Literal["drawn", "every", "stored"]
ReportTo = Literal["none", "tensorboard", "wandb"]
Misfits = Literal["error", "skip"]
Attention = Literal["auto", "flex", "sdpa"]
PeftMethod = Literal["none", "lora", "dora"]
Quantization = Literal["none", "4bit"]
ROUND_LENGTHS = ("steps", "train_tokens", "core_seconds")
"""Settings of a round of which one says how long it trains."""


@dataclasses.dataclass(frozen=True)
class DecodeConfig(Config):
    """How to decode: `generate(..., decode=DecodeConfig(...))`."""

    decoder: Decoder = option(
        "window",
        help="ar: one token a forward; jacobi: block after block; window: a running window of drafts; "
        "recycle: the window and rejected runs beside it; multiblock: several blocks at once (Algorithm 1)",
    )
    block_size: int = option(16, help="draft tokens in flight, or per block of multiblock, tokens", at_least=1)
    candidates: int = option(
        4, help="recycle, multiblock: runs out of the n-gram pool verified beside the draft, lines", at_least=0
    )
    num_blocks: int = option(2, help="multiblock: K, blocks in flight", at_least=1)
    spawn_ratio: float = option(
        0.0, help="multiblock: r, accepted share of a block at which the next one starts", at_least=0, at_most=1
    )
    prompt_ngrams: bool = option(
        True, help="recycle, multiblock: the pool also holds the prompt and the text so far, not rejected runs only"
    )
    draft_init: DraftInit = option(
        "prompt",
        help="what fills new draft slots: prompt: its tokens at random; vocabulary: the tokenizer's; last: the last "
        "prediction again; pool: what followed it before",
    )
    draft_seed: int = option(0, help="seed of the fill; it never changes the text", at_least=0)
    sample_seed: int | None = option(
        None, help="seed of sampling; null draws one from torch's global generator", at_least=0
    )
    static_shapes: bool = option(
        False, help="preallocate the KV cache and pad sweeps to a few sizes, for torch.compile and CUDA graphs"
    )


@dataclasses.dataclass(frozen=True)
class ModelConfig(Config):
    """Which model, and how it is loaded."""

    name: str = option(help="hub name, folder, or builtin:word-problems")
    dtype: Literal["float32", "bfloat16", "float16"] = option("float32", help="dtype of the weights")
    device: str = option("auto", help="torch device; auto takes a GPU where there is one")
    trust_remote_code: bool = option(False, help="run modelling code that comes with the model")
    quantization: Quantization = option(
        "none", help="4bit: weights of the linear layers in 4 bits (bitsandbytes), on a CUDA device only; none"
    )
    pack_weights: bool = option(
        False,
        help="lay the weights of linear layers out for sweeps of a few tokens: faster on a CPU, in float32 only, and a "
        "second copy in memory",
    )
    adapter: str | None = option(
        None, help="folder of a gated adapter: it drafts, the model verifies, and the text is the model's own"
    )


@dataclasses.dataclass(frozen=True)
class PromptsConfig(Config):
    """Where prompts come from and how they are put to the model."""

    source: str = option(help="path of a .jsonl file, hub data set name, builtin:word-problems, or builtin:orders")
    subset: str | None = option(None, help="configuration of a hub data set, or mixed/regular of the builtin one")
    split: str = option("train", help="split of a hub data set, or train/heldout of the builtin one")
    field: str = option("prompt", help="key that holds the prompt")
    answer_field: str | None = option(None, help="key that holds the reference answer; the model never sees it")
    template: Template = option("auto", help="chat: by the chat template; raw: as it is; auto: chat if there is one")
    offset: int = option(0, help="prompts to skip", at_least=0)
    limit: int | None = option(None, help="prompts to use; null for all", at_least=1)
    seed: int = option(0, help="seed of the builtin source", at_least=0)


@dataclasses.dataclass(frozen=True)
class CollectConfig(Config):
    """How trajectories are collected."""

    max_new_tokens: int = option(512, help="longest response, tokens", at_least=1)
    batch_size: int = option(8, help="responses generated or swept side by side", at_least=1)
    shard_size: int = option(64, help="responses per Parquet shard; what a kill can lose", at_least=1)
    draft_init: FirstState = option("prompt", help="what the first state of a block is drawn from")
    seed: int = option(0, help="seed of the first states", at_least=0)
    needed_only: bool = option(
        False,
        help="sweep a block only until the state that the round's schedule asks for has been seen; where something is "
        "drawn, until all that may be asked for have",
    )
    responses: str | None = option(
        None, help="JSON lines with responses that another engine made of the same prompts; null: the model writes them"
    )
    responses_check: int = option(
        16, help="how many of these are compared with the model before they are used; 0 for all", at_least=0
    )
    filters: tuple[AnswerFilter, ...] | None = option(
        None,
        help="answers that are kept: finished (came to an end), no_repetition (does not end in a loop), final_answer "
        "(right by the reference answer), unit_tests (its program passes the tests in the reference answer)",
    )
    filter_task: Task = option("none", help="how final_answer grades; none: by the source, gsm8k for files")
    executor: CollectExecutor = option(
        "local", help="who collects: local (this process, or all that torchrun started) or ray (a pool of actors)"
    )
    workers: int = option(1, help="ray: actors, each with a copy of the model", at_least=1)
    worker_gpus: float = option(0.0, help="ray: GPUs of each actor", at_least=0)


@dataclasses.dataclass(frozen=True)
class RoundConfig(Config):
    """One round: collect with the current model, then train."""

    block_size: int = option(help="n, tokens per block", at_least=1)
    steps: int | None = option(
        None, help="optimiser steps; one of steps, train_tokens and core_seconds says how long", at_least=1
    )
    train_tokens: int | None = option(
        None,
        help="train about this many tokens: those of packed rows (prompt, noisy and clean), padding not",
        at_least=1,
    )
    core_seconds: float | None = option(
        None, help="end once the process has spent this, seconds x cores; jforce run counts the collecting too", above=0
    )
    window_size: int = option(16, help="w of Eq. 7, blocks per noise cycle", at_least=1)
    learning_rate: float = option(1e-6, help="peak learning rate", above=0)
    batch_size: int = option(4, help="packed rows per step and device", at_least=1)
    gradient_accumulation_steps: int = option(1, help="batches per optimiser step", at_least=1)
    max_length: int = option(2048, help="longest packed row, tokens (noisy and clean counted)", at_least=8)
    ar_weight: float = option(1.0, help="w of Eq. 9, weight of the AR loss", at_least=0)
    schedule: Schedule = option(
        "progressive",
        help="noise ratio over blocks: progressive climbs (Eq. 7), reverse falls, random is drawn (Table 4)",
    )
    t_min: float = option(0.0, help="noise ratio at the clean end of the schedule", at_least=0, at_most=1)
    t_max: float = option(1.0, help="noise ratio that its noisy end comes up to", at_least=0, at_most=1)
    schedule_phase: SchedulePhase = option("fixed", help="where a response starts the cycle: fixed (at 0) or random")
    states: States = option(
        "stored",
        help="noisy blocks: stored (states of the trajectories, as the paper does) or on_policy (the model that trains "
        "makes them on the fly; the trajectories' responses are used alone)",
    )
    mask: Mask = option(
        "noise_conditioned",
        help="noisy blocks see noisy blocks (noise_conditioned, Fig. 2b), those of their window "
        "(noise_conditioned_window), all but those (intra_window_clean, NC-IC of Table 5), or clean ones "
        "(clean_context, the CLLM baseline)",
    )
    loss_positions: LossPositions = option(
        "all",
        help="slots of a block in the consistency loss: all, or those from its first wrong token on (from_mismatch)",
    )
    loss_reduction: LossReduction = option(
        "block", help="the consistency loss is a mean per block (Eq. 8) or per token"
    )
    temperature: float = option(1.0, help="T at which teacher and student are compared", above=0)
    optimizer: Optimizer = option("adamw", help="adamw (the paper), or muon for the layers' matrices")
    lr_scheduler: str = option("cosine", help="learning-rate schedule of transformers")
    warmup_ratio: float = option(0.03, help="share of the steps that warms up", at_least=0)
    prompts_offset: int = option(0, help="prompts to skip in this round", at_least=0)
    prompts_limit: int | None = option(None, help="prompts to collect in this round; null for all", at_least=1)
    misfits: Misfits = option("error", help="a sample that does not fit in a row: error, or skip it and count it")
    gradient_checkpointing: bool = option(False, help="compute activations twice instead of keeping them in memory")
    attention: Attention = option(
        "auto",
        help="flex: FlexAttention, rows padded to one of three lengths; sdpa: an additive mask of length squared; "
        "auto: flex on a CUDA device, sdpa elsewhere",
    )
    save_steps: int = option(100, help="steps between checkpoints; what a kill can lose", at_least=1)
    report_to: ReportTo = option(
        "none", help="none, tensorboard (files beside the log) or wandb: who else gets the log"
    )
    fsdp: bool = option(False, help="FSDP2: several GPUs share weights, gradients and optimiser state (torchrun)")
    fsdp_config: str | None = option(None, help="JSON file of transformers' fsdp_config")
    deepspeed: str | None = option(None, help="JSON file of DeepSpeed, in place of fsdp")

    def __post_init__(self) -> None:
        """Also check that one setting, and not two, says how long the round trains."""
        super().__post_init__()
        given = [name for name in ROUND_LENGTHS if getattr(self, name) is not None]
        if len(given) != 1:
            raise ConfigError(
                "How long a round trains is said by one setting",
                seen=" and ".join(given) or "none",
                expected="one of " + ", ".join(ROUND_LENGTHS),
            )


@dataclasses.dataclass(frozen=True)
class AdapterSettings(Config):
    """What a gated adapter is and how it is trained, with `mode: adapter`."""

    rank: int = option(32, help="r, rank of the adapter", at_least=1)
    alpha: float | None = option(None, help="its product is scaled by alpha / r; null: 2 r", above=0)
    targets: tuple[str, ...] | None = option(None, help="names of the layers it is put on; null: all linear ones")
    lines_per_response: int = option(8, help="draft lines that share one clean forward", at_least=1)
    max_sweeps: int = option(4, help="age of the oldest draft that is trained on, sweeps", at_least=0)
    states: AdapterStates = option(
        "every",
        help="every: train a line at every age up to max_sweeps; drawn: at one; stored: at one of the states that the "
        "base went through, which are then collected",
    )
    right_weight: float = option(0.0, help="weight of slots whose guesses so far are right", at_least=0)
    slot_decay: float = option(1.0, help="weight of a slot over that of the one before", at_least=0)


@dataclasses.dataclass(frozen=True)
class PeftSettings(Config):
    """Training few weights instead of all, with `mode: full`; the text may change."""

    method: PeftMethod = option("none", help="none: all weights are trained; lora or dora: an adapter of peft's")
    rank: int = option(16, help="r, rank of the adapter", at_least=1)
    alpha: float | None = option(None, help="its product is scaled by alpha / r; null: 2 r", above=0)
    targets: tuple[str, ...] | None = option(None, help="names of the layers it is put on; null: all linear ones")
    merge: bool = option(True, help="save a plain model with the adapter in its weights; false: a peft folder")


@dataclasses.dataclass(frozen=True)
class EvaluationConfig(Config):
    """What is measured at the end, for the base and the trained model."""

    prompts: PromptsConfig = option(help="prompts that were not trained on")
    task: Task = option("none", help="how answers are graded; none reports speed and exactness only")
    decode: tuple[DecodeConfig, ...] = option((DecodeConfig(),), help="decoders to compare with ar")
    speed_prompts: int | None = option(None, help="prompts that are timed one by one; null for all", at_least=1)
    max_new_tokens: int = option(512, help="longest answer, tokens", at_least=1)
    batch_size: int = option(16, help="answers generated side by side for grading", at_least=1)
    probe_steps: int | None = option(
        None, help="training steps between probes of TPF and quality; null: none", at_least=1
    )
    probe_prompts: int = option(8, help="held-out prompts per probe", at_least=1)
    probe_training_prompts: int = option(8, help="training prompts per probe", at_least=0)
    halt_repetition: float | None = option(
        0.5,
        help="a probe ends training where so much more of its answers loop than at step 0, or the AR loss is above "
        "ln V; a share; null: never",
        above=0,
        at_most=1,
    )
    every_round: bool = option(False, help="measure the model of each round, not of the last one only")
    base: bool = option(True, help="measure the model that the rounds start from, too")


@dataclasses.dataclass(frozen=True)
class RecipeConfig(Config):
    """A whole run: model, prompts, rounds, evaluation."""

    model: ModelConfig = option(help="the model to start from")
    prompts: PromptsConfig = option(help="prompts to train on")
    rounds: tuple[RoundConfig, ...] = option(help="one or more rounds")
    mode: Mode = option(
        "full",
        help="full: the weights learn (the paper); adapter: a gated LoRA drafts and the weights stay as they are",
    )
    adapter: AdapterSettings = option(AdapterSettings(), help="with mode adapter: what it is and how it is trained")
    peft: PeftSettings = option(
        PeftSettings(), help="with mode full: train an adapter of peft's instead of all weights"
    )
    evaluation: EvaluationConfig | None = option(None, help="what to measure; null for nothing")
    collect: CollectConfig = option(CollectConfig(), help="how trajectories are collected")
    output: str = option("runs/run", help="folder of the run, relative to the working folder")
    seed: int = option(0, help="seed of everything random", at_least=0)
