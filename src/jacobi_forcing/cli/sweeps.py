"""Watching a text being decoded: accepted text stands solid, the guesses behind it are dim."""

from __future__ import annotations

from types import TracebackType
from typing import Any, Self

from rich.live import Live
from rich.text import Text
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from jacobi_forcing.cli.console import stderr


class SweepView:
    """A streamer for `generate` that shows every sweep on standard error.

    In a terminal the text grows in place and vanishes at the end, so that the result can be printed as usual; elsewhere
    each sweep is a line.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer = tokenizer
        self.console = stderr()
        self.accepted: list[int] = []
        self.sweeps = 0
        self._added = 0
        self._prompt_seen = False
        self._live = (
            Live(console=self.console, auto_refresh=False, transient=True) if self.console.is_terminal else None
        )

    def put(self, ids: Tensor) -> None:
        """Accepted tokens; the library's first call brings the prompt, which is left out."""
        if not self._prompt_seen:
            self._prompt_seen = True
            return
        new = ids.flatten().tolist()
        self.accepted += new
        self.sweeps += 1
        self._added = len(new)

    def put_draft(self, ids: Tensor) -> None:
        """The guesses that the next sweep will check."""
        text = self._text(ids.flatten().tolist())
        if self._live is None:
            self.console.print(f"sweep {self.sweeps}: +{self._added} ", text, sep="", end="\n")
        else:
            self._live.update(text, refresh=True)

    def end(self) -> None:
        """Nothing follows."""

    def __enter__(self) -> Self:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()

    def _text(self, guesses: list[int]) -> Text:
        # Decoded together: a character may be split between the last accepted token and the first guess.
        solid = self._decode(self.accepted)
        whole = self._decode(self.accepted + guesses)
        draft = whole[len(solid) :] if whole.startswith(solid) else self._decode(guesses)
        if self._live is None:  # no styles there: brackets mark the guesses, and lines stay lines
            return Text((solid[-60:] + "⟨" + draft + "⟩").replace("\n", "⏎"))
        return Text.assemble(solid, (draft, "dim"))

    def _decode(self, ids: list[int]) -> str:
        text: Any = self.tokenizer.decode(ids, skip_special_tokens=True)
        return str(text)
