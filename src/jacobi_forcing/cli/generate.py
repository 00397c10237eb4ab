"""`jforce generate`: one prompt, one answer."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from jacobi_forcing.cli import options
from jacobi_forcing.cli.console import note, print_json, print_text
from jacobi_forcing.config import DecodeConfig, ModelConfig, PromptsConfig
from jacobi_forcing.embedded import BUILTIN
from jacobi_forcing.errors import ConfigError, DataError


def generate(
    prompt: Annotated[str | None, typer.Argument(help="The prompt; - or nothing reads standard input.")] = None,
    prompt_file: Annotated[Path | None, typer.Option(help="Read the prompt from this file.")] = None,
    model: options.Model = BUILTIN,
    template: options.Template = "auto",
    decoder: options.Decoder = DecodeConfig.decoder,
    block_size: options.BlockSize = DecodeConfig.block_size,
    draft_init: options.DraftInit = DecodeConfig.draft_init,
    draft_seed: options.DraftSeed = DecodeConfig.draft_seed,
    max_new_tokens: Annotated[
        int | None,
        typer.Option(
            help="Longest answer, tokens.", show_default=f"{options.DEFAULT_BUDGET}, or what the model's context leaves"
        ),
    ] = None,
    dtype: options.DType = ModelConfig.dtype,
    device: options.Device = ModelConfig.device,
    trust_remote_code: options.TrustRemoteCode = ModelConfig.trust_remote_code,
    show_sweeps: Annotated[
        bool, typer.Option("--show-sweeps", help="Show every sweep: accepted text solid, guesses dim.")
    ] = False,
    json: options.Json = False,
) -> None:
    """Answer one prompt greedily, several tokens a forward pass, with exactly the text of greedy decoding."""
    given = dict(locals())
    if max_new_tokens is not None and max_new_tokens < 1:
        raise ConfigError("'max_new_tokens' is too small", seen=max_new_tokens, expected="at least 1")
    decode = options.settings(DecodeConfig, given)
    settings = options.settings(ModelConfig, given, name=model)
    how = options.settings(PromptsConfig, given, source="prompt")  # checks the template before anything is loaded
    text = read_prompt(prompt, prompt_file)

    from jacobi_forcing.cli.answers import answer, describe
    from jacobi_forcing.loading import load
    from jacobi_forcing.trajectories.prompts import encode_prompt

    loaded = load(settings)
    _, ids = encode_prompt(text, loaded.tokenizer, how.template)
    result = answer(loaded, ids, decode, max_new_tokens, show_sweeps=show_sweeps)
    if json:
        print_json(result)
        return
    print_text(result["text"])
    note(describe(result))


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
        text = sys.stdin.read()
    else:
        return _not_empty(argument)
    # Files and pipes end with a newline that nobody means.
    return _not_empty(text.removesuffix("\n"))


def _not_empty(text: str) -> str:
    if not text:
        raise DataError("The prompt is empty", expected="at least one character")
    return text
