"""One report per failed job: the error, the ranks that had it, and the ranks that are silent.

Every rank that fails posts its error to the job's key-value store. The first one collects: it waits until all ranks
have posted, at most for a bounded time, and writes one report. An input that Megatron-LM rejects before the second step
is reported in a single line if all ranks reject it; any other error keeps its traceback, once, with the ranks that had
it. The lowest of the ranks that failed prints.

A failed collective shows that some connection broke, but not whose. Therefore a thread of every rank writes a heartbeat
to the store every few seconds, also while the rank waits in a collective, and the report names the ranks without one.
Launchers that end a job at the first failure, such as torchrun, may be faster; then they name the rank.

The store is torchrun's, if there is one, from the start; otherwise that of the process groups, once they exist. Without
a store each rank reports for itself.
"""

import contextlib
import hashlib
import json
import os
import re
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NoReturn

import torch.distributed as dist

from megatron.balanced.checks.refusal import LocalError, explain, refused_by_megatron

__all__ = ["report_failures_once", "stop"]

_BEAT_SECONDS = 2.0
_SILENT_SECONDS = 7.0  # without a heartbeat, after which a rank counts as dead
_REFUSAL_SECONDS = 10.0  # for other ranks to reject the same command line
_START_SECONDS = 30.0  # for other ranks to fail before the second step, which they may reach at different times
_STORE_SECONDS = 10.0  # for one answer of the store
_MOST_SECONDS = 75.0  # for the whole report, even if the store hangs
_LINGER_SECONDS = 5.0  # that the rank with the store stays, so that others can read it
_NAME = "pretrain_gpt.py"


@dataclass(frozen=True)
class _Failure:
    """The failure of one rank.

    line: the error in one line; None where only the traceback explains it.
    traceback: of the exception.
    is_refusal: whether the line is enough even if not all ranks have this failure.
    patience: seconds to wait for other ranks.
    """

    line: str | None
    traceback: str
    is_refusal: bool
    patience: float

    @property
    def kind(self) -> str:
        """A hash that is the same for failures that differ only in numbers, such as a rank, a port or an address."""
        said = self.line if self.is_refusal and self.line else self.traceback
        return hashlib.sha256(re.sub(r"0x[0-9a-f]+|\d+", "#", said).encode()).hexdigest()[:16]


def _rank() -> int:
    return int(os.environ.get("RANK", "0"))


def _world_size() -> int:
    return int(os.environ.get("WORLD_SIZE", "1"))


def _has_launchers_store() -> bool:
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def _open_store() -> dist.Store | None:
    """A new connection to the job's key-value store, so that a thread that waits in the store does not block others."""
    store: dist.Store
    if _has_launchers_store():
        address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        seconds = timedelta(seconds=_STORE_SECONDS)
        store = dist.TCPStore(address, port, is_master=False, wait_for_workers=False, timeout=seconds)
    elif dist.is_initialized():
        store = dist.distributed_c10d._get_default_store().clone()
    else:
        return None
    store = dist.PrefixStore(f"failure/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
    store.set_timeout(timedelta(seconds=_STORE_SECONDS))
    return store


class _Heartbeat:
    """The thread that writes this rank's heartbeat to the store."""

    def __init__(self) -> None:
        self.store: dist.Store | None = None
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="heartbeat", daemon=True)
        self._thread.start()

    def _beat(self) -> None:
        count = 0
        while not self._over.is_set():
            try:
                if self.store is None:
                    self.store = _open_store()
                if self.store is not None:
                    self.store.set(f"alive/{_rank()}", str(count))
            except RuntimeError:  # the store is gone, and with it the job
                return
            count += 1
            self._over.wait(0.2 if self.store is None else _BEAT_SECONDS)

    def end(self) -> None:
        self._over.set()
        self._thread.join(timeout=_SILENT_SECONDS)


def _listed(store: dist.Store, key: str) -> list[list[str]]:
    """The words of each line that ranks appended to `key`."""
    return [line.split() for line in store.get(key).decode().splitlines()] if store.check([key]) else []


def _ranks(numbers: list[int]) -> str:
    """'rank 3', 'ranks 0-3, 7'."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    spans = [str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs]
    return f"rank{'s' * (len(numbers) > 1)} {', '.join(spans)}"


def _as_error(line: str) -> str:
    return f"{_NAME}: error: {line}"


def _in_full(failure: _Failure, ranks: list[int], world_size: int) -> str:
    if failure.is_refusal and failure.line:
        return _as_error(f"{failure.line} ({_ranks(ranks)} of {world_size})")
    if world_size == 1:
        return failure.traceback.rstrip()
    return f"{_NAME}: {_ranks(ranks)} of {world_size} failed:\n{failure.traceback.rstrip()}"


class _Report:
    """The report of a failed job, on which the ranks that failed agree in the store."""

    def __init__(self, store: dist.Store, failure: _Failure) -> None:
        self._store, self._failure = store, failure
        self._rank, self._world_size = _rank(), _world_size()

    def publish(self) -> int:
        """Post this rank's failure, agree on the report, and print it if this rank is to. Returns the exit code."""
        store = self._store
        store.set(f"said/{self._failure.kind}", json.dumps(vars(self._failure)))
        store.append("failed", f"{self._rank} {self._failure.kind}\n")
        if store.add("failures", 1) == 1:
            self._collect()
        else:
            store.wait(["verdict"], timedelta(seconds=_START_SECONDS + _LINGER_SECONDS))
        verdict = json.loads(store.get("verdict"))
        if self._rank not in verdict["ranks"]:
            self._report_late(verdict["kinds"])
        elif self._rank == verdict["printer"]:
            print(verdict["text"], file=sys.stderr, flush=True)
            store.set("printed", "")
        else:
            store.wait(["printed"], timedelta(seconds=_LINGER_SECONDS))
        self._linger()
        return verdict["code"]

    def _collect(self) -> None:
        """Wait for the other ranks, at most for this failure's patience, and write the verdict on those that failed."""
        store = self._store
        deadline = time.monotonic() + self._failure.patience
        before = self._heartbeats()
        while True:
            failed = {int(rank): kind for rank, kind in _listed(store, "failed")}
            left = {int(rank) for (rank,) in _listed(store, "left")}
            if len(failed.keys() | left) == self._world_size or time.monotonic() > deadline:
                break
            time.sleep(0.1)
        others = set(range(self._world_size)) - failed.keys() - left
        silent = []
        if others:  # a living rank has written a heartbeat in the time that passed
            after = self._heartbeats()
            silent = sorted(rank for rank in others if rank in before and before[rank] == after[rank])
        kinds: dict[str, list[int]] = {}
        for rank, kind in failed.items():
            kinds.setdefault(kind, []).append(rank)
        text, code = self._words(kinds, silent)
        verdict = {"ranks": list(failed), "kinds": list(kinds), "printer": min(failed), "text": text, "code": code}
        store.set("verdict", json.dumps(verdict))

    def _heartbeats(self) -> dict[int, bytes]:
        keys = {rank: f"alive/{rank}" for rank in range(self._world_size)}
        return {rank: self._store.get(key) for rank, key in keys.items() if self._store.check([key])}

    def _words(self, kinds: dict[str, list[int]], silent: list[int]) -> tuple[str, int]:
        said = {kind: _Failure(**json.loads(self._store.get(f"said/{kind}"))) for kind in kinds}
        if len(kinds) == 1:
            ((kind, ranks),) = kinds.items()
            if said[kind].line and len(ranks) == self._world_size:
                return _as_error(str(said[kind].line)), 2
        texts = [_in_full(said[kind], ranks, self._world_size) for kind, ranks in kinds.items()]
        if silent:
            names = _ranks(silent)
            texts.append(
                _as_error(f"{names} died or stopped answering; the other ranks stop now. Look at the log of {names}")
            )
        return "\n".join(texts), 2 if all(failure.is_refusal for failure in said.values()) else 1

    def _report_late(self, kinds: list[str]) -> None:
        """Print one line after the report of other ranks, whose failure most likely caused this one; nothing if it is
        the same failure."""
        kind = self._failure.kind
        if kind not in kinds and self._store.add(f"late/{kind}", 1) == 1:
            last = self._failure.line or self._failure.traceback.strip().splitlines()[-1]
            print(f"{_NAME}: rank {self._rank} stops after the failure of others: {last}", file=sys.stderr, flush=True)

    def _linger(self) -> None:
        """If this rank holds the store, stay until the other ranks have read it."""
        self._store.append("gone", f"{self._rank}\n")
        deadline = time.monotonic() + _LINGER_SECONDS
        while self._rank == 0 and not _has_launchers_store() and time.monotonic() < deadline:
            done = {rank for key in ("gone", "left") for (rank,) in _listed(self._store, key)}
            if len(done) == self._world_size:
                break
            time.sleep(0.1)


def _within(seconds: float, function: Callable[[], int]) -> int | None:
    """The result of `function`, or None if the store fails or it takes longer than `seconds`: the host of the store may
    be frozen, which no timeout of a socket detects."""
    result: list[Any] = []

    def run() -> None:
        with contextlib.suppress(RuntimeError):
            result.append(function())

    thread = threading.Thread(target=run, name="report-of-failure", daemon=True)
    thread.start()
    thread.join(seconds)
    return result[0] if result else None


def _report(failure: _Failure, *, anywhere: bool = False) -> int:
    """Report `failure` once for all ranks. Returns the exit code.

    anywhere: whether a rejected input may be wrong on this host alone; without a store it is then reported once a host.
    """
    if _world_size() > 1:

        def agree() -> int:
            store = _open_store()
            if store is None:
                raise RuntimeError("there is no store yet")
            return _Report(store, failure).publish()

        if (code := _within(_MOST_SECONDS, agree)) is not None:
            return code
    if failure.line and (failure.is_refusal or _world_size() == 1):
        first_here = int(os.environ.get("LOCAL_RANK", "0")) == 0
        if _rank() == 0 or (anywhere and first_here):
            print(_as_error(failure.line), file=sys.stderr, flush=True)
        return 2
    print(_in_full(failure, [_rank()], _world_size()), file=sys.stderr, flush=True)
    return 1


def stop(error: Exception) -> NoReturn:
    """End the process because of bad input, with one line for all ranks that have the same error.

    The exit code is 2, as argparse's. `error` is the cause of the SystemExit.
    """
    by_machine = isinstance(error, LocalError | OSError | ImportError | RuntimeError)
    line = explain(error)
    if by_machine and _world_size() > int(os.environ.get("LOCAL_WORLD_SIZE", _world_size())):
        line += f" (on {socket.gethostname()})"
    failure = _Failure(line=line, traceback="", is_refusal=True, patience=_REFUSAL_SECONDS)
    _report(failure, anywhere=by_machine)
    raise SystemExit(2) from error


def _is_before_second_step() -> bool:
    """Whether Megatron's training loop, which counts iterations in its arguments, has not begun its second one. Some
    flags are rejected only by the schedule of the first."""
    global_vars = sys.modules.get("megatron.training.global_vars")
    args = getattr(global_vars, "_GLOBAL_ARGS", None)
    current = getattr(args, "curr_iteration", None)
    return current is None or current <= getattr(args, "iteration", -1)


def _failure_of(error: Exception) -> _Failure:
    before = _is_before_second_step()
    is_clear = before and refused_by_megatron(error)
    return _Failure(
        line=explain(error) if is_clear else None,
        traceback="".join(traceback.format_exception(error)),
        is_refusal=False,
        patience=_START_SECONDS if is_clear else _SILENT_SECONDS,
    )


@contextlib.contextmanager
def report_failures_once() -> Iterator[None]:
    """Run a job in this context. An exception is reported once, with the ranks that had it, and ends the process.

    A rank that leaves with SystemExit does not count as silent.
    """
    heartbeat = _Heartbeat()
    try:
        yield
    except SystemExit:
        with contextlib.suppress(RuntimeError):  # the store ended with its rank, so no rank waits for this one
            if heartbeat.store is not None:
                heartbeat.store.append("left", f"{_rank()}\n")
        raise
    except Exception as error:
        raise SystemExit(_report(_failure_of(error))) from None
    finally:
        heartbeat.end()
