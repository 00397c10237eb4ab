"""How a single token is shown: nothing invisible, nothing that moves the text around it."""

from __future__ import annotations

import unicodedata
from typing import Any

from transformers import PreTrainedTokenizerBase

_SIGNS = {"\n": "⏎", "\r": "␍", "\t": "⇥", "\x7f": "␡", "\u00a0": "⍽"}


def shown(tokenizer: PreTrainedTokenizerBase, token: int) -> str:
    """The text of one token with its spaces, and signs for what cannot be seen: ⏎ ends a line, ⇥ is a tab.

    Control and format characters (those that turn the direction of writing among them) become pictures or code points.
    Special tokens keep their names; a token that is a part of a character is named in ⟨⟩.
    """
    name: Any = tokenizer.convert_ids_to_tokens(token)
    if name is None:
        return f"⟨{token}⟩"
    if token in tokenizer.all_special_ids:
        return visible(str(name))
    text = str(tokenizer.decode([token], skip_special_tokens=False, clean_up_tokenization_spaces=False))
    if not text or "\ufffd" in text:
        return f"⟨{visible(str(name))}⟩"
    if str(name).startswith("▁") and not text.startswith(" "):  # SentencePiece drops the space of a first word
        text = " " + text
    return visible(text)


def visible(text: str) -> str:
    """A text with signs in the place of what cannot be seen, spaces apart."""
    return "".join(_sign(character) for character in text)


def _sign(character: str) -> str:
    if character in _SIGNS:
        return _SIGNS[character]
    if ord(character) < 0x20:
        return chr(0x2400 + ord(character))
    if unicodedata.category(character) in ("Cc", "Cf", "Zl", "Zp", "Co", "Cn", "Cs"):
        return f"⟨U+{ord(character):04X}⟩"
    return character
