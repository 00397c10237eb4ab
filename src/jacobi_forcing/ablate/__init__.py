"""Grids of recipes that differ in named keys, at an equal budget, over several seeds, and one table of them."""

from __future__ import annotations

from jacobi_forcing.ablate.grid import GridConfig, find_grid, load_grid
from jacobi_forcing.ablate.run import run_grid

__all__ = ["GridConfig", "find_grid", "load_grid", "run_grid"]
