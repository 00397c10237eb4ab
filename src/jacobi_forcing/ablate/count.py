"""What a model reaches, counted and not timed: many prompts side by side, so that a grid of models is soon measured."""

from __future__ import annotations

from typing import Any

from jacobi_forcing.backbone import Backbone
from jacobi_forcing.bench.contestants import label_of
from jacobi_forcing.config import DecodeConfig, EvaluationConfig, ModelConfig
from jacobi_forcing.evaluate.quality import answers, quality_of
from jacobi_forcing.loading import load
from jacobi_forcing.recipe.reporter import Reporter
from jacobi_forcing.trajectories.prompts import load_prompts


def count_model(
    model: ModelConfig, settings: EvaluationConfig, *, tpf_prompts: int, reporter: Reporter
) -> dict[str, Any]:
    """Tokens per forward of each parallel decoder on some prompts, and the quality of greedy answers to all.

    Args:
        model: The model.
        settings: Prompts, task, decoders, longest answer and batch size.
        tpf_prompts: How many of the prompts are decoded in parallel.
        reporter: Told about progress.

    Returns:
        `decoders`: `tokens_per_forward`, and `exact` answers that equal greedy ones `of` how many, for each decoder by
        its name; `quality`; a `summary`.

    Raises:
        JForceError: See `load`, `load_prompts` and `quality_of`.
    """
    loaded = load(model)
    backbone = Backbone(loaded.model)
    prompts = load_prompts(settings.prompts, loaded.tokenizer, context_length=backbone.context_length)
    few = prompts[:tpf_prompts]
    parallel = [config for config in settings.decode if config.decoder != "ar"]
    total, done = len(prompts) + len(few) * len(parallel), 0

    def answer(to: Any, decode: DecodeConfig | None) -> Any:
        return answers(
            backbone,
            to,
            max_new_tokens=settings.max_new_tokens,
            batch_size=settings.batch_size,
            decode=decode,
            vocabulary=loaded.vocabulary,
            on_progress=lambda count, of: reporter.progress(done + count, total, "answers"),
        )

    responses, _ = answer(prompts, None)
    quality = quality_of(responses, prompts, loaded.tokenizer, backbone.eos_ids, settings.task)
    done = len(prompts)
    decoders = {}
    for config in parallel:
        found, stats = answer(few, config)
        done += len(few)
        decoders[decoder_name(config)] = {
            "tokens_per_forward": round(stats.tokens_per_forward, 4),
            "exact": sum(ours == theirs for ours, theirs in zip(found, responses, strict=False)),
            "of": len(few),
        }
    told = ", ".join(f"{one['tokens_per_forward']:.2f} TPF with {name}" for name, one in decoders.items())
    solved = "" if quality.solved is None else f", {100 * quality.solved.share:.1f} % solved"
    return {"decoders": decoders, "quality": quality.to_dict(), "summary": told + solved}


def decoder_name(config: DecodeConfig) -> str:
    """What tables call a decoder: its name, its block size, and settings that are not the defaults."""
    return ", ".join(filter(None, [f"{config.decoder} n={config.block_size}", label_of(config)]))
