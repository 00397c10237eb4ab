"""What a recipe will cost before it starts: memory, time and disk of every stage, and when training pays.

Estimates come from a micro-run of the real stages at real shapes on this machine (`microrun`), or from the model's
config alone (`arithmetic`), for a machine that is not there.
"""

from jacobi_forcing.recipe.planning.arithmetic import Hardware
from jacobi_forcing.recipe.planning.estimate import estimate_recipe

__all__ = ["Hardware", "estimate_recipe"]
