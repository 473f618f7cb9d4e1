"""One process a rank: start them, forward their output, stop all when one fails.

A rank that dies leaves the others waiting in a collective for minutes, and the error that counts is then buried under
theirs. So the first failure ends the run and is the one that is reported.
"""

import contextlib
import os
import selectors
import signal
import subprocess
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import IO, NamedTuple

__all__ = ["Command", "RankFailed", "RunTimeout", "run_ranks"]

_GRACE = 5.0  # seconds a rank has between SIGTERM and SIGKILL
_TAIL = 20  # lines of a failed rank's output that its error keeps


class Command(NamedTuple):
    """What one rank runs."""

    argv: Sequence[str]
    environment: Mapping[str, str]


class RankFailed(RuntimeError):
    """A rank ended with an error. rank, exit_code: which one, and as a shell would count it (128 + n for signal n).
    tail: the last lines it wrote."""

    def __init__(self, rank: int, exit_code: int, ranks: int, tail: Sequence[str]):
        how = f"was killed by {_signal_name(exit_code - 128)}" if exit_code > 128 else f"exited with code {exit_code}"
        others = f"; the other {ranks - 1} were stopped" if ranks > 1 else ""
        super().__init__(f"rank {rank} of {ranks} {how}{others}")
        self.rank, self.exit_code, self.tail = rank, exit_code, tuple(tail)


class RunTimeout(RuntimeError):
    """The ranks did not end in time and were stopped. running: those that had not ended."""

    def __init__(self, seconds: float, running: Sequence[int]):
        super().__init__(
            f"ranks {', '.join(map(str, running))} had not ended after {seconds:g} s; all ranks were stopped"
        )
        self.running = tuple(running)


def run_ranks(commands: Sequence[Command], on_line: Callable[[int, str], None], timeout: float | None = None) -> None:
    """Run all commands at once until each has exited with code 0. `on_line(rank, line)` gets stdout and stderr, merged.

    Must stay on the thread that calls it: the ranks die with that thread (see `entry.die_with_parent`). Raises
    RankFailed for the first rank that fails, RunTimeout after `timeout` seconds; before that, and before any other
    exception such as KeyboardInterrupt leaves, all ranks are stopped: SIGTERM, and SIGKILL 5 seconds later.
    """
    ranks: list[_Rank] = []
    with selectors.DefaultSelector() as selector:
        try:
            for number, command in enumerate(commands):
                ranks.append(_Rank(number, command, on_line))
                ranks[-1].register(selector)
            _watch(ranks, selector, timeout)
        finally:
            _stop(ranks, selector)
            for rank in ranks:
                rank.close()


class _Rank:
    """One process: its pipe, its pidfd (readable once it has ended), and the line it has not finished."""

    def __init__(self, number: int, command: Command, on_line: Callable[[int, str], None]):
        self.number, self._on_line = number, on_line
        self._unfinished = b""
        self.tail: deque[str] = deque(maxlen=_TAIL)
        self.process = subprocess.Popen(
            command.argv,
            env=command.environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # a group of its own: Ctrl-C reaches the launcher alone, which then stops the ranks
        )
        self.running = True
        self._pipe: IO[bytes] = self.process.stdout  # type: ignore[assignment]
        os.set_blocking(self._pipe.fileno(), False)
        self._pidfd = os.pidfd_open(self.process.pid)

    def register(self, selector: selectors.BaseSelector) -> None:
        selector.register(self._pipe, selectors.EVENT_READ, (self, "output"))
        selector.register(self._pidfd, selectors.EVENT_READ, (self, "end"))

    def read(self) -> bool:
        """Pass on what is there. False at the end of the output."""
        while True:
            try:
                data = os.read(self._pipe.fileno(), 1 << 16)
            except BlockingIOError:
                return True
            if not data:
                if self._unfinished:
                    self._line(self._unfinished)
                    self._unfinished = b""
                return False
            *lines, self._unfinished = (self._unfinished + data).split(b"\n")
            for line in lines:
                self._line(line)

    def _line(self, line: bytes) -> None:
        text = line.decode(errors="replace").rstrip("\r")
        self.tail.append(text)
        self._on_line(self.number, text)

    def signal_group(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)

    def close(self) -> None:
        self._pipe.close()
        os.close(self._pidfd)


def _events(selector: selectors.BaseSelector, deadline: float | None) -> list["_Rank"]:
    """Wait for output and ends, pass the output on, and return the ranks that have ended."""
    left = None if deadline is None else max(0.0, deadline - time.monotonic())
    ended = []
    for key, _ in selector.select(left):
        rank, what = key.data
        if what == "end":
            rank.process.wait()
            rank.running = False
            ended.append(rank)
            selector.unregister(key.fileobj)
        elif not rank.read():
            selector.unregister(key.fileobj)
    return ended


def _watch(ranks: Sequence[_Rank], selector: selectors.BaseSelector, timeout: float | None) -> None:
    deadline = None if timeout is None else time.monotonic() + timeout
    while running := [rank.number for rank in ranks if rank.running]:
        if timeout is not None and deadline is not None and time.monotonic() >= deadline:
            raise RunTimeout(timeout, running)
        failed = [rank for rank in _events(selector, deadline) if rank.process.returncode != 0]
        if failed:
            # Several at once: a signal from outside is a cause, an error exit may be its consequence.
            first = min(failed, key=lambda rank: (rank.process.returncode > 0, rank.number))
            first.read()
            code = first.process.returncode
            raise RankFailed(first.number, code if code > 0 else 128 - code, len(ranks), first.tail)


def _stop(ranks: Sequence[_Rank], selector: selectors.BaseSelector) -> None:
    """End every rank with all of its group, reading on meanwhile: a rank that blocks on a full pipe cannot end."""
    for rank in ranks:
        rank.signal_group(signal.SIGTERM)
    deadline = time.monotonic() + _GRACE
    while any(rank.running for rank in ranks) and time.monotonic() < deadline:
        _events(selector, deadline)
    for rank in ranks:
        rank.signal_group(signal.SIGKILL)
        rank.process.wait()
        rank.read()


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
