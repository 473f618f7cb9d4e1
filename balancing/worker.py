"""A separate process for planning, so that planning does not delay kernel launches.

In one process, Python's global lock (GIL) lets only one thread run at a time. A thread that plans for 5 ms delays the
kernel launches of another thread by 5 ms: the launching thread releases the lock at each operation and then waits for
it.
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
    """Calls functions in a separate process, one at a time. Any thread may use it.

    The process imports only what the functions need. It ends when this process ends, even if this process is killed.
    """

    def __init__(self) -> None:
        code = f"import sys; sys.path[:] = {sys.path!r}; from balancing.worker import serve; serve()"
        self._process = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self._turn = threading.Lock()
        weakref.finalize(self, _end, self._process)

    def call(self, function: Callable, *args: Any, **kwargs: Any) -> Any:
        """Call `function`, which must be at the top of a module, in the process. Returns its result.

        Raises RuntimeError with the traceback if `function` raises an exception, and if the process has ended.
        """
        asked = pickle.dumps((function, args, kwargs), protocol=pickle.HIGHEST_PROTOCOL)
        with self._turn:
            try:
                _write(self._process.stdin, asked)
                failed, answer = pickle.load(self._process.stdout)  # type: ignore[arg-type]
            except (OSError, EOFError) as error:
                code = self._process.wait(_END_SECONDS)
                raise RuntimeError(f"process {self._process.pid}, which plans, has ended with code {code}") from error
            except BaseException:  # interrupted, so that the next call would get the answer of this one
                self._process.kill()
                raise
        if failed:
            raise RuntimeError(f"in process {self._process.pid}, which plans:\n{answer}")
        return answer


def _end(process: subprocess.Popen) -> None:
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
