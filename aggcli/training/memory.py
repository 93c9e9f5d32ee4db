"""The most memory that a step needed."""

from __future__ import annotations

import resource
import sys
from contextlib import suppress

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
    # ru_maxrss would begin as the size of the process that started this one
    with suppress(FileNotFoundError), open("/proc/self/status", "rb") as status:
        return int(status.read().partition(b"VmHWM:")[2].split(None, 1)[0]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
