"""One directory, one run: a lock in the folder of a report or of checkpoints.

Two runs that write into one folder mix their events and overwrite each other's checkpoints, and neither notices. The
lock is a small file that says who has it. While its run lives, a thread touches it every few seconds.

A run that was killed leaves the file. On the same machine the process that is gone, or has another start time, shows
that; from another machine only the touches show whether it lives, so a new run watches the file for `PATIENCE_SECONDS`
before it takes it over. Nothing has to be removed by hand. File systems' own locks are not used: they hang on some
network mounts. The file is made by a hard link and replaced by a rename, which the server of a network mount does as a
whole, and is opened for each look, which makes the client ask the server.
"""

import contextlib
import json
import os
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from balancing.files import create_text, write_text
from balancing.process import is_alive, process_space, start_time

__all__ = ["NAME", "one_run"]

NAME = ".balance-lock"
BEAT_SECONDS = 5.0
PATIENCE_SECONDS = 30.0
_SETTLE_SECONDS = 1.0  # in which two runs that take over at once see which of them was last


@contextlib.contextmanager
def one_run(flag: str, folder: str | os.PathLike[str]) -> Iterator[None]:
    """Hold the lock of `folder`, which is made if it is not there. One rank of a job calls it.

    flag: names the folder in messages.

    Raises ValueError, one line that says who has the lock, if another run lives in the folder. A folder in which no
    file can be made has no lock.
    """
    path, own = Path(folder) / NAME, _this_process()
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        _take(f"{flag} {os.fspath(folder)}", path, own)
    over = threading.Event()
    beat = threading.Thread(target=_beat, args=(path, over), name="run-lock", daemon=True)
    beat.start()
    try:
        yield
    finally:
        over.set()
        beat.join()
        if _holder(path) == own:
            with contextlib.suppress(OSError):
                path.unlink()


def _this_process() -> dict[str, Any]:
    return {
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "space": process_space(),
        "started": start_time(os.getpid()),
        "since": time.strftime("%Y-%m-%d %H:%M:%S"),
        "job": os.environ.get("SLURM_JOB_ID", ""),
    }


def _take(what: str, path: Path, own: dict[str, Any]) -> None:
    text = json.dumps(own)
    if create_text(path, text):
        return
    if _lives(path, own):
        raise ValueError(f"{what} is in use by {_named(path)}; name another folder, or end that run")
    try:
        write_text(path, text)
    except ValueError:  # no room, as on a full disk
        return
    time.sleep(_SETTLE_SECONDS)
    if _holder(path) != own:
        raise ValueError(f"{what} was just taken by {_named(path)}; name another folder, or end that run")


def _named(path: Path) -> str:
    holder = _holder(path)
    job = f", Slurm job {holder['job']}" if holder.get("job") else ""
    return f"process {holder.get('pid', '?')} on {holder.get('host', '?')}{job}, since {holder.get('since', '?')}"


def _lives(path: Path, own: dict[str, Any]) -> bool:
    """Whether another run has the lock and goes on, as far as can be told within `PATIENCE_SECONDS`."""
    holder = _holder(path)
    if holder.get("space") == own["space"] != "":
        return holder.get("pid") != own["pid"] and is_alive(holder.get("pid"), holder.get("started"))
    if (before := _touched(path)) is None:
        return False
    print(
        f"> {path} was left by {_named(path)}; waiting up to {PATIENCE_SECONDS:.0f} s for a sign of its life",
        flush=True,
    )
    deadline = time.monotonic() + PATIENCE_SECONDS
    while time.monotonic() < deadline:
        time.sleep(0.2)
        if (now := _touched(path)) != before:
            return now is not None
    return False


def _beat(path: Path, over: threading.Event) -> None:
    while not over.wait(BEAT_SECONDS):
        with contextlib.suppress(OSError):
            os.utime(path)


def _holder(path: Path) -> dict[str, Any]:
    """Who has the lock; empty where that cannot be read, as in the moment when it is written."""
    try:
        holder = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return holder if isinstance(holder, dict) else {}


def _touched(path: Path) -> int | None:
    try:
        with open(path, "rb") as file:  # opened, since network mounts look at the server's file only then
            return os.fstat(file.fileno()).st_mtime_ns
    except OSError:
        return None
