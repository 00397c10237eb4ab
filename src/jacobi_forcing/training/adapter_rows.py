"""Texts for a gated adapter to learn from, and where its draft lines start in them."""

from __future__ import annotations

import dataclasses
import logging
import random
from collections.abc import Iterable, Sequence
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.utils.data import Dataset

from jacobi_forcing.config import Misfits
from jacobi_forcing.errors import DataError

logger = logging.getLogger(__name__)


class Answered(Protocol):
    """A prompt and the base's greedy response; a `Trajectory` is one, its states are not looked at."""

    @property
    def prompt_ids(self) -> list[int]:
        """What the model was given, tokens."""

    @property
    def response_ids(self) -> list[int]:
        """Its greedy response, tokens, the end token included."""

    @property
    def finished(self) -> bool:
        """Whether the response ended with an end token."""


@dataclasses.dataclass(frozen=True)
class Response:
    """The plainest thing to learn from, see `Answered`."""

    prompt_ids: list[int]
    response_ids: list[int]
    finished: bool


class LineRows(Dataset[dict[str, Tensor]]):
    """Texts and, drawn anew for each epoch, the lines that start in them.

    What is drawn depends on (seed, epoch, index of the text) alone, so neither batches nor a restart change it.

    Args:
        responses: What the base wrote; each is cut to `max_length` tokens, prompt included.
        block_size: n, slots of a line.
        lines: K, lines of each text. They start at even distances, from the prompt's last token on.
        max_sweeps: S. Line states are 0 to S sweeps old, in equal shares.
        max_length: Longest text, tokens.
        seed: Of all that is drawn.
        misfits: What to do about a text with nothing to predict, or none that fits: "error" or "skip".
        stored: Lines are blocks in one of the states that the base swept them through, without the last, which is
            right: then `responses` are trajectories of n tokens a block, and S is 0. Slot 0 is the token before the
            block, so the block's last guess is left out.

    Raises:
        DataError: There is such a text, or nothing to learn from, or a trajectory without states of n tokens.
    """

    def __init__(
        self,
        responses: Iterable[Answered],
        *,
        block_size: int,
        lines: int,
        max_sweeps: int,
        max_length: int,
        seed: int = 0,
        misfits: Misfits = "error",
        stored: bool = False,
    ) -> None:
        self.block_size, self.lines, self.seed = block_size, lines, seed
        self.max_sweeps = 0 if stored else max_sweeps
        self._states: list[list[list[list[int]]]] | None = [] if stored else None
        self._texts: list[tuple[list[int], int, bool]] = []
        skipped = 0
        for index, response in enumerate(responses):
            text = [*response.prompt_ids, *response.response_ids][:max_length]
            prompt, whole = len(response.prompt_ids), len(response.prompt_ids) + len(response.response_ids)
            if prompt and len(text) > prompt:
                self._texts.append((text, prompt, response.finished and len(text) == whole))
                if self._states is not None:
                    self._states.append(_stored(response, index, block_size))
            elif misfits == "skip":
                skipped += 1
            else:
                raise DataError(
                    f"Response {index} has nothing to learn from",
                    seen=f"prompt {prompt}, response {whole - prompt} tokens, max_length {max_length}",
                    expected="a prompt, and room for a token of its response",
                    remedy="raise max_length, or leave such texts out with misfits='skip'",
                )
        if not self._texts:
            raise DataError(
                "There is nothing to train on", seen=f"{skipped} texts, all skipped", remedy="raise max_length"
            )
        if skipped:
            logger.warning("%d texts were skipped to fit %d tokens", skipped, max_length)
        # Shared memory: workers that outlive an epoch must see the next one as well.
        self._epoch = torch.zeros((), dtype=torch.long).share_memory_()

    @property
    def max_token(self) -> int:
        """The largest token id, which the model must have."""
        return max(max(text) for text, _, _ in self._texts)

    @property
    def max_positions(self) -> int:
        """Positions that the longest text takes, tokens."""
        return max(len(text) for text, _, _ in self._texts)

    def set_epoch(self, epoch: int) -> None:
        """Say which epoch begins; all that is drawn depends on it."""
        self._epoch.fill_(epoch)

    def empty_row(self) -> dict[str, Tensor]:
        """A row whose lines have all met the end, so that none of them counts."""
        nothing = torch.zeros(self.lines, dtype=torch.long)
        return {
            "input_ids": torch.zeros(1, dtype=torch.long),
            "last": torch.tensor(0),
            "taught": torch.tensor(0),
            "starts": nothing,
            "sweeps": nothing,
            "fill": torch.zeros(self.lines, self.max_sweeps + 1, self.block_size, dtype=torch.long),
        }

    def __len__(self) -> int:
        """Number of texts."""
        return len(self._texts)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """One text and its lines, those with most sweeps first.

        Returns:
            `input_ids` [T]; `last` and `taught`, see `Texts`; `starts` [K], positions; `sweeps` [K], 0 to S; `fill`
            [K, S + 1, n], the guesses of state 0 and those that come in with each sweep.
        """
        text, prompt, finished = self._texts[index]
        # Seeding with text hashes it; numbers near one another would give draws that are related.
        drawn = random.Random(f"{self.seed}/{int(self._epoch)}/{index}")
        generator = torch.Generator().manual_seed(drawn.getrandbits(63))
        last = len(text) - 1
        phase = drawn.random()
        even = (torch.arange(self.lines, dtype=torch.float64) + phase) / self.lines
        starts = prompt - 1 + (even * (len(text) - prompt)).long()
        ages = self.max_sweeps + 1
        sweeps = (torch.arange(self.lines) + drawn.randrange(ages)) % ages
        picks = torch.randint(prompt, (self.lines, ages, self.block_size), generator=generator)
        fill = torch.tensor(text)[picks]
        starts = starts[torch.randperm(self.lines, generator=generator)]
        if self._states is not None:
            starts = self._place(index, fill, drawn)
        return {
            "input_ids": torch.tensor(text),
            "last": torch.tensor(last),
            "taught": torch.tensor(last - finished),
            "starts": starts,
            "sweeps": sweeps.sort(descending=True).values,
            "fill": fill,
        }

    def _place(self, index: int, fill: Tensor, drawn: random.Random) -> Tensor:
        """Put stored states into the lines' first fill; returns where the lines start [K]."""
        assert self._states is not None
        text, prompt, _ = self._texts[index]
        n, starts = self.block_size, []
        within = [b for b in range(len(self._states[index])) if prompt - 1 + b * n < len(text) - 1]
        # Even over the blocks, as lines are that start anywhere.
        phase = drawn.random()
        for line in range(self.lines):
            block = within[int((line + phase) / self.lines * len(within))]
            guesses = drawn.choice(self._states[index][block])[: n - 1]
            fill[line, 0, 1 : 1 + len(guesses)] = torch.tensor(guesses, dtype=torch.long)
            starts.append(prompt - 1 + block * n)
        return torch.tensor(starts)


def _stored(response: Answered, index: int, block_size: int) -> list[list[list[int]]]:
    """The states of each block of a trajectory but the last, which is the text itself."""
    states: list[list[list[int]]] = getattr(response, "states", [])
    size = getattr(response, "block_size", None)
    if size != block_size or not any(len(block) > 1 for block in states):
        raise DataError(
            f"Response {index} has no states to train on",
            seen=f"block_size {size}, {max(map(len, states), default=0)} states a block at most",
            expected=f"a trajectory with the states of blocks of {block_size} tokens",
            remedy="collect with --states and this block size, or train with states: every",
        )
    return [block[:-1] or block for block in states]


class LineCollator:
    """Pads texts on the right to the longest of the batch; the id of a padding token is 0 and is nowhere read.

    Args:
        tokenizer: Saved with the adapter by the library's trainer; not used otherwise.
    """

    def __init__(self, tokenizer: object = None) -> None:
        self.tokenizer = tokenizer

    def __call__(self, rows: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
        """Stack the items of `LineRows`, and count the `lines` of those that hold a text []."""
        longest = max(len(row["input_ids"]) for row in rows)
        batch = {name: torch.stack([row[name] for row in rows]) for name in rows[0] if name != "input_ids"}
        ids = [pad(row["input_ids"], (0, longest - len(row["input_ids"]))) for row in rows]
        lines = sum(len(row["starts"]) for row in rows if row["last"] > 0)
        return {"input_ids": torch.stack(ids), "lines": torch.tensor(lines), **batch}
