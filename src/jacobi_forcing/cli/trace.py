"""`jforce trace`: one prompt's sweeps, in the terminal and as a page."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from jacobi_forcing.cli import options
from jacobi_forcing.cli.console import note, print_json
from jacobi_forcing.cli.generate import read_prompt
from jacobi_forcing.config import DecodeConfig, ModelConfig, PromptsConfig
from jacobi_forcing.embedded import BUILTIN
from jacobi_forcing.errors import ConfigError
from jacobi_forcing.files import write_json, write_text

DEFAULT_TOKENS = 128
Budget = Annotated[
    int | None,
    typer.Option(help="Longest answer, tokens.", show_default=f"{DEFAULT_TOKENS}, or what the model's context leaves"),
]
Outputs = Annotated[
    list[Path] | None,
    typer.Option("--output", "-o", help="File to write: .html a page, .json its figures. Repeatable."),
]


def trace(
    context: typer.Context,
    prompt: Annotated[str | None, typer.Argument(help="The prompt; - or nothing reads standard input.")] = None,
    prompt_file: Annotated[Path | None, typer.Option(help="Read the prompt from this file.")] = None,
    output: Outputs = None,
    model: options.Model = BUILTIN,
    adapter: options.Adapter = ModelConfig.adapter,
    template: options.Template = "auto",
    decoder: options.Decoder = DecodeConfig.decoder,
    block_size: options.BlockSize = DecodeConfig.block_size,
    candidates: options.Candidates = DecodeConfig.candidates,
    num_blocks: options.NumBlocks = DecodeConfig.num_blocks,
    spawn_ratio: options.SpawnRatio = DecodeConfig.spawn_ratio,
    prompt_ngrams: options.PromptNgrams = DecodeConfig.prompt_ngrams,
    draft_init: options.DraftInit = DecodeConfig.draft_init,
    draft_seed: options.DraftSeed = DecodeConfig.draft_seed,
    max_new_tokens: Budget = None,
    dtype: options.DType = ModelConfig.dtype,
    device: options.Device = ModelConfig.device,
    pack_weights: options.PackWeights = ModelConfig.pack_weights,
    trust_remote_code: options.TrustRemoteCode = ModelConfig.trust_remote_code,
    json: options.Json = False,
) -> None:
    """Show every sweep of one greedy answer: what was accepted, recycled, right too early, and still noise.

    Settings that were saved with the model stand for the decoder's options that are not given.
    """
    given = dict(locals())
    if max_new_tokens is not None and max_new_tokens < 1:
        raise ConfigError("'max_new_tokens' is too small", seen=max_new_tokens, expected="at least 1")
    places = _places(output or [])
    options.settings(DecodeConfig, given)
    settings = options.settings(ModelConfig, given, name=model)
    how = options.settings(PromptsConfig, given, source="prompt")
    text = read_prompt(prompt, prompt_file)
    typed = options.typed(context, DecodeConfig, given)

    from jacobi_forcing.cli.traced import show
    from jacobi_forcing.viz.trace_page import page

    value = _recorded(settings, text, how, typed, max_new_tokens)
    show(value, to_stderr=json)
    for path in places:
        if path.suffix.lower() == ".json":
            write_json(path, value)
        else:
            write_text(path, page(value))
        note(f"Written: {path}")
    if json:
        print_json(value)


def _recorded(
    settings: ModelConfig, text: str, how: PromptsConfig, typed: Mapping[str, Any], max_new_tokens: int | None
) -> dict[str, Any]:
    """Load, decode and keep every sweep."""
    from jacobi_forcing import provenance
    from jacobi_forcing.backbone import Backbone
    from jacobi_forcing.decode.saved import saved_decode
    from jacobi_forcing.evaluate.quality import budget
    from jacobi_forcing.loading import load
    from jacobi_forcing.trajectories.prompts import encode_prompt
    from jacobi_forcing.viz.trace import record

    loaded = load(settings)
    _, ids = encode_prompt(text, loaded.tokenizer, how.template)
    decode = dataclasses.replace(saved_decode(loaded.model.generation_config), **typed)
    limit = max_new_tokens or budget(Backbone(loaded.model), len(ids), DEFAULT_TOKENS)
    value = record(loaded, ids, decode, limit)
    named = {"model": settings.name, "adapter": settings.adapter}
    portable = {key: None if name is None else provenance.portable(name) for key, name in named.items()}
    return {**value, **portable, "provenance": provenance.collect()}


def _places(paths: list[Path]) -> list[Path]:
    for path in paths:
        if path.suffix.lower() not in (".html", ".htm", ".json"):
            raise ConfigError(f"Cannot tell what to write into '{path}'", expected="a name that ends in .html or .json")
    return paths
