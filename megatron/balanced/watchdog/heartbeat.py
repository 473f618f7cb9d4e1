"""When a job fails, it says so once: what was wrong, and with which ranks.

Every rank that fails posts what it has to say in the job's key-value store. The first one collects: it waits until all
have posted, or for a bounded time, and writes one report. What Megatron-LM refuses before the first step is a single
line where all ranks met the same; any other error keeps its traceback, once, with the ranks that had it. The lowest of
the ranks that failed prints.

A collective that fails tells that some connection broke, not whose. So every rank leaves a sign of life in the store
every few seconds, from a thread of its own that goes on while the rank waits in a collective, and the report names the
ranks that were silent. Launchers that end a job at the first failure, as torchrun does, may be quicker; then they name
the rank.

The store is torchrun's where there is one, from the start; else that of the process groups, once they exist. Without
one, each rank speaks for itself.
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

from megatron.balanced.checks import LocalError
from megatron.balanced.refusal import explain, refused_by_megatron

__all__ = ["failures_told_once", "stop"]

_BEAT_SECONDS = 2.0
_SILENT_SECONDS = 7.0  # of a rank that is taken for dead
_REFUSAL_SECONDS = 10.0  # for other ranks to refuse the same command line
_START_SECONDS = 30.0  # for other ranks to fail as well before the first step, when they may be far apart
_STORE_SECONDS = 10.0  # for one answer of the store
_MOST_SECONDS = 75.0  # for all of it, whatever the store does
_LINGER_SECONDS = 5.0  # of the rank that holds the store, for others to read it
_NAME = "pretrain_gpt.py"


@dataclass(frozen=True)
class _Failure:
    """What one rank has to say. `line` is None where only the traceback tells what happened."""

    line: str | None
    traceback: str
    is_refusal: bool  # the line is enough even where not all ranks say it
    patience: float  # seconds to wait for other ranks

    @property
    def kind(self) -> str:
        """The same on ranks that say the same but for numbers: their own, a port, an address."""
        said = self.line if self.is_refusal and self.line else self.traceback
        return hashlib.sha256(re.sub(r"0x[0-9a-f]+|\d+", "#", said).encode()).hexdigest()[:16]


def _rank() -> int:
    return int(os.environ.get("RANK", "0"))


def _world_size() -> int:
    return int(os.environ.get("WORLD_SIZE", "1"))


def _has_launchers_store() -> bool:
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def _open_store() -> dist.Store | None:
    """A connection of its own to the job's key-value store: a rank that waits in the store must not stop others."""
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


class _Vigil:
    """This rank's signs of life."""

    def __init__(self) -> None:
        self.store: dist.Store | None = None
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="sign-of-life", daemon=True)
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
    """What the ranks that failed agree on in the store."""

    def __init__(self, store: dist.Store, failure: _Failure) -> None:
        self._store, self._failure = store, failure
        self._rank, self._world_size = _rank(), _world_size()

    def tell(self) -> int:
        """Post, agree, and print if it is this rank's turn. Returns the exit code."""
        store = self._store
        store.set(f"said/{self._failure.kind}", json.dumps(vars(self._failure)))
        store.append("failed", f"{self._rank} {self._failure.kind}\n")
        if store.add("failures", 1) == 1:
            self._collect()
        else:
            store.wait(["verdict"], timedelta(seconds=_START_SECONDS + _LINGER_SECONDS))
        verdict = json.loads(store.get("verdict"))
        if self._rank not in verdict["ranks"]:
            self._come_late(verdict["kinds"])
        elif self._rank == verdict["printer"]:
            print(verdict["text"], file=sys.stderr, flush=True)
            store.set("told", "")
        else:
            store.wait(["told"], timedelta(seconds=_LINGER_SECONDS))
        self._linger()
        return verdict["code"]

    def _collect(self) -> None:
        """Write the verdict of all ranks that have failed by the time that the others are not waited for any longer."""
        store = self._store
        deadline = time.monotonic() + self._failure.patience
        before = self._signs_of_life()
        while True:
            failed = {int(rank): kind for rank, kind in _listed(store, "failed")}
            left = {int(rank) for (rank,) in _listed(store, "left")}
            if len(failed.keys() | left) == self._world_size or time.monotonic() > deadline:
                break
            time.sleep(0.1)
        others = set(range(self._world_size)) - failed.keys() - left
        silent = []
        if others:  # waited for long enough to tell silence from life
            after = self._signs_of_life()
            silent = sorted(rank for rank in others if rank in before and before[rank] == after[rank])
        kinds: dict[str, list[int]] = {}
        for rank, kind in failed.items():
            kinds.setdefault(kind, []).append(rank)
        text, code = self._words(kinds, silent)
        verdict = {"ranks": list(failed), "kinds": list(kinds), "printer": min(failed), "text": text, "code": code}
        store.set("verdict", json.dumps(verdict))

    def _signs_of_life(self) -> dict[int, bytes]:
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

    def _come_late(self, kinds: list[str]) -> None:
        """The others have told their failure. This rank's is the same, or most likely comes of it: one line."""
        kind = self._failure.kind
        if kind not in kinds and self._store.add(f"late/{kind}", 1) == 1:
            last = self._failure.line or self._failure.traceback.strip().splitlines()[-1]
            print(f"{_NAME}: rank {self._rank} stops after the failure of others: {last}", file=sys.stderr, flush=True)

    def _linger(self) -> None:
        """Where this rank holds the store, others may still have to read it."""
        self._store.append("gone", f"{self._rank}\n")
        deadline = time.monotonic() + _LINGER_SECONDS
        while self._rank == 0 and not _has_launchers_store() and time.monotonic() < deadline:
            done = {rank for key in ("gone", "left") for (rank,) in _listed(self._store, key)}
            if len(done) == self._world_size:
                break
            time.sleep(0.1)


def _within(seconds: float, function: Callable[[], int]) -> int | None:
    """What `function` returns, or None if it fails for want of the store or takes longer: the host of the store may be
    frozen, which no timeout of a socket notices."""
    result: list[Any] = []

    def run() -> None:
        with contextlib.suppress(RuntimeError):
            result.append(function())

    thread = threading.Thread(target=run, name="report-of-failure", daemon=True)
    thread.start()
    thread.join(seconds)
    return result[0] if result else None


def _tell(failure: _Failure, *, anywhere: bool = False) -> int:
    """Say `failure` once for all ranks. Returns the exit code.

    anywhere: without a store, a refusal may be this rank's alone, and is said once a machine.
    """
    if _world_size() > 1:

        def agree() -> int:
            store = _open_store()
            if store is None:
                raise RuntimeError("there is no store yet")
            return _Report(store, failure).tell()

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
    """End the process because of bad input, with one clear line, said once for all ranks that have the same.

    Exit code 2, as argparse's own.
    """
    by_machine = isinstance(error, LocalError | OSError | ImportError | RuntimeError)
    line = explain(error)
    if by_machine and _world_size() > int(os.environ.get("LOCAL_WORLD_SIZE", _world_size())):
        line += f" (on {socket.gethostname()})"
    failure = _Failure(line=line, traceback="", is_refusal=True, patience=_REFUSAL_SECONDS)
    _tell(failure, anywhere=by_machine)
    raise SystemExit(2)


def _is_before_training() -> bool:
    """Whether Megatron has not come to its training loop yet, which counts iterations in its arguments."""
    global_vars = sys.modules.get("megatron.training.global_vars")
    args = getattr(global_vars, "_GLOBAL_ARGS", None)
    return getattr(args, "curr_iteration", None) is None


def _failure_of(error: Exception) -> _Failure:
    before = _is_before_training()
    is_clear = before and refused_by_megatron(error)
    return _Failure(
        line=explain(error) if is_clear else None,
        traceback="".join(traceback.format_exception(error)),
        is_refusal=False,
        patience=_START_SECONDS if is_clear else _SILENT_SECONDS,
    )


@contextlib.contextmanager
def failures_told_once() -> Iterator[None]:
    """Run a job inside this. An exception is told once for all ranks, with the ranks, and ends the process.

    A rank that leaves with SystemExit is not missed.
    """
    vigil = _Vigil()
    try:
        yield
    except SystemExit:
        with contextlib.suppress(RuntimeError):  # the store died with the rank that held it: nobody can miss this one
            if vigil.store is not None:
                vigil.store.append("left", f"{_rank()}\n")
        raise
    except Exception as error:
        raise SystemExit(_tell(_failure_of(error))) from None
    finally:
        vigil.end()
