"""Threads beside the one that trains. The exit of the process waits for them, but not for long.

A daemon thread that is inside torch when the interpreter shuts down, and returns from there, aborts the process: the
exit code is then that of a crash. A thread that is no daemon lets the exit wait until its group's timeout where it
waits for another rank.
"""

import atexit
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

__all__ = ["note_exit_code", "start_thread"]

_EXIT_SECONDS = 5.0
_ends: weakref.WeakKeyDictionary[threading.Thread, Callable[[], None]] = weakref.WeakKeyDictionary()
_code: list[int] = []  # of the exit, if it is known


def start_thread(
    target: Callable, *args: Any, name: str | None = None, end: Callable[[], None] = lambda: None
) -> threading.Thread:
    """Start a daemon thread that calls `target`.

    end: called when the process exits; makes `target` return soon.
    """
    thread = threading.Thread(target=target, args=args, name=name, daemon=True)
    _ends[thread] = end
    thread.start()
    return thread


def note_exit_code(code: object) -> None:
    """Tell the code that this process is about to exit with, as `SystemExit` has it."""
    _code[:] = [code if isinstance(code, int) else int(code is not None)]


@atexit.register
def _wait_for_threads() -> None:
    """Wait for all threads. If one still waits in torch, end the process without the interpreter's shutdown."""
    threads = [thread for thread in _ends if thread.is_alive()]
    for thread in threads:
        _ends[thread]()
    deadline = time.monotonic() + _EXIT_SECONDS
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    code = 1 if getattr(sys, "last_exc", None) is not None else _code[0] if _code else None
    if code is not None and any(thread.is_alive() for thread in threads):
        for stream in (sys.stdout, sys.stderr):
            if stream is not None:
                stream.flush()
        os._exit(code)
