"""How noisy each block of a response is to be (paper, Eq. 7), and which state comes nearest. Pure functions."""

from __future__ import annotations

import dataclasses
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


@dataclasses.dataclass(frozen=True)
class NoiseSchedule:
    """All that decides which noise ratio is asked of which block.

    Attributes:
        schedule: One of `NAMES`.
        window_size: w of Eq. 7, blocks per cycle.
        t_min: Noise ratio at the clean end.
        t_max: Noise ratio that the noisy end comes up to.
        schedule_phase: "fixed": every response starts at the cycle's begin, as in the paper; "random": anywhere, drawn
            for each sample and epoch.

    Raises:
        ConfigError: One is out of range.
    """

    schedule: str = "progressive"
    window_size: int = 16
    t_min: float = 0.0
    t_max: float = 1.0
    schedule_phase: str = "fixed"

    def __post_init__(self) -> None:
        """Refuse wrong settings before anything is asked."""
        if self.window_size < 1:
            raise ConfigError("A window is too small", seen=self.window_size, expected="at least 1 block")
        if self.schedule_phase not in ("fixed", "random"):
            raise ConfigError("A phase is unknown", seen=repr(self.schedule_phase), expected="fixed or random")
        targets(self.schedule, 0, self.window_size, t_min=self.t_min, t_max=self.t_max)

    def phase(self, seed: int, epoch: int, sample: int) -> int:
        """Where in the cycle a response starts, blocks."""
        return 0 if self.schedule_phase == "fixed" else draw_phase(seed, epoch, sample, self.window_size)

    def targets(self, blocks: int, seed: int, epoch: int, sample: int) -> list[float]:
        """The noise ratio asked of each block of one response in one epoch; see the function of that name."""
        phase = self.phase(seed, epoch, sample)
        return self._targets(blocks, phase, f"{seed}/{epoch}/{sample}/ratios")

    def possible(self, block: int) -> tuple[float, ...]:
        """Every noise ratio that may be asked of block i, in whatever epoch: one, unless something is drawn."""
        if self.schedule != "random" and self.schedule_phase == "fixed":
            return tuple(self._targets(block + 1, 0, "")[block:])
        every = dataclasses.replace(self, schedule="progressive")
        return tuple(every._targets(self.window_size, 0, ""))

    def _targets(self, blocks: int, phase: int, seed: str) -> list[float]:
        ends = {"t_min": self.t_min, "t_max": self.t_max}
        return targets(self.schedule, blocks, self.window_size, phase=phase, seed=seed, **ends)


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


def is_settled(right: int, size: int, target: float) -> bool:
    """Whether the state nearest the target is known, the later ones left unseen.

    Each sweep makes one more slot right, at least, so noise ratios fall by 1/n or more. Then a state is out of reach of
    all that follow as soon as the best that can follow, 1/n below it, is no nearer. The fixed point is known from
    the start: where it is nearer than the least noise there is, no sweep is needed.

    Args:
        right: Leading right slots of the newest state; the states before it have been seen.
        size: n, slots of the block.
        target: The ratio asked for.
    """

    def distance(slots: int) -> float:
        return round(abs((size - slots) / size - target), 9)

    return right == size or distance(right) <= distance(right + 1) or distance(size) < distance(size - 1)
