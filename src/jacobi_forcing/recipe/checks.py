"""What a recipe's parts must not say of one another, where it is about shared work and work done elsewhere."""

from __future__ import annotations

from jacobi_forcing.config import RecipeConfig
from jacobi_forcing.errors import ConfigError


def check_sources(recipe: RecipeConfig) -> None:
    """Refuse responses that cannot be every round's, and probes of a model that no process has.

    Raises:
        ConfigError: There are such.
    """
    if recipe.collect.responses is not None and recipe.mode == "full" and len(recipe.rounds) > 1:
        raise ConfigError(
            "'collect.responses' is the text of one model, and each round has its own",
            seen=f"{len(recipe.rounds)} rounds",
            remedy="use one round, or mode: adapter, whose base stays as it is",
        )
    probes = recipe.evaluation.probe_steps if recipe.evaluation is not None else None
    if probes is not None and any(settings.fsdp or settings.deepspeed for settings in recipe.rounds):
        raise ConfigError(
            "'evaluation.probe_steps' does not go with fsdp or deepspeed",
            seen=probes,
            remedy="remove it: a probe decodes in one process, and none has the whole model",
        )
