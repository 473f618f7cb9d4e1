"""A separate process for planning, so that planning does not delay kernel launches.

In one process, Python's global lock (GIL) lets only one thread run at a time. A thread that plans for 5 ms delays the
kernel launches of another thread by 5 ms: the launching thread releases the lock at each operation and then waits for
it.

The process may end, be stopped or get no time to run. The wait for it is bounded; the functions then run here.
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

from balancing.threads import start_thread

__all__ = ["Worker", "serve"]

_END_SECONDS = 10.0
_ANSWER_SECONDS, _START_SECONDS = 60, 300  # for an answer; for the first one, which waits for imports


class Worker:
    """Calls functions in a separate process, one at a time. Any thread may use it.

    The process imports only what the functions need. It ends when this process ends, even if this process is killed. If
    it ends before, or does not answer in time, a line says so, and later calls run in this process.
    """

    def __init__(self) -> None:
        code = f"import sys; sys.path[:] = {sys.path!r}; from balancing.worker import serve; serve()"
        self._process = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self._turn = threading.Lock()
        self._patience, self._is_lost = _START_SECONDS, False
        self._left: list[int] = []  # seconds left for the call in progress
        over = threading.Event()
        start_thread(_watch, self._process, self._left, over, name="planner", end=over.set)
        weakref.finalize(self, _end, self._process, over)

    def call(self, function: Callable, *args: Any, **kwargs: Any) -> Any:
        """Call `function`, which must be at the top of a module, in the process. Returns its result.

        Raises RuntimeError with the traceback if `function` raises an exception there.
        """
        asked = pickle.dumps((function, args, kwargs), protocol=pickle.HIGHEST_PROTOCOL)
        with self._turn:
            answered = None if self._is_lost else self._ask(asked)
        if answered is None:
            return function(*args, **kwargs)
        failed, answer = answered
        if failed:
            raise RuntimeError(f"in process {self._process.pid}, which plans:\n{answer}")
        return answer

    def _ask(self, asked: bytes) -> tuple[bool, Any] | None:
        """Whether the function failed, and its result or traceback. None if the process does not answer."""
        self._left.append(self._patience)
        try:
            _write(self._process.stdin, asked)
            answered = pickle.load(self._process.stdout)  # type: ignore[arg-type]
        except (OSError, EOFError, pickle.UnpicklingError):  # it has ended, perhaps in the middle of an answer
            self._is_lost = True
            code = self._process.wait(_END_SECONDS)
            silent = (
                f"has not answered for {self._patience} seconds" if self._left[0] <= 0 else f"ended with code {code}"
            )
            print(
                f"> rank {os.environ.get('RANK', 0)}: process {self._process.pid}, which plans, {silent}; this rank "
                "makes its plans itself from now on",
                flush=True,
            )
            return None
        except BaseException:  # interrupted, so that the next call would get the answer of this one
            self._process.kill()
            raise
        finally:
            self._left.clear()
        self._patience = _ANSWER_SECONDS
        return answered


def _watch(process: subprocess.Popen, left: list[int], over: threading.Event) -> None:
    """Kill the process if it does not answer a call in time, so that the call ends. Seconds in which this process was
    stopped itself do not count."""
    while not over.wait(1.0):
        with contextlib.suppress(IndexError):  # no call is in progress, or it ends now
            left[0] -= 1
            if left[0] <= 0:
                process.kill()


def _end(process: subprocess.Popen, over: threading.Event) -> None:
    over.set()
    for pipe in (process.stdin, process.stdout):
        with contextlib.suppress(OSError):
            pipe.close()  # type: ignore[union-attr]
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(_END_SECONDS)


def _write(pipe: Any, data: bytes) -> None:
    pipe.write(data)
    pipe.flush()


def serve() -> None:
    """The main function of the process: answers calls until its caller has closed the pipe."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the calling process handles Ctrl-C
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a function prints goes to standard error, not between the answers
    with contextlib.suppress(EOFError, BrokenPipeError):
        while True:
            function, args, kwargs = pickle.load(sys.stdin.buffer)
            try:
                answer = pickle.dumps((False, function(*args, **kwargs)), protocol=pickle.HIGHEST_PROTOCOL)
            except Exception:  # also where the result cannot be pickled
                answer = pickle.dumps((True, traceback.format_exc()))
            _write(answers, answer)
