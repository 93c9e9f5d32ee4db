"""The most memory that a step needed."""

from __future__ import annotations

import resource
import sys
from pathlib import Path

import torch


def begin_peak(device: torch.device) -> None:
    """From here on, what `peak_bytes` tells of a CUDA device."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def peak_bytes(device: torch.device) -> int:
    """The most bytes at a time: that torch has had allocated on a CUDA device since `begin_peak`, else that this process has
    had resident since its start."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    status = Path("/proc/self/status")  # ru_maxrss would begin as the size of the process that started this one
    if status.exists():
        return int(status.read_text().partition("VmHWM:")[2].split()[0]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
