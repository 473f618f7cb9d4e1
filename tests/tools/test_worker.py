"""A process that computes for another: it answers, says what failed, and does not outlive the one that asks."""

import os
import pickle
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

from balancing.process import is_alive, start_time
from balancing.worker import Worker
from tests.support.patience import PATIENCE
from tests.support.pool import REPOSITORY


@pytest.fixture(scope="module")
def worker():
    return Worker()


def test_it_answers_from_another_process(worker):
    there = worker.call(os.getpid)
    assert there != os.getpid() and worker.call(os.getpid) == there
    assert worker.call(sorted, [3, 1, 2], reverse=True) == [3, 2, 1]
    large = np.arange(1 << 20)  # more than a pipe holds
    assert np.array_equal(worker.call(np.flip, large), large[::-1])


def test_threads_take_turns(worker):
    found: dict[int, float] = {}
    threads = [threading.Thread(target=lambda n=n: found.update({n: worker.call(abs, -n)})) for n in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    assert found == {n: n for n in range(20)}


def test_what_fails_there_is_told_and_what_is_printed_is_no_answer(worker):
    with pytest.raises(RuntimeError, match=r"(?s)in process \d+, which plans:.*ValueError: .*'four'"):
        worker.call(int, "four")
    assert worker.call(print, "no answer") is None
    assert worker.call(abs, -4) == 4


def test_what_cannot_be_sent_is_told_and_harms_no_later_call(worker):
    with pytest.raises((pickle.PicklingError, AttributeError)):
        worker.call(abs, lambda: None)
    with pytest.raises(RuntimeError, match=r"(?s)which plans:.*pickle"):
        worker.call(eval, "lambda: None")
    assert worker.call(abs, -4) == 4


def test_an_interrupted_call_leaves_no_answer_to_the_next_one(monkeypatch):
    worker = Worker()

    def interrupt(pipe: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(pickle, "load", interrupt)
        worker.call(abs, -4)
    assert worker.call(abs, -5) == 5


@pytest.mark.parametrize(
    "number, told", [(signal.SIGKILL, "ended with code -9"), (signal.SIGSTOP, "has not answered for 2 seconds")]
)
@pytest.mark.parametrize("size", [1, 1 << 20], ids=["small", "more than a pipe holds"])
def test_a_process_that_ends_or_stops_is_told_and_the_rank_plans_itself(monkeypatch, capsys, number, told, size):
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setattr("balancing.worker._ANSWER_SECONDS", 2)
    worker, asked = Worker(), np.arange(size)
    there = worker.call(os.getpid)
    os.kill(there, number)
    assert np.array_equal(worker.call(np.flip, asked), asked[::-1])
    assert worker.call(os.getpid) == os.getpid()
    (line,) = capsys.readouterr().out.splitlines()
    assert line == f"> rank 3: process {there}, which plans, {told}; this rank makes its plans itself from now on"


def test_a_process_that_ends_within_its_answer_is_no_answer(monkeypatch):
    worker = Worker()

    def cut(pipe: object) -> None:
        raise pickle.UnpicklingError("pickle data was truncated")

    worker._process.kill()
    with monkeypatch.context() as patched:
        patched.setattr(pickle, "load", cut)
        assert worker.call(abs, -4) == 4


@pytest.mark.parametrize("number", [None, signal.SIGINT, signal.SIGKILL])
def test_it_ends_with_the_one_that_asks(number):
    """By itself, by Ctrl-C in a terminal, which goes to both processes, or killed."""
    code = "import os, sys; from balancing.worker import Worker; worker = Worker(); "
    code += "print(worker.call(os.getpid), flush=True); sys.stdin.read()"
    asks = subprocess.Popen(
        [sys.executable, "-c", code], cwd=REPOSITORY, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, text=True, start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )  # fmt: skip
    there = int(asks.stdout.readline())
    began = start_time(there)
    if number is not None:
        os.killpg(asks.pid, number) if number == signal.SIGINT else asks.kill()
    _, said = asks.communicate(timeout=PATIENCE)
    deadline = time.monotonic() + PATIENCE
    while is_alive(there, began):
        assert time.monotonic() < deadline, "it goes on alone"
        time.sleep(0.05)
    assert "balancing/worker.py" not in said, said
