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


def reverse(block: int, window_size: int, phase: int = 0) -> float:
    """The cycle of `progressive` run backwards: from (w - 1)/w down to 0 (Table 4)."""
    return (window_size - 1 - (block + phase) % window_size) / window_size


NAMES = ("progressive", "random", "reverse")
"""The schedules of the paper's Table 4."""


def targets(
    name: str, blocks: int, window_size: int, *, phase: int = 0, t_min: float = 0.0, t_max: float = 1.0, seed: str = ""
) -> list[float]:
    """The noise ratio asked of each block of one response.

    Args:
        name: One of `NAMES`. `random` draws each block's ratio from those of a cycle, with equal chances.
        blocks: Number of blocks.
        window_size: w, blocks per cycle.
        phase: Where in the cycle the response starts, blocks; `random` knows no cycle.
        t_min: Ratio that a cycle's 0 stands for.
        t_max: Ratio that a cycle's 1, which it never reaches, would stand for.
        seed: What `random` draws depend on, and on nothing else.

    Raises:
        ConfigError: There is no such schedule, or the ratios are no shares in ascending order.
    """
    if name not in NAMES:
        raise ConfigError("Unknown schedule", seen=repr(name), expected="one of " + ", ".join(NAMES))
    if not 0 <= t_min <= t_max <= 1:
        raise ConfigError(
            "Noise ratios are out of order", seen=f"t_min {t_min}, t_max {t_max}", expected="0 <= t_min <= t_max <= 1"
        )
    if name == "random":
        generator = random.Random(seed)
        ratios = [generator.randrange(window_size) / window_size for _ in range(blocks)]
    else:
        cycle: Callable[[int, int, int], float] = progressive if name == "progressive" else reverse
        ratios = [cycle(block, window_size, phase) for block in range(blocks)]
    return [t_min + (t_max - t_min) * ratio for ratio in ratios]


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
