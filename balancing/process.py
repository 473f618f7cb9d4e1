"""Processes: which one wrote a file, whether it lives, as far as this machine can tell, and an end with the parent."""

import contextlib
import os
import threading
import time
from pathlib import Path
from typing import Any

__all__ = ["end_with_parent", "is_alive", "process_space", "start_time"]


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


def end_with_parent() -> None:
    """Have this process end within a second when its parent has ended.

    A rank that is killed would leave the processes that multiprocessing spawned for it, such as those that write
    checkpoints: each with its memory, and with the rank's output open, so that `torchrun ... | tee log` never ends.
    """
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1.0)
        os._exit(1)

    threading.Thread(target=watch, name="parent", daemon=True).start()
