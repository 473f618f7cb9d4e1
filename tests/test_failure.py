"""A rank that dies or freezes: the others stop within the timeout and name it."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from training import MOCK_DATA, MODEL

ROOT = Path(__file__).parent.parent
WORLD_SIZE = 3


class Job:
    """Ranks started by hand: a launcher would stop the others itself, before they can speak."""

    def __init__(self, directory: Path) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        flags = [*MODEL, *MOCK_DATA, "--train-iters", "100000", "--log-interval", "1"]
        self.logs = [directory / f"rank-{rank}.log" for rank in range(WORLD_SIZE)]
        self.ranks = []
        for rank, log in enumerate(self.logs):
            place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": WORLD_SIZE, "LOCAL_WORLD_SIZE": WORLD_SIZE}
            place |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": 1}
            self.ranks.append(
                subprocess.Popen(
                    [sys.executable, ROOT / "pretrain_gpt.py", *flags, "--global-batch-size", str(WORLD_SIZE)],
                    env=os.environ | {name: str(value) for name, value in place.items()},
                    stdout=log.open("wb"),
                    stderr=subprocess.STDOUT,
                )
            )

    def wait_for_iteration(self, number: int) -> None:
        deadline = time.monotonic() + 120
        while f"iteration {number:8d}/" not in self.logs[-1].read_text():
            assert time.monotonic() < deadline, f"training did not start:\n{self.logs[-1].read_text()[-2000:]}"
            assert all(rank.poll() is None for rank in self.ranks), self.logs[0].read_text()[-2000:]
            time.sleep(0.2)


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    job = Job(tmp_path)
    yield job
    for rank in job.ranks:
        rank.kill()
        rank.wait()


def test_the_rank_that_died_is_named(job: Job) -> None:
    victim = 1
    job.wait_for_iteration(3)
    job.ranks[victim].send_signal(signal.SIGKILL)
    survivors = [rank for rank in range(WORLD_SIZE) if rank != victim]
    codes = [job.ranks[rank].wait(timeout=90) for rank in survivors]
    assert all(codes), f"exit codes {codes} of ranks that could not go on"
    told = "".join(job.logs[rank].read_text() for rank in survivors)
    assert told.count("pretrain_gpt.py: error:") == 1
    assert f"rank {victim} died or stopped answering" in told
