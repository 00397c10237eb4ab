"""How noisy each block of a response is to be (paper, Eq. 7), and which state comes nearest. Pure functions."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from jacobi_forcing.blocks import noise_ratio
from jacobi_forcing.errors import ConfigError


def progressive(block: int, window_size: int, phase: int = 0) -> float:
    """The noise ratio asked of block i: t_i = ((i + phase) mod w) / w.

    It climbs from 0 to (w - 1)/w over w blocks and starts again, so that a very noisy block follows less noisy ones.

    Args:
        block: i, index of the block in its response, from 0.
        window_size: w, blocks per cycle.
        phase: Where in the cycle the response starts, blocks; the paper's is 0.

    Returns:
        A ratio in [0, 1).
    """
    return ((block + phase) % window_size) / window_size


SCHEDULES: dict[str, Callable[[int, int, int], float]] = {"progressive": progressive}
"""Name -> (block, window size, phase) -> noise ratio."""


def by_name(name: str) -> Callable[[int, int, int], float]:
    """The schedule of that name.

    Raises:
        ConfigError: There is none.
    """
    if name not in SCHEDULES:
        raise ConfigError("Unknown schedule", seen=repr(name), expected="one of " + ", ".join(SCHEDULES))
    return SCHEDULES[name]


def draw_phase(seed: int, epoch: int, sample: int, window_size: int) -> int:
    """A phase in 0..w-1 that depends on nothing but the arguments, on every machine.

    With phase 0 a response of fewer than w blocks never sees the noisy end of the cycle; a phase drawn anew in each
    epoch lets every block see every ratio.
    """
    # Seeding with text hashes it by SHA-512; arithmetic on the numbers would give neighbours related draws.
    return random.Random(f"{seed}/{epoch}/{sample}").randrange(window_size)


def noise_ratios(states: Sequence[Sequence[int]]) -> list[float]:
    """The noise ratio of each state of one block, whose last state is the fixed point."""
    return [noise_ratio(state, states[-1]) for state in states]


def nearest_state(ratios: Sequence[float], target: float) -> int:
    """Index of the state whose noise ratio is nearest the target.

    Of two equally near the noisier is taken, of two equally noisy the earlier: it is the harder one to learn from.

    Args:
        ratios: Noise ratios of a block's states, in the order of the trajectory.
        target: The ratio asked for.
    """
    # Rounding makes a tie a tie: 0.3 - 0.2 and 0.4 - 0.3 differ in the last bit.
    return min(range(len(ratios)), key=lambda index: (round(abs(ratios[index] - target), 9), -ratios[index]))
