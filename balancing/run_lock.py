"""A lock that lets only one run write into a folder of reports or checkpoints.

Without it, two runs in one folder would mix their events and overwrite each other's checkpoints unnoticed. The lock is
a small file that names the run's process. While the run lives, a thread updates the file's modification time every
`BEAT_SECONDS`.

A killed run leaves the file behind. A new run takes it over, so nothing has to be removed by hand. On the same machine,
the new run checks whether the process still exists with the same start time. From another machine only the modification
time shows whether the old run lives, so the new run first watches the file for `PATIENCE_SECONDS`.

Of several runs that find the same dead one, the one that first creates a lock for taking over takes the folder.

The locks of file systems are not used, since they hang on some network mounts. A hard link creates the file and a
rename replaces it, because the server of a network mount does both atomically. Each check opens the file, because the
client of a network mount asks the server only then.
"""

import contextlib
import hashlib
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


@contextlib.contextmanager
def one_run(flag: str, folder: str | os.PathLike[str]) -> Iterator[None]:
    """Hold the lock of `folder` in a `with` statement. Creates the folder if needed. One rank of a job calls it.

    flag: the flag that names the folder, for messages.

    Raises ValueError, one line that names the holder of the lock, if another run uses the folder. If no file can be
    created in the folder, the run continues without a lock.
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
    left = _text(path)
    if _lives(path, own):
        raise ValueError(f"{what} is in use by {_named(left)}; name another folder, or end that run")
    # Only the run that holds a lock for exactly this content may replace it. So of two that take over at once, one that
    # comes late finds another content.
    ticket = path.with_name(f"{path.name}-{hashlib.sha256(left.encode()).hexdigest()[:16]}")
    _take(what, ticket, own)
    try:
        if create_text(path, text):  # it was removed meanwhile
            return
        if (now := _text(path)) != left:
            raise ValueError(f"{what} was just taken by {_named(now)}; name another folder, or end that run")
        with contextlib.suppress(ValueError):  # for instance on a full disk
            write_text(path, text)
    finally:
        with contextlib.suppress(OSError):
            ticket.unlink()


def _named(text: str) -> str:
    holder = _parsed(text)
    job = f", Slurm job {holder['job']}" if holder.get("job") else ""
    return f"process {holder.get('pid', '?')} on {holder.get('host', '?')}{job}, since {holder.get('since', '?')}"


def _lives(path: Path, own: dict[str, Any]) -> bool:
    """Whether another, living run holds the lock. Waits up to `PATIENCE_SECONDS` for a run on another machine."""
    holder = _holder(path)
    if holder.get("space") == own["space"] != "":
        return holder.get("pid") != own["pid"] and is_alive(holder.get("pid"), holder.get("started"))
    if (before := _touched(path)) is None:
        return False
    named = _named(_text(path))
    print(
        f"> {path} was left by {named}; waiting up to {PATIENCE_SECONDS:.0f} s to see whether it still runs",
        flush=True,
    )
    deadline = time.monotonic() + PATIENCE_SECONDS
    while True:
        is_over = time.monotonic() >= deadline  # before the look: this process may have stood still
        if (now := _touched(path)) != before:
            return now is not None
        if is_over:
            return False
        time.sleep(0.2)


def _beat(path: Path, over: threading.Event) -> None:
    while not over.wait(BEAT_SECONDS):
        with contextlib.suppress(OSError):
            os.utime(path)


def _holder(path: Path) -> dict[str, Any]:
    """The contents of the lock file; empty if it cannot be read, for instance while it is being written."""
    return _parsed(_text(path))


def _parsed(text: str) -> dict[str, Any]:
    try:
        holder = json.loads(text)
    except ValueError:
        return {}
    return holder if isinstance(holder, dict) else {}


def _text(path: Path) -> str:
    """The text of the lock file; empty if it cannot be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _touched(path: Path) -> int | None:
    try:
        with open(path, "rb") as file:  # os.stat of a network mount may return an old time
            return os.fstat(file.fileno()).st_mtime_ns
    except OSError:
        return None
