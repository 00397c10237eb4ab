"""`jforce generate`: one prompt, one answer."""

from __future__ import annotations

import dataclasses
import math
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from jacobi_forcing.cli import options
from jacobi_forcing.cli.console import note, print_json, print_text
from jacobi_forcing.config import DecodeConfig, ModelConfig, PromptsConfig
from jacobi_forcing.embedded import BUILTIN
from jacobi_forcing.errors import ConfigError, DataError

Budget = Annotated[
    int | None,
    typer.Option(
        help="Longest answer, tokens.", show_default=f"{options.DEFAULT_BUDGET}, or what the model's context leaves"
    ),
]
ShowSweeps = Annotated[bool, typer.Option("--show-sweeps", help="Show every sweep: accepted text solid, guesses dim.")]


def generate(
    context: typer.Context,
    prompt: Annotated[str | None, typer.Argument(help="The prompt; - or nothing reads standard input.")] = None,
    prompt_file: Annotated[Path | None, typer.Option(help="Read the prompt from this file.")] = None,
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
    static_shapes: options.StaticShapes = DecodeConfig.static_shapes,
    temperature: options.Temperature = None,
    top_k: options.TopK = None,
    top_p: options.TopP = None,
    sample_seed: options.SampleSeed = DecodeConfig.sample_seed,
    max_new_tokens: Budget = None,
    dtype: options.DType = ModelConfig.dtype,
    device: options.Device = ModelConfig.device,
    pack_weights: options.PackWeights = ModelConfig.pack_weights,
    trust_remote_code: options.TrustRemoteCode = ModelConfig.trust_remote_code,
    show_sweeps: ShowSweeps = False,
    json: options.Json = False,
) -> None:
    """Answer one prompt, several tokens a forward pass, with exactly the text of decoding one token at a time.

    Settings that were saved with the model stand for the decoder's options that are not given.
    """
    given = dict(locals())
    if max_new_tokens is not None and max_new_tokens < 1:
        raise ConfigError("'max_new_tokens' is too small", seen=max_new_tokens, expected="at least 1")
    options.settings(DecodeConfig, given)  # wrong ones are better known before anything is loaded
    sampling = _sampling(temperature, top_k, top_p, sample_seed)
    settings = options.settings(ModelConfig, given, name=model)
    how = options.settings(PromptsConfig, given, source="prompt")  # checks the template before anything is loaded
    text = read_prompt(prompt, prompt_file)

    from jacobi_forcing.cli.answers import answer, describe
    from jacobi_forcing.decode.saved import saved_decode
    from jacobi_forcing.loading import load
    from jacobi_forcing.trajectories.prompts import encode_prompt

    loaded = load(settings)
    _, ids = encode_prompt(text, loaded.tokenizer, how.template)
    saved = saved_decode(loaded.model.generation_config)
    typed = options.typed(context, DecodeConfig, given)
    decode = dataclasses.replace(saved, **typed)
    _note_idle(decode, typed)
    result = answer(loaded, ids, decode, max_new_tokens, show_sweeps=show_sweeps, sampling=sampling)
    if json:
        print_json(result)
        return
    print_text(result["text"])
    note(describe(result))


def _note_idle(decode: DecodeConfig, typed: dict[str, Any]) -> None:
    """Say which options that were given the decoder does not use."""
    from jacobi_forcing.bench.contestants import used

    effective = used(decode)
    idle = [name for name, value in typed.items() if name != "sample_seed" and getattr(effective, name) != value]
    if idle:
        names = ", ".join("--" + name.replace("_", "-") for name in idle)
        note(f"The decoder '{decode.decoder}' makes no use of {names}")


def _sampling(
    temperature: float | None, top_k: int | None, top_p: float | None, sample_seed: int | None
) -> dict[str, Any]:
    """What the library's generate is told where sampling is asked for; nothing where it is not.

    Raises:
        ConfigError: An option of sampling is given, and no temperature.
    """
    if temperature is not None and not math.isfinite(temperature):
        raise ConfigError("The temperature is out of range", seen=temperature, expected="a finite number, 0 or more")
    if temperature:
        return {
            "do_sample": True,
            "temperature": temperature,
            "top_k": top_k or 0,
            "top_p": 1.0 if top_p is None else top_p,
        }
    idle = {"--top-k": top_k, "--top-p": top_p, "--sample-seed": sample_seed}
    seen = [name for name, value in idle.items() if value is not None]
    if seen:
        raise ConfigError("Decoding is greedy", seen=", ".join(seen), remedy="add --temperature, or leave these out")
    return {}


def read_prompt(argument: str | None, file: Path | None) -> str:
    """The prompt from the argument, a file or standard input.

    Raises:
        ConfigError: Two sources are named.
        DataError: There is nothing in it, or it cannot be read.
    """
    if argument is not None and file is not None:
        raise ConfigError("A prompt and --prompt-file are both given", remedy="leave one of them out")
    if file is not None:
        try:
            text = file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise DataError(f"Cannot read '{file}'", seen=str(error), remedy="check the path") from error
    elif argument is None or argument == "-":
        if argument is None and sys.stdin.isatty():
            raise DataError("There is no prompt", expected="an argument, --prompt-file, or text on standard input")
        try:
            text = sys.stdin.read()
        except UnicodeDecodeError as error:
            raise DataError("Standard input is not UTF-8 text", seen=str(error)) from error
    else:
        return _not_empty(argument)
    # Files and pipes end with a newline that nobody means.
    return _not_empty(text.removesuffix("\n"))


def _not_empty(text: str) -> str:
    if not text:
        raise DataError("The prompt is empty", expected="at least one character")
    if any("\ud800" <= character <= "\udfff" for character in text):
        raise DataError("The prompt is not UTF-8 text", seen=ascii(text[:40]))
    return text
