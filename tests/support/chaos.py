"""Seeded chaos: every message, collective, wait, thread, store access and data worker of a rank is late at random.

A test on a quiet machine sees one order of events. A busy machine sees others: a rank that stands still for a moment
wherever the scheduler took its core away. `install` makes such moments on purpose. How long each one is follows from
the seed, the rank, the thread and how many operations that thread has started, so a seed gives the same delays again;
what they meet depends on the machine all the same.

`Pauses` does the same from outside: it stops whole processes, with all their threads, those of gloo as well.

`install` also finds in every run what only an unlucky one suffers from: gloo loses a message whose handle is dropped
before anybody waited for it, unless its receiver happened to be there first.
"""

import contextlib
import functools
import gc
import itertools
import random
import signal
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

import psutil
import torch.distributed as dist
import torch.utils.data._utils as loader

from megatron.balanced.watchdog.operations import COLLECTIVES, MESSAGES

__all__ = ["Pauses", "dropped_messages", "install"]

# Share of operations that are late, and the most seconds that they are late by: the first that applies.
_LATENESS = ((0.01, 0.15), (0.1, 0.01), (0.4, 0.001))
_SLICE = 0.05  # seconds
_own = threading.local()
_threads = itertools.count()
_unwaited: dict[int, tuple[weakref.ref, str]] = {}  # id of a handle -> the message
_dropped: list[str] = []


def _be_late(seed: str) -> None:
    if not hasattr(_own, "random"):
        _own.random = random.Random(f"{seed}/{next(_threads)}")
    draw, length = _own.random.random(), _own.random.random()
    for share, longest in _LATENESS:
        if draw < share:
            time.sleep(length * longest)
            return


def _late(seed: str, original: Callable) -> Callable:
    @functools.wraps(original)
    def late(*args: Any, **kwargs: Any) -> Any:
        _be_late(seed)
        return original(*args, **kwargs)

    return late


def _late_message(seed: str, kind: str, original: Callable) -> Callable:
    def late(*args: Any, **kwargs: Any) -> Any:
        _be_late(seed)
        work = original(*args, **kwargs)
        key, what = id(work), f"{kind} {args[2:]} on {args[0].group_desc}"

        def gone(reference: weakref.ref) -> None:
            if _unwaited.get(key, (None,))[0] is reference:
                _dropped.append(_unwaited.pop(key)[1])

        _unwaited[key] = weakref.ref(work, gone), what
        return work

    return late


def _late_wait(seed: str, original: Callable) -> Callable:
    def wait(work: dist.Work, *args: Any, **kwargs: Any) -> Any:
        _be_late(seed)
        done = original(work, *args, **kwargs)
        _unwaited.pop(id(work), None)
        return done

    return wait


def install(seed: int, rank: int) -> None:
    """Make this process late from now on. Its forks are late by the same draws of their own. There is no way back."""
    words = f"{seed}/{rank}"
    group: Any = dist.ProcessGroup
    for name in COLLECTIVES:
        if hasattr(group, name):
            setattr(group, name, _late(words, getattr(group, name)))
    for name in (*MESSAGES, "recv_anysource"):
        setattr(group, name, _late_message(words, name, getattr(group, name)))
    dist.Work.wait = _late_wait(words, dist.Work.wait)  # type: ignore[method-assign]
    threading.Thread.run = _late(words, threading.Thread.run)  # type: ignore[method-assign]
    for name in ("get", "set", "wait", "add", "check"):
        setattr(dist.Store, name, _late(words, getattr(dist.Store, name)))
    loader.worker._worker_loop = _late(words, loader.worker._worker_loop)
    fetcher = loader.fetch._MapDatasetFetcher
    fetcher.fetch = _late(words, fetcher.fetch)


def dropped_messages() -> list[str]:
    """The messages so far whose handle was given up before anybody waited for it."""
    gc.collect()
    return [*_dropped]


class Pauses:
    """Within, every process below `ancestor` runs for only a share of the time, in slices drawn from a seed.

    This is what ranks are given on a machine with too much to do, without giving it that much.
    """

    def __init__(self, ancestor: int, share: float, seed: int) -> None:
        self._ancestor, self._share, self._random = psutil.Process(ancestor), share, random.Random(seed)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *exc: object) -> None:
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._over.wait(_SLICE):
            for process in self._below():
                _send(process, signal.SIGCONT if self._random.random() < self._share else signal.SIGSTOP)
        for process in self._below():
            _send(process, signal.SIGCONT)

    def _below(self) -> list[psutil.Process]:
        return self._ancestor.children(recursive=True)


def _send(process: psutil.Process, number: signal.Signals) -> None:
    with contextlib.suppress(psutil.NoSuchProcess):
        process.send_signal(number)
