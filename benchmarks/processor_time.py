"""CPU time of a planner on a machine that does other work, too.

It is the CPU time of this thread, the least of several calls. Other processes and threads do not count.
"""

import time
from collections.abc import Callable

__all__ = ["milliseconds"]


def milliseconds(call: Callable[[], object], repeats: int) -> float:
    """Milliseconds of processor time of the quickest of `repeats` calls, after one that does not count."""
    call()
    spent = []
    for _ in range(repeats):
        begin = time.thread_time()
        call()
        spent.append(time.thread_time() - begin)
    return min(spent) * 1e3
