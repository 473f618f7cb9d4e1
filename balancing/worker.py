"""A process that computes for this one, and takes nothing off its threads: Python lets one thread of a process run at a
time.

A thread that plans for five milliseconds beside the one that launches a GPU's work holds the launches up for five
milliseconds, since the latter gives Python's lock away at each of its operations and then waits for it.
"""

import contextlib
import os
import pickle
import signal
import subprocess
import sys
import threading
import traceback
import weakref
from collections.abc import Callable
from typing import Any

__all__ = ["Worker", "serve"]

_END_SECONDS = 10.0


class Worker:
    """Calls functions in a process of its own, one at a time. Any thread may ask it.

    The process imports what the functions need and nothing else. It ends with this one, however that ends.
    """

    def __init__(self) -> None:
        code = f"import sys; sys.path[:] = {sys.path!r}; from balancing.worker import serve; serve()"
        self._process = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self._turn = threading.Lock()
        weakref.finalize(self, _end, self._process)

    def call(self, function: Callable, *args: Any, **kwargs: Any) -> Any:
        """What `function`, of a module, returns there.

        Raises RuntimeError with its traceback where it raises an exception, and where the process has ended.
        """
        with self._turn:
            try:
                _write(self._process.stdin, (function, args, kwargs))
                failed, answer = pickle.load(self._process.stdout)  # type: ignore[arg-type]
            except (OSError, EOFError) as error:
                code = self._process.wait(_END_SECONDS)
                raise RuntimeError(f"process {self._process.pid}, which plans, has ended with code {code}") from error
        if failed:
            raise RuntimeError(f"in process {self._process.pid}, which plans:\n{answer}")
        return answer


def _end(process: subprocess.Popen) -> None:
    for pipe in (process.stdin, process.stdout):
        with contextlib.suppress(OSError):
            pipe.close()  # type: ignore[union-attr]
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(_END_SECONDS)


def _write(pipe: Any, value: Any) -> None:
    pickle.dump(value, pipe, protocol=pickle.HIGHEST_PROTOCOL)
    pipe.flush()


def serve() -> None:
    """The body of the process: answers calls until there is nobody left to ask."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the one that asks
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a function prints is no answer
    with contextlib.suppress(EOFError, BrokenPipeError):
        while True:
            function, args, kwargs = pickle.load(sys.stdin.buffer)
            try:
                answer = False, function(*args, **kwargs)
            except Exception:
                answer = True, traceback.format_exc()
            _write(answers, answer)
