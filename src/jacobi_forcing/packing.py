"""Trajectories packed into rows: which samples share a row, and which state of each block is used in which epoch."""

from __future__ import annotations

import dataclasses
import logging
import typing
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor
from torch.utils.data import Dataset

from jacobi_forcing.blocks import first_fit, noise_ratio, split
from jacobi_forcing.config import Misfits, SchedulePhase, States
from jacobi_forcing.errors import ConfigError, DataError
from jacobi_forcing.schedule import NoiseSchedule, nearest_state, noise_ratios
from jacobi_forcing.tags import PADDING, Tags, layout
from jacobi_forcing.trajectories.needed import check_states
from jacobi_forcing.trajectories.states import draw_state
from jacobi_forcing.trajectories.store import Trajectory, TrajectoryReader

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class _Sample:
    number: int
    prompt: Tensor
    response: Tensor
    states: list[Tensor]
    ratios: list[list[float]]
    blocks: int
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
        states: "stored": noisy blocks are states of the trajectories. "on_policy": they are random drafts, drawn anew
            in every epoch, which the model that trains is to sweep (`training.on_policy`); of the trajectories the
            responses are used alone.
        vocabulary: Ids that those drafts are drawn from; None: the prompt, and the response before the block.

    Raises:
        ArtefactError: The trajectories have no states, or only those that another schedule asks for.
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
        states: States = "stored",
        vocabulary: Sequence[int] | None = None,
    ) -> None:
        if max_length < 1:
            raise ConfigError("'max_length' is too small", seen=max_length, expected="at least 1")
        for name, value, known in (("misfits", misfits, Misfits), ("states", states, States)):
            if value not in typing.get_args(known):
                expected = " or ".join(typing.get_args(known))
                raise ConfigError(f"'{name}' has a wrong value", seen=repr(value), expected=expected)
        self.noise = NoiseSchedule(schedule, window_size, t_min, t_max, schedule_phase)
        self.max_length, self.seed, self.states, self.vocabulary = max_length, seed, states, vocabulary
        self.block_size = 0
        self.counts = PackingCounts()
        if states == "stored" and isinstance(trajectories, TrajectoryReader):
            check_states(trajectories, self.noise)
        self._samples = self._read(trajectories, misfits)
        self._rows = first_fit([sample.length for sample in self._samples], max_length)
        self._count()
        # Shared memory: workers that outlive an epoch must see the next one as well.
        self._epoch = torch.zeros((), dtype=torch.long).share_memory_()

    @property
    def max_token(self) -> int:
        """The largest token id, which the model must have."""
        parts = (part for sample in self._samples for part in (sample.prompt, sample.response, *sample.states))
        return max([int(part.max()) for part in parts if part.numel()] + list(self.vocabulary or []))

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
            "wanted": torch.zeros(0, dtype=torch.float64),
            "noise_ratios": torch.zeros(0),
        }

    def set_epoch(self, epoch: int) -> None:
        """Say which epoch begins; a random phase depends on it."""
        self._epoch.fill_(epoch)

    def __len__(self) -> int:
        """Number of rows."""
        return len(self._rows)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """One row.

        Returns:
            `input_ids` [L]; `tags` [7, L] for `Tags.of`; `wanted`, the noise ratio asked of each block, and
            `noise_ratios`, that of the state used [blocks]. With states on policy the noisy blocks are y(0), and the
            ratios are theirs.
        """
        ids: list[Tensor] = []
        tables: list[Tensor] = []
        asked: list[float] = []
        ratios: list[float] = []
        epoch = int(self._epoch)
        for place, member in enumerate(self._rows[index]):
            sample = self._samples[member]
            wanted = self.noise.targets(sample.blocks, self.seed, epoch, sample.number)
            noisy, of_sample = self._noisy(sample, wanted)
            table, source = layout(len(sample.prompt), len(sample.response), self.block_size, sample.ends)
            ids.append(torch.cat([sample.prompt, *noisy, sample.response])[source])
            tags = Tags.of(table)
            phase = self.noise.phase(self.seed, epoch, sample.number)
            window = torch.where(tags.block >= 0, (tags.block + phase) // self.noise.window_size, -1)
            tables.append(tags._replace(sample=tags.sample + place, window=window).table())
            asked += wanted
            ratios += of_sample
        return {
            "input_ids": torch.cat(ids).long(),
            "tags": torch.cat(tables, dim=-1),
            "wanted": torch.tensor(asked, dtype=torch.float64),
            "noise_ratios": torch.tensor(ratios),
        }

    def _noisy(self, sample: _Sample, wanted: Sequence[float]) -> tuple[list[Tensor], list[float]]:
        """The noisy blocks of a sample and their noise ratios."""
        if self.states == "stored":
            picks = [nearest_state(of_block, ratio) for of_block, ratio in zip(sample.ratios, wanted, strict=True)]
            noisy = [states[pick] for states, pick in zip(sample.states, picks, strict=True)]
            return noisy, [of_block[pick] for of_block, pick in zip(sample.ratios, picks, strict=True)]
        prompt, response = sample.prompt.tolist(), sample.response.tolist()
        seed = f"{self.seed}/{int(self._epoch)}"
        drafts = []
        for block, fixed_point in enumerate(split(response, self.block_size)):
            pool = self.vocabulary or [*prompt, *response[: block * self.block_size]]
            drafts.append(draw_state(fixed_point, pool, seed=seed, sample=sample.number, block=block))
        ratios = [noise_ratio(*pair) for pair in zip(drafts, split(response, self.block_size), strict=True)]
        return [torch.tensor(draft, dtype=torch.int32) for draft in drafts], ratios

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
        # On policy the states are not needed, and there may be many.
        kept = blocks if self.states == "stored" else []
        return _Sample(
            number=trajectory.sample,
            prompt=torch.tensor(trajectory.prompt_ids, dtype=torch.int32),
            response=torch.tensor(response, dtype=torch.int32),
            states=[torch.tensor(states, dtype=torch.int32) for states in kept],
            ratios=[noise_ratios(states) for states in kept],
            blocks=len(blocks),
            ends=trajectory.finished and len(response) == len(trajectory.response_ids),
        )

    def _count(self) -> None:
        counts = self.counts
        counts.samples, counts.rows = len(self._samples), len(self._rows)
        counts.blocks = sum(sample.blocks for sample in self._samples)
        counts.tokens = sum(sample.length for sample in self._samples)
        if counts.cut or counts.skipped:
            logger.warning(
                "%d samples were cut at a block boundary and %d skipped to fit rows of %d tokens",
                counts.cut,
                counts.skipped,
                self.max_length,
            )
