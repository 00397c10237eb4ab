"""Trajectories packed into rows: which samples share a row, and which state of each block is used in which epoch."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor
from torch.utils.data import Dataset

from jacobi_forcing.config import Misfits, SchedulePhase
from jacobi_forcing.errors import ConfigError, DataError
from jacobi_forcing.schedule import draw_phase, nearest_state, noise_ratios, targets
from jacobi_forcing.tags import PADDING, Tags, layout
from jacobi_forcing.trajectories.store import Trajectory

logger = logging.getLogger(__name__)


def first_fit(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Put items into rows, each into the first row with room, in the order given.

    Args:
        lengths: Length of each item, none above `capacity`.
        capacity: Room in a row.

    Returns:
        The items of each row, by index.
    """
    rows: list[list[int]] = []
    room: list[int] = []
    # Rows too full for the shortest item are left out, or the search would grow with the square of the data.
    candidates: list[int] = []
    shortest = min(lengths, default=0)
    for item, length in enumerate(lengths):
        row = next((index for index in candidates if room[index] >= length), None)
        if row is None:
            row = len(rows)
            rows.append([])
            room.append(capacity)
            candidates.append(row)
        rows[row].append(item)
        room[row] -= length
        if room[row] < shortest:
            candidates.remove(row)
    return rows


@dataclasses.dataclass(frozen=True)
class _Sample:
    number: int
    prompt: Tensor
    response: Tensor
    states: list[Tensor]
    ratios: list[list[float]]
    ends: bool

    @property
    def length(self) -> int:
        return len(self.prompt) + 2 * len(self.response)


@dataclasses.dataclass
class PackingCounts:
    """What became of the trajectories. `cut`: samples that lost blocks; `skipped`: samples left out."""

    samples: int = 0
    rows: int = 0
    blocks: int = 0
    tokens: int = 0
    cut: int = 0
    skipped: int = 0


class PackedRows(Dataset[dict[str, Tensor]]):
    """Trajectories packed into rows of at most `max_length` tokens.

    Which samples share a row is settled once; which state of a block is used is settled when a row is asked for, from
    (seed, epoch, sample) alone. So a resumed run sees what an undisturbed one would have seen.

    A sample longer than a row is cut at a block boundary. One that cannot hold its prompt and one block is an error,
    or is skipped; both are counted in `counts`.

    Args:
        trajectories: All of one block size.
        max_length: Longest row, tokens, noisy and clean ones counted.
        window_size: w of Eq. 7, blocks.
        schedule: Name of the noise schedule, see `schedule.targets`.
        t_min: Noise ratio at the clean end of the schedule.
        t_max: Noise ratio that its noisy end comes up to.
        schedule_phase: "fixed" starts every response at the schedule's begin, as the paper does; "random" draws where
            it starts for every sample and epoch.
        seed: For the random phase and the random schedule.
        misfits: What to do about a sample that does not fit: "error" or "skip".

    Raises:
        ConfigError: An option is out of range.
        DataError: A sample does not fit, block sizes differ, or there is nothing to learn from.
    """

    def __init__(
        self,
        trajectories: Iterable[Trajectory],
        *,
        max_length: int,
        window_size: int,
        schedule: str = "progressive",
        t_min: float = 0.0,
        t_max: float = 1.0,
        schedule_phase: SchedulePhase = "fixed",
        seed: int = 0,
        misfits: Misfits = "error",
    ) -> None:
        if window_size < 1 or max_length < 1:
            seen = f"window_size {window_size}, max_length {max_length}"
            raise ConfigError("A size is too small", seen=seen, expected="at least 1")
        if schedule_phase not in ("fixed", "random") or misfits not in ("error", "skip"):
            seen = f"schedule_phase {schedule_phase!r}, misfits {misfits!r}"
            raise ConfigError("An option is unknown", seen=seen, expected="fixed or random, error or skip")
        self.max_length, self.window_size, self.seed = max_length, window_size, seed
        self.schedule_phase: SchedulePhase = schedule_phase
        self.schedule, self.t_min, self.t_max = schedule, t_min, t_max
        targets(schedule, 0, window_size, t_min=t_min, t_max=t_max)  # a wrong one is better known at once
        self.block_size = 0
        self.counts = PackingCounts()
        self._samples = self._read(trajectories, misfits)
        self._rows = first_fit([sample.length for sample in self._samples], max_length)
        self._count()
        # Shared memory: workers that outlive an epoch must see the next one as well.
        self._epoch = torch.zeros((), dtype=torch.long).share_memory_()

    @property
    def max_token(self) -> int:
        """The largest token id, which the model must have."""
        parts = (part for sample in self._samples for part in (sample.prompt, *sample.states))
        return max(int(part.max()) for part in parts if part.numel())

    @property
    def max_positions(self) -> int:
        """Positions that the longest sample takes, tokens."""
        return max(len(sample.prompt) + len(sample.response) for sample in self._samples)

    @property
    def lengths(self) -> list[int]:
        """Length of each row, tokens, the same in every epoch."""
        return [sum(self._samples[index].length for index in row) for row in self._rows]

    def empty_row(self) -> dict[str, Tensor]:
        """A row with nothing in it: one token of padding."""
        return {
            "input_ids": torch.zeros(1, dtype=torch.long),
            "tags": torch.tensor(PADDING)[:, None],
            "noise_ratios": torch.zeros(0),
        }

    def set_epoch(self, epoch: int) -> None:
        """Say which epoch begins; a random phase depends on it."""
        self._epoch.fill_(epoch)

    def __len__(self) -> int:
        """Number of rows."""
        return len(self._rows)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """One row: `input_ids` [L], `tags` [7, L] for `Tags.of`, and `noise_ratios` of the states used [blocks]."""
        ids: list[Tensor] = []
        tables: list[Tensor] = []
        ratios: list[float] = []
        for place, member in enumerate(self._rows[index]):
            sample = self._samples[member]
            phase = self._phase(sample.number)
            wanted = self._targets(sample, phase)
            picks = [nearest_state(of_block, ratio) for of_block, ratio in zip(sample.ratios, wanted, strict=True)]
            noisy = [states[pick] for states, pick in zip(sample.states, picks, strict=True)]
            table, source = layout(len(sample.prompt), len(sample.response), self.block_size, sample.ends)
            ids.append(torch.cat([sample.prompt, *noisy, sample.response])[source])
            tags = Tags.of(table)
            window = torch.where(tags.block >= 0, (tags.block + phase) // self.window_size, -1)
            tables.append(tags._replace(sample=tags.sample + place, window=window).table())
            ratios.extend(of_block[pick] for of_block, pick in zip(sample.ratios, picks, strict=True))
        return {
            "input_ids": torch.cat(ids).long(),
            "tags": torch.cat(tables, dim=-1),
            "noise_ratios": torch.tensor(ratios),
        }

    def _targets(self, sample: _Sample, phase: int) -> list[float]:
        return targets(
            self.schedule,
            len(sample.ratios),
            self.window_size,
            phase=phase,
            t_min=self.t_min,
            t_max=self.t_max,
            seed=f"{self.seed}/{int(self._epoch)}/{sample.number}/ratios",
        )

    def _phase(self, sample: int) -> int:
        if self.schedule_phase == "fixed":
            return 0
        return draw_phase(self.seed, int(self._epoch), sample, self.window_size)

    def _read(self, trajectories: Iterable[Trajectory], misfits: Misfits) -> list[_Sample]:
        samples = []
        for trajectory in trajectories:
            self._check_block_size(trajectory)
            problem = self._misfit(trajectory)
            if problem is None:
                samples.append(self._fit(trajectory))
            elif misfits == "error":
                raise problem
            else:
                self.counts.skipped += 1
        if not samples:
            raise DataError(
                "There is nothing to train on",
                seen=f"0 usable trajectories, {self.counts.skipped} skipped",
                expected="at least one that fits in a row",
                remedy="raise max_length or collect trajectories first",
            )
        return samples

    def _check_block_size(self, trajectory: Trajectory) -> None:
        self.block_size = self.block_size or trajectory.block_size
        if trajectory.block_size != self.block_size:
            raise DataError(
                f"Sample {trajectory.sample} has another block size than those before it",
                seen=trajectory.block_size,
                expected=self.block_size,
                remedy="train on trajectories of one collection",
            )

    def _misfit(self, trajectory: Trajectory) -> DataError | None:
        remedy = "or leave such samples out with misfits='skip'"
        prompt, response = len(trajectory.prompt_ids), len(trajectory.response_ids)
        if not response:
            seen = "an empty response"
            return DataError(f"Sample {trajectory.sample} has nothing to learn from", seen=seen, remedy=remedy)
        needed = prompt + 2 * min(response, self.block_size)
        if needed > self.max_length:
            return DataError(
                f"Sample {trajectory.sample} does not fit in a row, so nothing could be learnt from it",
                seen=f"{needed} tokens (prompt {prompt}, and one block twice)",
                expected=f"at most max_length = {self.max_length}",
                remedy=f"raise max_length, {remedy}",
            )
        return None

    def _fit(self, trajectory: Trajectory) -> _Sample:
        blocks = trajectory.states
        room = (self.max_length - len(trajectory.prompt_ids)) // 2
        response = trajectory.response_ids
        if len(response) > room:
            blocks = blocks[: room // self.block_size]
            response = response[: len(blocks) * self.block_size]
            self.counts.cut += 1
        return _Sample(
            number=trajectory.sample,
            prompt=torch.tensor(trajectory.prompt_ids, dtype=torch.int32),
            response=torch.tensor(response, dtype=torch.int32),
            states=[torch.tensor(states, dtype=torch.int32) for states in blocks],
            ratios=[noise_ratios(states) for states in blocks],
            ends=trajectory.finished and len(response) == len(trajectory.response_ids),
        )

    def _count(self) -> None:
        counts = self.counts
        counts.samples, counts.rows = len(self._samples), len(self._rows)
        counts.blocks = sum(len(sample.states) for sample in self._samples)
        counts.tokens = sum(sample.length for sample in self._samples)
        if counts.cut or counts.skipped:
            logger.warning(
                "%d samples were cut at a block boundary and %d skipped to fit rows of %d tokens",
                counts.cut,
                counts.skipped,
                self.max_length,
            )
