"""Recording one prompt's sweeps, slot by slot (paper, Fig. 4).

A slot of a sweep is one token of the draft that it swept, or one that it added to the text::

    text so far | accepted accepted predicted | noisy noisy converged converged converged noisy …
                  these are known from now on   the rest of the draft, as it was swept

The draft of a sweep and the final text together tell what each guess was worth, so nothing is judged before the end.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from jacobi_forcing.backbone import Backbone
from jacobi_forcing.config import DecodeConfig
from jacobi_forcing.decode.engine import make_row, sweeps
from jacobi_forcing.decode.rows import Row
from jacobi_forcing.evaluate.quality import loops
from jacobi_forcing.formats import stamped
from jacobi_forcing.loading import Loaded
from jacobi_forcing.viz.tokens import shown

STATES: Mapping[str, str] = {
    "accepted": "a guess of the draft that this sweep accepted",
    "recycled": "a guess that this sweep accepted from a line out of the n-gram pool",
    "predicted": "the model's own next token behind the accepted guesses: every sweep gives one",
    "pseudo": "pseudo-accepted: the sweep agreed with it in a block whose turn has not come",
    "converged": "in a run of three or more that equal the final text already, though a guess before them is wrong",
    "waiting": "right, with nothing wrong before it, and not verified by this sweep",
    "noisy": "still wrong, or right in a run shorter than three",
    "beyond": "behind the end of the text",
}
"""What a slot can be, and what that means. The first three are the text from then on."""
RUN = 3
"""Tokens from which on a run of right guesses inside noise counts as converged (paper, Fig. 4)."""


@dataclasses.dataclass(frozen=True)
class Draft:
    """What a row was about to sweep: how long its text was, its draft, how much of that is verified, other lines."""

    known: int
    guesses: list[int]
    verified: int
    candidates: list[list[int]]

    @classmethod
    def of(cls, row: Row) -> Draft:
        """Out of a row, between two sweeps."""
        verified = row.hopeful if row.drafts_apart else len(row.guesses)
        return cls(row.known, list(row.guesses), verified, [list(line) for line in row.candidates])


def record(loaded: Loaded, ids: Sequence[int], decode: DecodeConfig, max_new_tokens: int) -> dict[str, Any]:
    """Decode one prompt greedily and keep every sweep.

    Args:
        loaded: Model, with its adapter if it has one, and tokenizer.
        ids: The prompt.
        decode: The decoder.
        max_new_tokens: Longest answer, tokens.

    Returns:
        A `trace` for JSON. `slots` are `[id, state]` from generated token `known` on, a state being an index into
        `states`; `texts` says how each id is shown.

    Raises:
        DataError, ModelError: See `make_row`.
    """
    backbone = Backbone(loaded.model)
    vocabulary = loaded.vocabulary if decode.draft_init == "vocabulary" else None
    row = make_row(backbone, ids, decode, backbone.eos_ids, max_new_tokens, vocabulary)
    drafts, waiting = [Draft.of(row)], []
    for _ in sweeps(backbone, [row]):
        waiting.append([] if row.finished else row.pseudo_accepted)
        drafts.append(Draft.of(row))
    kept: list[dict[str, Any]] = [
        {
            "known": draft.known,
            "accepted": counts.accepted,
            "line": counts.line,
            "proposed": counts.proposed,
            "computed": counts.slots,
            "slots": slots_of(draft, row.generated, counts.accepted, counts.line, pseudo),
            "candidates": draft.candidates,
        }
        for draft, counts, pseudo in zip(drafts[:-1], row.stats.sweeps, waiting, strict=True)
    ]
    used = {*ids, *row.generated}
    used |= {token for sweep in kept for token, _ in sweep["slots"]}
    used |= {token for sweep in kept for line in sweep["candidates"] for token in line}
    values = {
        "model": loaded.config.name,
        "adapter": loaded.config.adapter,
        "decode": decode.to_dict(),
        "max_new_tokens": max_new_tokens,
        "states": list(STATES),
        "prompt": list(ids),
        "generated": row.generated,
        "tokens": row.stats.tokens,
        "forwards": row.stats.forwards,
        "tokens_per_forward": round(row.stats.tokens_per_forward, 4),
        "finished": row.generated[-1] in backbone.eos_ids,
        "repeats": loops(row.generated, backbone.eos_ids),
        "text": loaded.tokenizer.decode(row.generated, skip_special_tokens=True),
        "sweeps": kept,
        "texts": {str(token): shown(loaded.tokenizer, token) for token in sorted(used)},
    }
    return stamped("trace", values)


def slots_of(
    draft: Draft, text: Sequence[int], accepted: int, line: int, pseudo: Sequence[tuple[int, int]] = ()
) -> list[tuple[int, int]]:
    """What became of every slot of one sweep.

    Args:
        draft: What was swept.
        text: The final generated tokens.
        accepted: Tokens that the sweep added.
        line: The line that won: 0 the draft, 1, 2, … candidates.
        pseudo: Spans of guesses that the sweep agreed with in blocks that wait: (first generated token, count).

    Returns:
        Token and index into `STATES`, from generated token `draft.known` on.
    """
    names = list(STATES)
    winner = draft.guesses[: draft.verified] if line == 0 else draft.candidates[line - 1]
    found: list[tuple[int, str]] = []
    for slot, token in enumerate(text[draft.known : draft.known + accepted]):
        # What differs from the winning line's guess, or stands behind its end, is the prediction.
        guessed = slot < len(winner) and winner[slot] == token
        found.append((token, ("recycled" if line else "accepted") if guessed else "predicted"))
    for slot in range(accepted, len(draft.guesses)):
        found.append((draft.guesses[slot], _left(draft, text, slot, pseudo)))
    return [(token, names.index(state)) for token, state in found]


def _left(draft: Draft, text: Sequence[int], slot: int, pseudo: Sequence[tuple[int, int]]) -> str:
    """The state of a guess that was not accepted."""
    place = draft.known + slot
    if place >= len(text):
        return "beyond"
    if any(start <= place < start + count for start, count in pseudo):
        return "pseudo"
    right = [guess == token for guess, token in zip(draft.guesses, text[draft.known :], strict=False)]
    if not right[slot]:
        return "noisy"
    if all(right[:slot]):
        return "waiting"
    before, behind = slot, slot
    while before and right[before - 1]:
        before -= 1
    while behind + 1 < len(right) and right[behind + 1]:
        behind += 1
    return "converged" if behind - before + 1 >= RUN else "noisy"
