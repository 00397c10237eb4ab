"""jacobi-forcing: turn any Hugging Face decoder-only language model into a parallel decoder."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jacobi_forcing.adapter import GatedAdapter
    from jacobi_forcing.config import DecodeConfig
    from jacobi_forcing.decode.borrowed import generate_with_adapter
    from jacobi_forcing.decode.generate import GenerateOutput, generate
    from jacobi_forcing.decode.saved import save_custom_generate
    from jacobi_forcing.errors import JForceError
    from jacobi_forcing.packed import pack_weights

__version__ = "0.1.0"

__all__ = [
    "DecodeConfig",
    "GatedAdapter",
    "GenerateOutput",
    "JForceError",
    "__version__",
    "generate",
    "generate_with_adapter",
    "pack_weights",
    "save_custom_generate",
]

_HOMES = {
    "DecodeConfig": "jacobi_forcing.config",
    "GatedAdapter": "jacobi_forcing.adapter",
    "GenerateOutput": "jacobi_forcing.decode.generate",
    "JForceError": "jacobi_forcing.errors",
    "generate": "jacobi_forcing.decode.generate",
    "generate_with_adapter": "jacobi_forcing.decode.borrowed",
    "pack_weights": "jacobi_forcing.packed",
    "save_custom_generate": "jacobi_forcing.decode.saved",
}

if not TYPE_CHECKING:  # a type checker that saw this function would let every misspelt name pass

    def __getattr__(name: str) -> object:
        """Import a public name when it is first asked for (PEP 562): torch takes seconds that not everybody needs."""
        if name not in _HOMES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = getattr(importlib.import_module(_HOMES[name]), name)
        globals()[name] = value
        return value

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})
