"""`python -m jacobi_forcing` is `jforce`."""

from __future__ import annotations

import sys

from jacobi_forcing.cli import main

if __name__ == "__main__":
    sys.exit(main())
