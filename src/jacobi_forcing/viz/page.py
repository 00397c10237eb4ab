"""Filling a page's template."""

from __future__ import annotations

import re

_PLACE = re.compile(r"@@([a-z_]+)@@")


def fill(template: str, **parts: str) -> str:
    """A template with every `@@name@@` replaced, once: what looks like a place inside a part stays as it is.

    Raises:
        KeyError: A place has no part, or a part has no place.
    """
    idle = parts.keys() - set(_PLACE.findall(template))
    if idle:
        raise KeyError(f"the template has no place for {', '.join(sorted(idle))}")
    return _PLACE.sub(lambda match: parts[match[1]], template)
