"""A stalled job: every rank reports its state, and one line explains which rank waits for which."""

import json
import math
import os
import re
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from megatron.balanced.watchdog.operations import COLLECTIVE, key_of
from megatron.balanced.watchdog.waiting import Answer, Group, Started, explain_stall

from tests.support.training import MOCK_DATA, MODEL, RankRun, train_rank

STOPPED_AT = 2  # iteration


def _stops(argv: list[str], folder: Path) -> RankRun:
    """Rank 1 does nothing in an iteration until the stall is reported."""
    from megatron.balanced.callbacks import StepCallback
    from megatron.balanced.watchdog import operations, stall

    stopped, report = folder / "stopped", folder / "stall.txt"
    main = threading.get_ident()

    class Stop(StepCallback):
        def begin_step(self, iteration: int, config: Any) -> None:
            if iteration == STOPPED_AT and os.environ["RANK"] == "1":
                started = {name: dict(log.started) for name, log in operations.logs.items()}
                stopped.with_suffix(".partial").write_text(json.dumps(started))
                stopped.with_suffix(".partial").rename(stopped)
                while not report.exists():
                    time.sleep(0.05)

    def limit(watch: Any) -> float:
        """Rank 0 counts its step as stalled once it waits for an operation that the rank that stopped has not started.

        Other waits end by themselves, on a busy machine later than this looks.
        """
        waits = operations.waiting_for(main)
        if os.environ["RANK"] != "0" or watch._moment != (STOPPED_AT, True) or waits is None or not stopped.exists():
            return math.inf
        name, operation = waits
        return 0.0 if operation.number > json.loads(stopped.read_text())[name].get(operation.key, 0) else math.inf

    stall._LOOK_SECONDS = 0.05
    stall._Watch._limit = limit  # type: ignore[method-assign]
    return train_rank(argv, False, callbacks=[Stop()])


def test_a_rank_that_stops_is_told(pool, tmp_path):
    argv = [*MODEL, *MOCK_DATA, "--balance-report", str(tmp_path)]
    ranks = pool.run(2, _stops, argv, tmp_path)
    assert all(len(rank.losses) == 4 for rank in ranks), "the job goes on undisturbed"
    (line,) = (tmp_path / "stall.txt").read_text().splitlines()
    assert line.startswith("> iteration 3 stands still for ")
    assert "rank 0 waits in " in line and "called at megatron/" in line
    assert "rank 1 has not started it: its last operation there is " in line
    assert re.search(r"rank 1 waits for no other: it is at \S*test_stall.py:\d+ in begin_step$", line)
    assert line in pool.output[0]
    for rank in range(2):
        report = (tmp_path / f"stall-rank{rank}.txt").read_text()
        assert report.startswith(f"> rank {rank} in iteration 3, at ")
        assert "thread MainThread:" in report and "in train_step" in report
        assert "last operations on " in report and "s ago, at " in report
        assert report in pool.output[rank]
    assert "in begin_step" in (tmp_path / "stall-rank1.txt").read_text()


def _one(kind: str, number: int, key: str = COLLECTIVE, *, sizes: Any = ((4,),), age: float = 60.0) -> Started:
    return Started(kind, key, number, sizes, f"/x/y/z/{kind}.py:{number}", age)


def _group(ranks: list[int], *last: Started, name: str = "DATA") -> Group:
    started: dict[str, int] = {}
    for operation in last:
        started[operation.key] = max(operation.number, started.get(operation.key, 0))
    return Group(name, ranks, started, last)


def _at(line: int, groups: dict[str, Group], waits: tuple[str, Started] | None = None) -> Answer:
    return Answer(f"at.py:{line}", waits, groups)


def test_the_chain_ends_at_who_waits_for_nobody():
    """Rank 3 waits for rank 2 in a collective, rank 2 for a message of rank 0, which does something else."""
    gather, before, receive = _one("allgather", 412), _one("allreduce", 411), _one("recv", 7, key_of("recv", 0, 5))
    data, pipe = [1, 2, 3], [0, 2]
    answers = {
        0: _at(10, {"p": _group(pipe, _one("send", 6, key_of("send", 2, 5)))}),
        1: _at(11, {"d": _group(data, before, gather)}),
        2: _at(12, {"d": _group(data, before), "p": _group(pipe, receive, name="PIPELINE")}),
        3: _at(13, {"d": _group(data, before, gather)}, ("d", gather)),
    }
    assert explain_stall(answers, range(4), 3) == (
        "rank 3 waits in allgather #412 of DATA (ranks 1, 2, 3), called at y/z/allgather.py:412; rank 1 has started "
        "it, rank 2 has not: its last operation there is allreduce #411, called at y/z/allreduce.py:411; "
        "rank 2 waits in recv #7 of PIPELINE (ranks 0, 2), called at y/z/recv.py:7; rank 0 has not started it: "
        "its last operation there is send #6, called at y/z/send.py:6; rank 0 waits for no other: it is at at.py:10"
    )


def test_messages_meet_by_rank_and_tag():
    """A message with another tag is not the one that is waited for."""
    receive = _one("recv", 1, key_of("recv", 0, 5))
    answers = {
        0: _at(10, {"p": _group([0, 1], _one("send", 1, key_of("send", 1, 6)))}),
        1: _at(11, {"p": _group([0, 1], receive)}, ("p", receive)),
    }
    assert "rank 0 has not started it" in explain_stall(answers, range(2), 0)
    answers[0] = _at(10, {"p": _group([0, 1], _one("send", 1, key_of("send", 1, 5)))})
    assert explain_stall(answers, range(2), 1).startswith("no rank waits for an operation that another has not started")


def test_a_circle():
    one, other = _one("allreduce", 1), _one("broadcast", 1)
    answers = {
        0: _at(10, {"a": _group([0, 1], one, name="A")}, ("a", one)),
        1: _at(11, {"b": _group([0, 1], other, name="B")}, ("b", other)),
    }
    report = explain_stall(answers, range(2), 0)
    assert "it has started none there; rank 1 waits in broadcast #1 of B" in report
    assert report.endswith("rank 0 again: a circle")


def test_a_rank_without_an_answer():
    reduce = _one("allreduce", 3)
    report = explain_stall({0: _at(10, {"a": _group([0, 1], reduce)})}, range(2), 0)
    assert report.endswith("rank 1 has not started it: it does not answer")


@pytest.mark.parametrize("change", [{"kind": "broadcast"}, {"sizes": ((5,),)}])
def test_different_operations_met(change):
    reduce = _one("allreduce", 3)
    other = reduce._replace(**change)
    answers = {0: _at(10, {"a": _group([0, 1], reduce)}), 1: _at(11, {"a": _group([0, 1], other)})}
    report = explain_stall(answers, range(2), 0)
    assert report.startswith("on DATA (ranks 0, 1) rank 0 started allreduce #3") and "where rank 1 started" in report


def test_pieces_of_different_length_may_meet():
    """What each rank gives to an exchange is its own matter."""
    exchange = _one("all_to_all_single", 3)
    answers = {
        0: _at(10, {"a": _group([0, 1], exchange)}),
        1: _at(11, {"a": _group([0, 1], exchange._replace(sizes=((9,),)))}),
    }
    assert explain_stall(answers, range(2), 0).endswith("rank 0: at.py:10; rank 1: at.py:11")


def test_on_a_gpu_the_first_that_others_have_not_started_counts():
    """The host does not know which operation its device waits in."""
    early, late = _one("allreduce", 1, age=50.0), _one("broadcast", 1, age=40.0)
    answers = {
        0: _at(10, {"b": _group([0, 2], late, name="B"), "a": _group([0, 1], early, name="A")}),
        1: _at(11, {}),
        2: _at(12, {}),
    }
    assert explain_stall(answers, range(3), 2).startswith("rank 0 waits in allreduce #1 of A (ranks 0, 1)")
