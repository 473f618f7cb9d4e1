"""Runs with random delays everywhere have the same results as without, and no message is dropped.

A sample of what `python -m tests.support.chaos_runs` does with many seeds.
"""

import gc
import os
import time

import psutil
import pytest

from tests.support.chaos import Pauses
from tests.support.chaos_runs import Runs

SEED = 2026


@pytest.fixture(scope="module")
def runs(pool, tmp_path_factory) -> Runs:
    return Runs(pool, tmp_path_factory.mktemp("chaos"), 280)


@pytest.mark.parametrize(
    "job",
    [
        pytest.param("layers and sequences, interleaved", marks=pytest.mark.exhaustive),
        "experts, EP 4, buckets",
        "ranks leave, early exit",
        pytest.param("no balancer, PP 2, EP 2", marks=pytest.mark.exhaustive),
        pytest.param("ranks leave, all balancers", marks=pytest.mark.exhaustive),
    ],
)
@pytest.mark.limit(600)
def test_no_number_depends_on_who_is_late(runs, job):
    runs.check(job, SEED)


def _messages(dropped: bool) -> tuple[list[str], float]:
    """Send one to rank 1. Returns what was given up, and what rank 1 has received."""
    import torch
    import torch.distributed as dist

    from tests.support import chaos

    rank = int(os.environ["RANK"])
    chaos.install(SEED, rank)
    dist.init_process_group("gloo")
    number = torch.full((1,), float(rank))
    if rank == 0:
        number.fill_(7)
        work = dist.isend(number, 1)
        if dropped:
            del work
            gc.collect()
        else:
            assert work is not None
            work.wait()
    elif not dropped:
        dist.recv(number, 0)
    dist.barrier()
    return chaos.dropped_messages(), number.item()


def test_a_message_that_is_given_up_is_found(pool):
    """gloo loses it if its receiver is late, which no quiet machine shows."""
    (sent, _), (received, number) = pool.run(2, _messages, False)
    assert sent == received == [] and number == 7
    (sent, _), _ = pool.run(2, _messages, True)
    assert len(sent) == 1 and sent[0].startswith("send (1, 0) on ")


def _delays(seed: int, rank: int) -> list[float]:
    """The delays of this process' first operations."""
    import torch
    import torch.distributed as dist

    from tests.support import chaos

    dist.init_process_group("gloo")
    slept: list[float] = []
    sleep, time.sleep = time.sleep, slept.append  # type: ignore[assignment]
    try:
        chaos.install(seed, rank)
        for _ in range(100):
            dist.all_reduce(torch.zeros(1))
    finally:
        time.sleep = sleep
    return slept


def test_a_seed_gives_the_same_delays_again(pool):
    def delays(seed: int, rank: int) -> list[float]:
        return pool.run(1, _delays, seed, rank)[0]

    first = delays(1, 0)
    assert len(first) > 20 and max(first) > 10 * min(first)
    assert delays(1, 0) == first
    assert delays(2, 0) != first
    assert delays(1, 1) != first


def test_pauses_end():
    """Processes below this one are stopped, and go on afterwards."""
    child = psutil.Popen(["sleep", "1000"])
    try:
        with Pauses(os.getpid(), 0.0, SEED):
            while child.status() != psutil.STATUS_STOPPED:
                time.sleep(0.01)
        while child.status() == psutil.STATUS_STOPPED:
            time.sleep(0.01)
    finally:
        child.kill()
        child.wait()
