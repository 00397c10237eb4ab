"""Lossless sampling with fixed noise, and logits processors that see every slot's own prefix.

To draw from softmax(s) is to take the argmax of s + G, where G is standard Gumbel noise, new for every token (the
Gumbel-max trick: Gumbel 1954; Maddison, Tarlow and Minka 2014, "A* Sampling"). Here the noise of a token is a function
of the seed, the sample's index and the token's position, and of nothing else. A sampled text is then as determined as a
greedy one: its next token is a function of its prefix. So every decoder can check guesses by comparing tokens, nothing
is rejected at random, and all decoders give the same text, which follows exactly the distribution that the library
samples from.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList
from transformers.generation import logits_process as library

from jacobi_forcing.decode.engine import Choose, Chosen, greedy
from jacobi_forcing.decode.rows import Row
from jacobi_forcing.errors import ConfigError
from jacobi_forcing.sweep import Line


def _classes(names: str) -> frozenset[type]:
    return frozenset(getattr(library, name) for name in names.split())


IGNORE_PREFIX = _classes(
    "TemperatureLogitsWarper TopKLogitsWarper TopPLogitsWarper TopHLogitsWarper MinPLogitsWarper TypicalLogitsWarper "
    "EpsilonLogitsWarper EtaLogitsWarper SuppressTokensLogitsProcessor InfNanRemoveLogitsProcessor LogitNormalization"
)
"""Processors that read the scores alone: one call serves all slots."""
READ_LENGTH = _classes(
    "MinLengthLogitsProcessor MinNewTokensLengthLogitsProcessor ForcedBOSTokenLogitsProcessor "
    "ForcedEOSTokenLogitsProcessor SuppressTokensAtBeginLogitsProcessor ExponentialDecayLengthPenalty"
)
"""Processors that read how long the text is, left padding of the caller's batch included: one call for each length."""
READ_CONTENT = _classes(
    "RepetitionPenaltyLogitsProcessor NoRepeatNGramLogitsProcessor SequenceBiasLogitsProcessor "
    "NoBadWordsLogitsProcessor PrefixConstrainedLogitsProcessor"
)
"""Processors that read the text: one call for each slot, with its prefix and without padding."""


def make_choose(processors: LogitsProcessorList | None, *, do_sample: bool, seed: int | None) -> Choose:
    """How the next token at every slot comes out of the logits: greedy or sampled, processors applied.

    Scores are float32 whatever the logits are, as in the library's own loops. Where processors have banned every token
    of the vocabulary, the token is 0.

    A processor of one's own is accepted if its class has the attribute `prefix_only = True`. That promises that what it
    returns depends on nothing but its two arguments, ids [1, length] and scores [1, V]: it is called for guessed texts
    too, in any order. What it raises for a guessed text is raised only when the guesses turn out right.

    Args:
        processors: The library's list, warpers (temperature, top-k, …) included; applied in its order.
        do_sample: Add the noise. Without it, the most probable token is taken.
        seed: Non-negative seed of the noise; with None, one is drawn from torch's global generator. The same seed gives
            the same text with every decoder, batch and device; `Row.sample` tells samples of a prompt apart.

    Returns:
        A function for `engine.run`, for the rows of one batch after the other; slots whose prediction no row reads
        (padding, the prompt but its last token, finished rows) are told 0 and never looked at.

    Raises:
        ConfigError: A processor that cannot be applied to guessed texts, or a negative seed.
    """
    _refuse(processors or [])
    if not do_sample:
        return _Chooser(processors, None) if processors else greedy
    if seed is None:
        seed = int(torch.randint(2**63 - 1, ()))
    return _Chooser(processors or [], GumbelNoise(seed))


def _refuse(processors: Sequence[LogitsProcessor]) -> None:
    known = IGNORE_PREFIX | READ_LENGTH | READ_CONTENT
    strange = [
        type(processor).__name__
        for processor in processors
        # By exact type: what a subclass adds is not known.
        if type(processor) not in known and getattr(type(processor), "prefix_only", False) is not True
    ]
    if strange:
        raise ConfigError(
            "A logits processor may depend on more than the text it is called with, so guesses cannot be checked",
            seen=", ".join(strange),
            expected="processors of the library that read scores, text or length, or a class with prefix_only = True",
            remedy="give your own class prefix_only = True if its result depends on its ids and scores alone, or use "
            "the library's own generate",
        )


class GumbelNoise:
    """Standard Gumbel noise for every token of the vocabulary, a function of (seed, sample, position).

    Philox is counter-based: the seed makes its key, sample and position are the upper words of its counter, and the
    draws count up the lower ones. So no two (sample, position) share a number, and each is reached without drawing what
    stands before it. Salmon et al. 2011, "Parallel Random Numbers: As Easy as 1, 2, 3".

    Args:
        seed: Non-negative, of any size.

    Raises:
        ConfigError: The seed is negative.
    """

    def __init__(self, seed: int) -> None:
        if seed < 0:
            raise ConfigError("The seed of sampling is negative", seen=seed, expected="0 or more")
        self._key = np.random.SeedSequence(seed).generate_state(2, np.uint64)
        self._kept: dict[tuple[int, int], Tensor] = {}

    def draw(self, sample: int, position: int, size: int) -> Tensor:
        """The noise of one position [size], float32 on the CPU."""
        counter = np.array([0, 0, position, sample], dtype=np.uint64)
        generator = np.random.Generator(np.random.Philox(counter=counter, key=self._key))
        return torch.from_numpy(gumbel(generator.standard_exponential(size)))

    def at(self, places: Sequence[tuple[int, int]], size: int, device: torch.device) -> Tensor:
        """The noise of many (sample, position) [len(places), size], float32 on the device.

        Kept from one call to the next, for slots that are swept again; what a call does not ask for is dropped, so that
        memory stays that of one sweep.
        """
        wanted = list(dict.fromkeys(places))
        missing = [place for place in wanted if place not in self._kept]
        if missing:
            # One copy to the device. Made on the CPU, the numbers are the same whatever the device.
            drawn = torch.stack([self.draw(sample, position, size) for sample, position in missing]).to(device)
            self._kept |= zip(missing, drawn, strict=True)
        self._kept = {place: self._kept[place] for place in wanted}
        return torch.stack([self._kept[place] for place in places])


def gumbel(exponential: NDArray[np.float64]) -> NDArray[np.float32]:
    """Standard Gumbel noise out of standard exponential noise, always finite."""
    # An exact 0 has a probability of about 2^-53 a draw; its logarithm would beat every token that is not banned.
    return -np.log(np.maximum(exponential, sys.float_info.min)).astype(np.float32)


@dataclass(frozen=True, slots=True)
class _Slot:
    """A slot whose prediction is used."""

    row: Row
    line: Line
    index: int  # in its line
    seat: int  # which row of the logits
    column: int  # which of their columns

    @property
    def length(self) -> int:
        """Tokens in its prefix, which is the position it predicts."""
        return self.line.start + self.index + 1

    @property
    def guesses(self) -> Sequence[int]:
        """The tokens of its prefix that are not known to be right."""
        known = max(len(self.row.text) - self.line.start, 0)
        return [*self.line.lead, *self.line.ids[known : self.index + 1]]

    def reached(self, told: Sequence[int]) -> bool:
        """Whether the text will go through here, given the predictions of its row: the guesses are right and go on."""
        if self.line.gated:
            return False
        guesses = list(self.guesses)
        if guesses != list(told[self.column - len(guesses) : self.column]):
            return False
        stop, lengths = self.row.stop, range(1, len(guesses) + 1)
        ended = any(token in self.row.eos_ids for token in guesses)
        return not ended and (stop is None or not any(stop(self.row.text + guesses[:length]) for length in lengths))


def _slots(rows: Sequence[Row], lines: Sequence[Sequence[Line]], first: int) -> Iterator[_Slot]:
    """Row by row and line by line, those from the last known token on."""
    for seat, (row, own) in enumerate(zip(rows, lines, strict=True)):
        begin = -first
        for line in own:
            for index in range(max(len(row.text) - line.start - 1, 0), len(line.ids)):
                yield _Slot(row, line, index, seat, begin + index)
            begin += len(line.ids)


class _Chooser:
    """See `make_choose`."""

    def __init__(self, processors: Sequence[LogitsProcessor], noise: GumbelNoise | None) -> None:
        self._processors = list(processors)
        self._noise = noise
        self._own: WeakKeyDictionary[Row, list[LogitsProcessor]] = WeakKeyDictionary()

    def __call__(self, logits: Tensor, rows: Sequence[Row], lines: Sequence[Sequence[Line]], first: int) -> Chosen:
        """The next token at every slot, of logits [R, k, V]."""
        device = logits.device
        slots = list(_slots(rows, lines, first))
        for place, row in enumerate(rows):
            # The first sweep of a batch has all its rows, in the caller's order; later some have left.
            if row not in self._own:
                self._own[row] = self._fitted(row, place, len(rows))
        seats, columns = torch.tensor([[slot.seat for slot in slots], [slot.column for slot in slots]], device=device)
        errors: dict[int, Exception] = {}
        scores = self._processed(logits[seats, columns].float(), slots, errors)
        if self._noise is not None:
            places = [(slot.row.sample, slot.length) for slot in slots]
            scores = scores + self._noise.at(places, scores.shape[-1], device)
        found = Chosen.of(scores, lines)
        ids = torch.zeros(logits.shape[:2], dtype=torch.long, device=device)
        ids[seats, columns] = found.ids
        for number, error in errors.items():
            if slots[number].reached(ids[slots[number].seat].tolist()):
                raise error
        if found.sure is None:
            return Chosen(ids)
        sure = torch.zeros(ids.shape, dtype=found.sure.dtype, device=device)
        sure[seats, columns] = found.sure
        return Chosen(ids, sure)

    def _processed(self, scores: Tensor, slots: Sequence[_Slot], errors: dict[int, Exception]) -> Tensor:
        """Scores of the slots [n, V] as the processors leave them; `errors` gets what was raised for guessed texts."""
        prefixes: list[Tensor] = []
        for number, processor in enumerate(self._processors):
            if type(processor) in IGNORE_PREFIX:
                scores = processor(torch.empty(len(slots), 0, dtype=torch.long, device=scores.device), scores)
            elif type(processor) in READ_LENGTH:
                for length, members in _by_length(slots, scores.device):
                    blank = members.new_zeros(1).expand(len(members), length)
                    scores[members] = processor(blank, scores[members])
            else:
                prefixes = prefixes or _prefixes(slots, scores.device)
                for place, (slot, prefix) in enumerate(zip(slots, prefixes, strict=True)):
                    one = slice(place, place + 1)
                    try:
                        scores[one] = self._own[slot.row][number](prefix, scores[one])
                    except Exception as error:
                        # A wrong guess may break what the processor takes for granted, such as a grammar.
                        if not slot.guesses:
                            raise
                        errors.setdefault(place, error)
        return scores

    def _fitted(self, row: Row, place: int, count: int) -> list[LogitsProcessor]:
        """The processors as they are for one row without padding: those that tell a batch's rows apart are replaced."""
        fitted: list[LogitsProcessor] = []
        for processor in self._processors:
            if type(processor) is library.PrefixConstrainedLogitsProcessor:
                processor = _constrained(processor, place)
            elif type(processor) is library.RepetitionPenaltyLogitsProcessor:
                processor = _penalising(processor, row, place, count)
            fitted.append(processor)
        return fitted


def _constrained(processor: library.PrefixConstrainedLogitsProcessor, place: int) -> LogitsProcessor:
    """The constraint of one row: its function is asked about the prompt that the row came from."""
    allowed, prompt = processor._prefix_allowed_tokens_fn, place // processor._num_beams
    return library.PrefixConstrainedLogitsProcessor(lambda _, ids: allowed(prompt, ids), 1)


def _penalising(
    processor: library.RepetitionPenaltyLogitsProcessor, row: Row, place: int, count: int
) -> LogitsProcessor:
    """The penalty of one row: what it skips of the row, given for the padded batch, less the padding."""
    skipped = processor.prompt_ignore_length
    if not isinstance(skipped, Tensor):
        return processor
    if len(skipped) != count:
        raise ConfigError(
            "prompt_ignore_length of the repetition penalty is for another batch",
            seen=f"{len(skipped)} rows",
            expected=f"{count} rows",
        )
    return library.RepetitionPenaltyLogitsProcessor(processor.penalty, max(int(skipped[place]) - row.padding, 0))


def _by_length(slots: Sequence[_Slot], device: torch.device) -> Iterator[tuple[int, Tensor]]:
    """Each length of a prefix in the caller's padded batch, tokens, and the numbers of its slots."""
    groups: dict[int, list[int]] = {}
    for number, slot in enumerate(slots):
        groups.setdefault(slot.row.padding + slot.length, []).append(number)
    for length, members in groups.items():
        yield length, torch.tensor(members, device=device)


def _prefixes(slots: Sequence[_Slot], device: torch.device) -> list[Tensor]:
    """The prefix of every slot [1, length], views of one tensor for each line."""
    texts: dict[int, Tensor] = {}
    for slot in slots:
        if id(slot.line) not in texts:
            text = [*slot.row.text[: slot.line.start], *slot.line.ids]
            texts[id(slot.line)] = torch.tensor([text], device=device)
    return [texts[id(slot.line)][:, : slot.length] for slot in slots]
