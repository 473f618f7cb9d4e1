"""One report per failed job, last on the screen: the error, and the ranks that had it or that do not answer.

A rank that fails posts its error to the job's store. The first such rank waits for the others for a bounded time and
prints the report: one line for bad input, a traceback for anything else, each kind of error once, with its ranks.
Errors of collectives follow from the end of another rank. They are reported only if no rank has another error, with the
ranks that do not answer. Before it exits, each rank gives the report to torchrun, whose table then ends with it.
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
from dataclasses import asdict, dataclass, replace
from itertools import chain
from typing import NoReturn

import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import get_error_handler

from balancing.threads import note_exit_code, start_thread
from megatron.balanced.shared.errors import LocalError
from megatron.balanced.trainer.checks.checkpoints import gave_up_loading
from megatron.balanced.trainer.checks.refusal import explain, is_refusal, is_training
from megatron.balanced.trainer.rendezvous import (
    has_store,
    hosts_store,
    keeper_of_store,
    open_store,
    rank,
    wait_for,
    world_size,
)
from megatron.balanced.trainer.watchdog.stall import Watch, ask_all, name_ranks

__all__ = ["OthersFailed", "failed_elsewhere", "report_failures_once", "stop"]

_PATIENCE_SECONDS = 10.0  # for other ranks to fail as well
_START_SECONDS = 30.0  # the same at the start, which ranks may reach at different times
_MOST_SECONDS = 60.0  # for the whole report, even if the store hangs
_LINGER_SECONDS = 5.0  # a rank waits so long at most for the others to read the report
_program = ["pretrain_gpt.py"]  # its name in reports
# Errors of gloo, NCCL and the store when another rank has ended or does not connect.
_OF_OTHERS = re.compile(r"gloo|NCCL|Connection (closed|reset)|Broken pipe|Timed out|timeout", re.IGNORECASE)


class OthersFailed(RuntimeError):
    """This rank stops because others have failed."""


@dataclass(frozen=True)
class _Failure:
    """The failure of a rank, or the report of all.

    text: one line, or the traceback.
    code: the exit code; 2 if `text` is a line on bad input.
    follows: whether it follows from the end of another rank.
    ranks: the ranks that had it.
    """

    text: str
    code: int
    follows: bool = False
    ranks: tuple[int, ...] = ()

    @property
    def kind(self) -> str:
        """A hash that is the same for failures that differ only in numbers, such as a rank, a port or an address."""
        return hashlib.sha256(re.sub(r"0x[0-9a-f]+|\d+", "#", self.text).encode()).hexdigest()[:16]

    def told(self) -> str:
        names = f"{name_ranks(self.ranks)} of {world_size()}"
        if self.code == 2:
            return f"{_program[0]}: error: {self.text}" + f" ({names})" * (len(self.ranks) < world_size())
        return self.text if world_size() == 1 else f"{_program[0]}: {names} failed:\n{self.text}"


def _failure_of(error: BaseException, *, refused: bool = False) -> _Failure:
    """refused: whether it is bad input, whatever its type."""
    others_failed = isinstance(error, OthersFailed) or (
        isinstance(error, RuntimeError) and not refused and _OF_OTHERS.search(str(error)) is not None
    )
    if not others_failed and (refused or is_refusal(error)):
        by_machine = isinstance(error, LocalError | OSError | ImportError | RuntimeError)
        several_hosts = world_size() > int(os.environ.get("LOCAL_WORLD_SIZE", world_size()))
        return _Failure(explain(error) + f" (on {socket.gethostname()})" * (by_machine and several_hosts), 2)
    return _Failure("".join(traceback.format_exception(error)).rstrip(), 1, follows=others_failed)


def failed_elsewhere() -> bool:
    """Whether a rank has posted a failure."""
    return open_store("failure").check(["failures"])


def _publish(failure: _Failure, may_speak: Callable[[], bool]) -> int:
    """Agree with the other ranks on the report; the first rank that fails prints it. Returns the exit code.

    may_speak: called before something is printed.
    """
    store = open_store("failure", anew=True)
    store.set(f"said/{failure.kind}", json.dumps(asdict(failure)))
    store.append("failed", f"{rank()} {failure.kind}\n")
    if store.add("failures", 1) == 1:
        report = _collect(store, failure)
        if may_speak():
            print(report.text, file=sys.stderr, flush=True)
        store.set("report", json.dumps(asdict(report)))
    else:
        wait_for(store, ["report"], _MOST_SECONDS)
        report = _Failure(**json.loads(store.get("report")))
        if rank() not in report.ranks and not failure.follows and may_speak():
            print(replace(failure, ranks=(rank(),)).told(), file=sys.stderr, flush=True)
    _give_to_torchrun(report)
    if store.add("read", 1) == len(report.ranks):
        store.set("all read", "")
    wait_for(store, ["all read"], _LINGER_SECONDS)
    if hosts_store():
        time.sleep(1.0)  # until the others have their answers
    return report.code


def _collect(store: dist.Store, failure: _Failure) -> _Failure:
    """Wait for the other ranks, for a bounded time. Returns the report on all ranks that failed."""
    deadline = time.monotonic() + (_PATIENCE_SECONDS if is_training() else _START_SECONDS)
    silent: set[int] = set()
    if failure.follows:
        silent = {*range(world_size())} - ask_all().keys()
    while True:
        kinds: dict[str, list[int]] = {}
        for line in store.get("failed").decode().splitlines():
            kinds.setdefault(line.split()[1], []).append(int(line.split()[0]))
        failed = {*chain.from_iterable(kinds.values())}
        left = {*map(int, store.get("left").split())} if store.check(["left"]) else set()
        if len(failed | left | silent) == world_size() or time.monotonic() > deadline:
            break
        time.sleep(0.1)
    said = {kind: _Failure(**json.loads(store.get(f"said/{kind}"))) for kind in kinds}
    own = [replace(said[kind], ranks=tuple(sorted(ranks))) for kind, ranks in kinds.items() if not said[kind].follows]
    if silent := silent - failed - left:
        names = name_ranks(silent)
        died = f"{names} died or stopped answering; the other ranks stop now. Look at the log of {names}"
        own = own or [_Failure(f"{_program[0]}: error: {died}", 1)]
    elif not own:
        own = [replace(failure, ranks=tuple(sorted(failed)))]
    text = "\n".join(each.told() if each.ranks else each.text for each in own)
    return _Failure(text, min(each.code for each in own), ranks=tuple(failed))


def _within(seconds: float, function: Callable[[], int]) -> int | None:
    """The result of `function`; None if the store fails or `function` takes longer than `seconds`: no timeout of a
    socket detects that the host of the store is frozen."""
    result: list[int] = []

    def run() -> None:
        with contextlib.suppress(RuntimeError):
            result.append(function())

    start_thread(run, name="report-of-failure").join(seconds)
    return result[0] if result else None


def _give_to_torchrun(report: _Failure) -> None:
    """Write the report for torchrun, whose table ends with it."""
    try:
        raise (ValueError if report.code == 2 else RuntimeError)(report.text) from None
    except (ValueError, RuntimeError) as error:
        error.__traceback__ = error.__context__ = None
        get_error_handler().record_exception(error)


def _report(failure: _Failure) -> int:
    """Report `failure` once for all ranks. Returns the exit code."""
    silence = threading.Lock()  # broken once: by the report of all, or where that is late by this rank's own

    def may_speak() -> bool:
        return silence.acquire(blocking=False)

    code = _within(_MOST_SECONDS, lambda: _publish(failure, may_speak)) if has_store() else None
    if code is None and may_speak():
        if failure.code == 2:
            told = f"{_program[0]}: error: {failure.text}"
        elif failure.follows and has_store():
            keeper = keeper_of_store()
            told = (
                f"{_program[0]}: error: {keeper}, which has the job's store, died or stopped answering; rank {rank()} "
                f"stops now. Look at the log of {keeper}"
            )
        else:
            told = replace(failure, ranks=(rank(),)).told()
        print(told, file=sys.stderr, flush=True)
        _give_to_torchrun(replace(failure, text=told))
    return failure.code if code is None else code


def stop(error: Exception) -> NoReturn:
    """End the process because of bad input, with one line for all ranks that have the same error.

    The exit code is 2, as argparse's. `error` is the cause of the SystemExit.
    """
    raise SystemExit(_report(_failure_of(error, refused=True))) from error


@contextlib.contextmanager
def report_failures_once(program: str = "pretrain_gpt.py") -> Iterator[None]:
    """Run a job in this context. An exception is reported once, with the ranks that had it, and ends the process.

    program: the program's name in the report.

    A rank that leaves with SystemExit does not count as silent.
    """
    _program[0] = program
    watch, code = Watch(), 0
    try:
        yield
    except KeyboardInterrupt:
        if rank() == 0:
            print(f"{_program[0]}: interrupted", file=sys.stderr, flush=True)
        code = 130
    except SystemExit as end:
        if (reason := gave_up_loading(end)) is None:
            with contextlib.suppress(RuntimeError):  # the store ended with its rank, so no rank waits for this one
                if has_store():
                    open_store("failure").append("left", f"{rank()} ")
            note_exit_code(end.code)
            raise
        code = _report(_Failure(reason, 2))
    except BaseException as error:  # torch's CheckpointException is no Exception
        code = _report(_failure_of(error))
    finally:
        watch.end()
    note_exit_code(code)
    if code:
        raise SystemExit(code)
