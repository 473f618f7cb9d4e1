"""Processes: an identity to write into files, a check that a process still runs, and an end with the parent."""

import contextlib
import os
import threading
import time
from multiprocessing import parent_process
from pathlib import Path
from typing import Any

__all__ = ["end_with_parent", "is_alive", "process_space", "start_time"]


def process_space() -> str:
    """Identifies the machine's boot and the container's PID namespace; empty if the system does not report them.

    Process numbers are comparable only between processes with the same value.
    """
    with contextlib.suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    return ""


def start_time(pid: Any) -> str:
    """The start time of a process in the kernel's clock ticks; empty if there is no such process or it has ended."""
    with contextlib.suppress(OSError, IndexError):
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
        return "" if fields[0] in "ZX" else fields[19]
    return ""


def is_alive(pid: Any, started: Any) -> bool:
    """Whether the process with number `pid` and start time `started`, of this `process_space`, still runs."""
    return started != "" and started == start_time(pid)


def end_with_parent() -> None:
    """Make this process end within a second after its parent has ended.

    Without this, a killed rank leaves behind the processes that multiprocessing spawned for it, such as checkpoint
    writers. They keep their memory, and they keep the rank's output open, so that `torchrun ... | tee log` never ends.
    """
    parent = os.getppid()

    def watch() -> None:
        # A parent that ended before this call is found by its pipe. Until the imports are done, it has no entry.
        while os.getppid() == parent and ((owner := parent_process()) is None or owner.is_alive()):
            time.sleep(1.0)
        os._exit(1)

    threading.Thread(target=watch, name="parent", daemon=True).start()
