"""Gathers the verbs, and turns every way to fail into one line and an exit status."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Annotated, Any

import typer

from jacobi_forcing import __version__
from jacobi_forcing.cli import (
    ablate,
    bench,
    collect,
    compare,
    eval,
    generate,
    plan,
    profile,
    quickstart,
    report,
    run,
    trace,
    train,
    tune,
)
from jacobi_forcing.cli.console import error_line, quiet
from jacobi_forcing.errors import BAD_INPUT, FAULT, INTERRUPTED, OK, guarded
from jacobi_forcing.processes import is_main

DEBUG = "--debug"
_EPILOG = f"{DEBUG}, anywhere on the line, shows the traceback of an error and the libraries' own warnings."
# What typer raises for a wrong command line; the class has had several homes, its subclass here is public.
_WrongUsage: type[Exception] = typer.BadParameter.__mro__[2]

app = typer.Typer(
    name="jforce",
    help="Turn a causal language model into one that decodes several tokens per forward, and measure what it gained.",
    epilog=_EPILOG,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)
# A verb imports what brings torch or transformers inside its functions: help and version need not wait for them.
_VERBS = (
    generate,
    collect,
    train,
    plan,
    run,
    ablate,
    bench,
    eval,
    profile,
    trace,
    report,
    compare,
    tune,
    quickstart,
)
for _verb in _VERBS:
    app.command(epilog=_EPILOG)(_verb.__dict__[_verb.__name__.rpartition(".")[2]])


def _version(wanted: bool) -> None:
    if wanted:
        print(f"jforce {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and end.")
    ] = False,
) -> None:
    """Options before the verb."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        arguments: Without the program's name; the process's own by default.

    Returns:
        0; 2 for bad input, after one line on standard error; 130 after Ctrl-C; 1 for a fault of this package.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    debug = DEBUG in given
    given = [argument for argument in given if argument != DEBUG]
    if not debug:
        quiet()
    if not is_main():
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115  # results are the main process's to print
    try:
        return guarded(lambda: _call(given), say=error_line, debug=debug)
    except typer.Abort:
        return INTERRUPTED
    except _WrongUsage as error:
        error_line(_usage(error))
        return BAD_INPUT
    except Exception as error:
        if debug:
            raise
        text = " ".join(str(error).split())
        error_line(f"{type(error).__name__}: {text} (a fault of jforce; {DEBUG} shows where)")
        return FAULT


def _call(arguments: list[str]) -> int:
    command: Any = typer.main.get_command(app)
    status = command.main(arguments, prog_name="jforce", standalone_mode=False)
    return status if isinstance(status, int) else OK


def _usage(error: Any) -> str:
    """The message of a wrong command line, with where to look."""
    text = " ".join(str(error.format_message()).split()).rstrip(".")
    context = getattr(error, "ctx", None)
    where = context.command_path if context is not None else "jforce"
    return f"{text or 'A verb is missing'}; see {where} --help."
