"""Small jobs on the pool, as they are and with a fault planted. Each is run once."""

import os
from typing import Any

import numpy as np

from tests.support.checkers import small_jobs
from tests.support.checkers.checked_runs import Noted
from tests.support.checkers.seeded_faults import FAULTS, SMALL_JOBS

__all__ = ["changes_no_number", "small"]


def run_small(job: str, fault: str | None) -> tuple[list[Any], Noted]:
    """The body of one rank: what a small job computes, and what is noted of it."""
    from tests.support.checkers.noted_device import install
    from tests.support.checkers.stream_races import watch_streams

    log = install()
    races = watch_streams(log)
    if fault is not None:
        FAULTS[fault].plant(log, int(os.environ["RANK"]))
    name, args = SMALL_JOBS[job]
    result = getattr(small_jobs, name)(*args)
    return result, Noted(log.operations, races.found)


_done: dict[tuple[str, str | None], list[tuple[list[Any], Noted]]] = {}


def small(pool: Any, job: str, fault: str | None = None) -> list[tuple[list[Any], Noted]]:
    """What the ranks of a small job compute, and what is noted of them."""
    if (job, fault) not in _done:
        _done[job, fault] = pool.run(small_jobs.RANKS[SMALL_JOBS[job][0]], run_small, job, fault)
    return _done[job, fault]


def changes_no_number(pool: Any, fault: str) -> bool:
    """Whether gloo forgives a fault."""
    ranks = zip(small(pool, FAULTS[fault].job), small(pool, FAULTS[fault].job, fault), strict=True)
    return all(np.array_equal(a, b) for (clean, _), (faulty, _) in ranks for a, b in zip(clean, faulty, strict=True))
