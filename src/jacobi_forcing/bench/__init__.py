"""Speed beside quality and exactness, all measured in one run."""

from __future__ import annotations

from jacobi_forcing.bench.cost import cost_ratios
from jacobi_forcing.bench.speed import SCHEMA_VERSION, DecoderResult, ModelResult, bench
from jacobi_forcing.bench.table import COLUMNS, markdown, notes, rows

__all__ = [
    "COLUMNS",
    "SCHEMA_VERSION",
    "DecoderResult",
    "ModelResult",
    "bench",
    "cost_ratios",
    "markdown",
    "notes",
    "rows",
]
