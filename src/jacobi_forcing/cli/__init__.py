"""The command `jforce`: one verb a stage."""

from __future__ import annotations

from jacobi_forcing.cli.app import main

__all__ = ["main"]
