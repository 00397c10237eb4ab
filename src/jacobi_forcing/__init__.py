"""jacobi-forcing: turn any Hugging Face decoder-only language model into a parallel decoder."""

from __future__ import annotations

from jacobi_forcing.config import DecodeConfig
from jacobi_forcing.decode.generate import GenerateOutput, generate
from jacobi_forcing.errors import JForceError

__version__ = "0.1.0"

__all__ = ["DecodeConfig", "GenerateOutput", "JForceError", "__version__", "generate"]
