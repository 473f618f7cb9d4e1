"""Detection of stalls: a step that takes far longer than usual is reported with the state of every rank.

A stalled job is silent until the timeout of a process group ends it, ten minutes later, with an error on the ranks that
waited. Therefore a thread of every rank checks the iteration of Megatron-LM once a second. If it has not changed for
too long, the thread asks all ranks through the job's key-value store: each writes the stacks of its threads and the
last operations that it started on each group, and the asking rank derives which rank waits for which. The job is not
interrupted, since it may only be slow.
"""

import argparse
import contextlib
import json
import statistics
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megatron.balanced.watchdog import operations
from megatron.balanced.watchdog.waiting import Answer, Group, Started, explain_stall

__all__ = ["report_stalls"]

_LOOK_SECONDS = 1.0
_ANSWER_SECONDS = 10.0  # for the other ranks to answer
_MULTIPLE = 10.0  # of the median of recent steps
_LEAST_SECONDS = 60.0  # that a step must take to count as stalled
_RECENT = 20  # steps
_MOST_REPORTS = 5  # of one run

Moment = tuple[Any, bool]  # the iteration, and whether it is in its training step


class _Watch:
    """The thread of one rank. folder: for the files of a report; None for stderr alone."""

    def __init__(self, args: argparse.Namespace, folder: Path | None) -> None:
        self._args, self._folder = args, folder
        self._main = threading.main_thread().ident
        self._recent: deque[float] = deque(maxlen=_RECENT)
        self._moment: Moment = (None, False)
        self._since = time.monotonic()
        self._reported = False  # this moment
        self._reports = 0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="stalls", daemon=True)
        self._thread.start()

    def end(self) -> None:
        self._over.set()
        self._thread.join(timeout=_ANSWER_SECONDS)

    def _run(self) -> None:
        while not dist.is_initialized():
            if self._over.wait(_LOOK_SECONDS):
                return
        # A separate connection, so that a rank that waits in the store still answers.
        store = dist.PrefixStore("stall", dist.distributed_c10d._get_default_store().clone())
        with contextlib.suppress(RuntimeError):  # the store has ended with the job
            while self._reports < _MOST_REPORTS and not self._over.wait(_LOOK_SECONDS):
                self._look(store)

    def _look(self, store: dist.Store) -> None:
        now, moment = time.monotonic(), (getattr(self._args, "curr_iteration", None), self._is_in_step())
        if moment != self._moment:
            if self._moment[1]:
                self._recent.append(now - self._since)
            if self._reported:
                _say([f"rank {self._args.rank}: {_name(self._moment)} went on after {now - self._since:.0f} s"])
            self._moment, self._since, self._reported = moment, now, False
        asked = f"{self._reports}/asked"
        if store.check([asked]):
            self._answer(store)
        elif not self._reported and (waited := now - self._since) > (limit := self._limit()):
            asks = store.add(asked, 1) == 1  # else another rank was first
            self._answer(store)
            if asks:
                self._report(store, waited, limit)

    def _is_in_step(self) -> bool:
        """Whether the main thread is in Megatron's training step, as opposed to, for instance, a checkpoint."""
        frame = sys._current_frames().get(self._main or 0)
        while frame is not None and frame.f_code.co_name != "train_step":
            frame = frame.f_back
        return frame is not None

    def _limit(self) -> float:
        """Seconds until a step counts as stalled: at most half the timeout of process groups, which ends the job."""
        most = self._args.distributed_timeout_minutes * 60 / 2
        if not self._recent or not self._moment[1]:
            return most
        return min(most, max(_LEAST_SECONDS, _MULTIPLE * statistics.median(self._recent)))

    def _answer(self, store: dist.Store) -> None:
        """Write the state of this rank, and post to the store what the asking rank needs of it."""
        number, rank = self._reports, self._args.rank
        self._reports, self._reported = number + 1, True
        answer = _own_answer(self._main)
        lines = [f"rank {rank} in {_name(self._moment)}, at {answer.place}", *_stacks()]
        for group in answer.groups.values():
            lines.append(f"last operations on {group}:")
            lines += [f"  {one} of {one.key} {one.sizes}, {one.age:.1f} s ago, at {one.line}" for one in group.last]
        _say(lines, self._folder, f"stall-rank{rank}.txt")
        store.set(f"{number}/answer/{rank}", json.dumps(answer))

    def _report(self, store: dist.Store, waited: float, limit: float) -> None:
        number, world = self._reports - 1, range(self._args.world_size)
        keys = {rank: f"{number}/answer/{rank}" for rank in world}
        deadline = time.monotonic() + _ANSWER_SECONDS
        while not store.check(list(keys.values())) and time.monotonic() < deadline:
            self._over.wait(0.2)
        answers = {rank: _read(store.get(key)) for rank, key in keys.items() if store.check([key])}
        usual = f", usually {statistics.median(self._recent):.1f} s" if self._recent else ""
        what = f"{_name(self._moment)} stands still for {waited:.0f} s{usual} (limit {limit:.0f} s)"
        _say([f"{what}: {explain_stall(answers, world, self._args.rank)}"], self._folder, "stall.txt")


def _name(moment: Moment) -> str:
    iteration, in_step = moment
    if iteration is None:
        return "what comes before the first step"
    return f"iteration {iteration + 1}" if in_step else f"what is around iteration {iteration + 1}"


def _say(lines: list[str], folder: Path | None = None, file: str = "") -> None:
    text = "".join(f"> {line}\n" for line in lines)
    print(text, end="", file=sys.stderr, flush=True)
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / file).open("a") as out:
            out.write(text)


def _stacks() -> list[str]:
    """The stacks of all threads of this process, the main one first."""
    frames = sys._current_frames()
    lines = []
    for thread in sorted(threading.enumerate(), key=lambda thread: thread is not threading.main_thread()):
        if thread.ident in frames and thread is not threading.current_thread():
            lines.append(f"thread {thread.name}:")
            lines += [line for entry in traceback.format_stack(frames[thread.ident]) for line in entry.splitlines()]
    return lines


def _own_answer(main: int | None) -> Answer:
    now = time.time()

    def started(operation: operations.Operation) -> Started:
        age = now - operation.at
        return Started(operation.kind, operation.key, operation.number, operation.sizes, operation.line, age)

    groups = {
        name: Group(log.description or name, log.ranks, dict(log.started), [started(one) for one in [*log.last]])
        for name, log in [*operations.logs.items()]
    }
    threads = [main, *(thread.ident for thread in threading.enumerate() if thread.ident != main)]
    waits = next((found for thread in threads if (found := operations.waiting_for(thread or 0)) is not None), None)
    frame = sys._current_frames().get(main or 0)
    stack = traceback.extract_stack(frame) if frame is not None else []
    library = Path(threading.__file__).parent
    own = [
        entry
        for entry in stack
        if not entry.filename.startswith(operations.BETWEEN) and Path(entry.filename).parent != library
    ]
    place = f"{own[-1].filename}:{own[-1].lineno} in {own[-1].name}" if own else "no line of Python"
    return Answer(place, None if waits is None else (waits[0], started(waits[1])), groups)


def _read(text: bytes) -> Answer:
    """The answer that `json.dumps` wrote."""
    place, waits, groups = json.loads(text)
    return Answer(
        place,
        None if waits is None else (waits[0], Started(*waits[1])),
        {
            name: Group(description, ranks, started, [Started(*one) for one in last])
            for name, (description, ranks, started, last) in groups.items()
        },
    )


@contextlib.contextmanager
def report_stalls(args: argparse.Namespace, folder: Path | None) -> Iterator[None]:
    """Run a job's training in this context. Stalled steps are reported on stderr, and in files of `folder`."""
    with operations.record_operations():
        watch = _Watch(args, folder)
        try:
            yield
        finally:
            watch.end()
