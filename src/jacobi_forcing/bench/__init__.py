"""Speed beside quality and exactness, all measured in one run."""

from __future__ import annotations

from jacobi_forcing.bench.contestants import assisted, prompt_lookup
from jacobi_forcing.bench.cost import cost_ratios
from jacobi_forcing.bench.overhead import overheads
from jacobi_forcing.bench.results import SCHEMA_VERSION, DecoderResult, ModelResult
from jacobi_forcing.bench.speed import bench
from jacobi_forcing.bench.table import COLUMNS, columns, markdown, notes, rows

__all__ = [
    "COLUMNS",
    "SCHEMA_VERSION",
    "DecoderResult",
    "ModelResult",
    "assisted",
    "bench",
    "columns",
    "cost_ratios",
    "markdown",
    "notes",
    "overheads",
    "prompt_lookup",
    "rows",
]
