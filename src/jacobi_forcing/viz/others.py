"""Parts of a report about results of other kinds than the bench's: what each says of itself."""

from __future__ import annotations

from jacobi_forcing.viz.gather import Found
from jacobi_forcing.viz.parts import Section

_MISSING = {
    "eval": "Tasks were not graded: `jforce eval --output`.",
    "profile": "This device was not profiled: `jforce profile --output`.",
    "tune": "Settings were not searched for: `jforce tune --output`.",
}


def other_sections(found: Found) -> tuple[list[Section], list[str]]:
    """Parts about what there is, and what is missing."""
    return [], [said for kind, said in _MISSING.items() if not found.of(kind)]
