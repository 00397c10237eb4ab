"""Recipes: rounds of collecting and training, then what was gained, every stage resumable."""

from __future__ import annotations

from jacobi_forcing.recipe.reporter import Reporter
from jacobi_forcing.recipe.run import run_recipe
from jacobi_forcing.recipe.settings import find_recipe, load_recipe, round_prompts

__all__ = ["Reporter", "find_recipe", "load_recipe", "round_prompts", "run_recipe"]
