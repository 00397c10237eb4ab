"""Peak memory of a piece of work, and the size of what it leaves."""

from __future__ import annotations

import contextlib
import resource
import sys
from pathlib import Path

import torch

from jacobi_forcing.loading import resolve_device

_CLEAR, _STATUS = Path("/proc/self/clear_refs"), Path("/proc/self/status")


class Peak:
    """Peak memory inside a `with` block: of the device on CUDA, else of this process, all it holds counted.

    On Linux the system's own mark is set back when the block begins; elsewhere the mark is that of the whole process.

    Args:
        device: Name of the device, see `resolve_device`.

    Attributes:
        bytes: The peak, once the block has ended.
    """

    def __init__(self, device: str) -> None:
        self.device, self.bytes = resolve_device(device), 0.0

    def __enter__(self) -> Peak:
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        else:
            with contextlib.suppress(OSError):
                _CLEAR.write_text("5")
        return self

    def __exit__(self, *_: object) -> None:
        if self.device.type == "cuda":
            self.bytes = float(torch.cuda.max_memory_allocated(self.device))
        else:
            self.bytes = process_peak()


def process_peak() -> float:
    """Most memory that this process has held since its mark was set back, bytes."""
    try:
        for line in _STATUS.read_text(encoding="ascii").splitlines():
            if line.startswith("VmHWM:"):
                return 1024.0 * int(line.split()[1])
    except OSError:
        pass
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return float(most if sys.platform == "darwin" else most * 1024)


def folder_bytes(folder: Path) -> float:
    """Size of all files in a folder."""
    return float(sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()))
