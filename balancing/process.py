"""Processes: which one wrote a file, and whether it lives, as far as this machine can tell."""

import contextlib
import os
from pathlib import Path
from typing import Any

__all__ = ["is_alive", "process_space", "start_time"]


def process_space() -> str:
    """What processes that see each other's numbers have in common: the machine's boot and the container's space."""
    with contextlib.suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    return ""


def start_time(pid: Any) -> str:
    """The start time of a process as the kernel counts it; empty where there is no such process, or it has ended."""
    with contextlib.suppress(OSError, IndexError):
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
        return "" if fields[0] in "ZX" else fields[19]
    return ""


def is_alive(pid: Any, started: Any) -> bool:
    """Whether the process of this space that had the number `pid`, and began at `started`, still runs."""
    return started != "" and started == start_time(pid)
