"""A daemon of NVIDIA's multi-process service (MPS) for the ranks of one run, beside any that the machine has.

Processes that share a GPU take turns on it, unless they share a context through MPS: only then do the kernels of two
ranks run at the same time. The daemon has folders of its own and ends with the run, however that ends.
"""

import contextlib
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from tests.support.pool_server import die_with_parent

__all__ = ["private_mps"]

_CONTROL = "nvidia-cuda-mps-control"
_FOLDERS = ("CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY")
_SECONDS = 10.0  # to start, and to end


@contextlib.contextmanager
def private_mps() -> Iterator[dict[str, str]]:
    """The environment of processes that share a GPU, empty where there is no daemon to be had.

    Where this process was given a daemon's folder, that one is used and left running.
    """
    if _FOLDERS[0] in os.environ or shutil.which(_CONTROL) is None:
        yield {}
        return
    # A socket's path must be short, which the folders of tests are not.
    with tempfile.TemporaryDirectory(prefix="mps-", ignore_cleanup_errors=True) as folder:
        environment = {name: str(Path(folder) / name[9:13].lower()) for name in _FOLDERS}
        for made in environment.values():
            Path(made).mkdir()
        daemon = subprocess.Popen(
            [_CONTROL, "-f"],
            env=os.environ | environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            preexec_fn=partial(die_with_parent, os.getpid()),
        )
        try:
            yield environment if _answers(daemon, environment) else {}
        finally:
            _stop(daemon, environment)


def _answers(daemon: subprocess.Popen, environment: dict[str, str]) -> bool:
    deadline = time.monotonic() + _SECONDS
    while daemon.poll() is None and time.monotonic() < deadline:
        if _tell("get_server_list", environment):
            return True
        time.sleep(0.1)
    return False


def _stop(daemon: subprocess.Popen, environment: dict[str, str]) -> None:
    if daemon.poll() is None:
        _tell("quit -t 1", environment)  # which ends its servers, too
        with contextlib.suppress(subprocess.TimeoutExpired):
            daemon.wait(_SECONDS)
    if daemon.poll() is None:
        daemon.kill()
        daemon.wait()


def _tell(words: str, environment: dict[str, str]) -> bool:
    """Whether the daemon took a command."""
    try:
        done = subprocess.run(
            [_CONTROL],
            input=f"{words}\n",
            env=os.environ | environment,
            capture_output=True,
            text=True,
            timeout=_SECONDS,
        )
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0
