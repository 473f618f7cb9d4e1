"""Accesses that the CPU device carries out in the order of the program are ordered on a GPU, too."""

import pytest

from tests.support.checked_runs import RUNS, checked
from tests.support.fault_runs import changes_no_number, small
from tests.support.seeded_faults import FAULTS, SMALL_JOBS


@pytest.mark.parametrize("name", RUNS)
def test_accesses_are_ordered_between_streams(pool, name):
    assert not {race for rank in checked(pool, name) for race in rank.races}


@pytest.mark.parametrize("job", SMALL_JOBS)
def test_small_jobs_are_right_before_a_fault_is_planted(pool, job):
    assert not {race for _, noted in small(pool, job) for race in noted.races}


@pytest.mark.parametrize("name", [name for name, fault in FAULTS.items() if fault.checker == "races"])
def test_a_fault_between_streams_is_named(pool, name):
    fault = FAULTS[name]
    found = {race for _, noted in small(pool, fault.job, name) for race in noted.races}
    assert any(all(part in race for part in fault.named) for race in found), found
    assert changes_no_number(pool, name)


def _reads_beside(recorded: bool) -> list[str]:
    """Read on a second stream what is freed before anybody waits for it."""
    import torch

    from tests.support.noted_device import install
    from tests.support.stream_races import watch_streams

    races = watch_streams(install())
    beside = torch.cuda.Stream()
    given = torch.ones(4)
    beside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(beside):
        total = given.sum()
    if recorded:
        given.record_stream(beside)
    del given
    torch.ones(4)
    torch.cuda.current_stream().wait_stream(beside)
    assert total.item() == 4
    return races.found


def test_record_stream_keeps_memory(pool):
    (found,) = pool.run(1, _reads_beside, False)
    assert len(found) == 1
    assert found[0].startswith("freed on stream 0")
    assert pool.run(1, _reads_beside, True) == [[]]


def _crosses(how: str) -> list[str]:
    """Write on one stream, read on another, with or without something in between."""
    import torch

    from tests.support.noted_device import install
    from tests.support.stream_races import watch_streams

    races = watch_streams(install())
    first, second = torch.cuda.Stream(), torch.cuda.Stream()
    buffer = torch.zeros(8)
    first.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(first):
        buffer[:4] += 1
    event = first.record_event()
    if how == "event":
        second.wait_event(event)
    elif how == "early event":
        with torch.cuda.stream(first):
            buffer[:4] += 1
        second.wait_event(event)
    elif how == "host":
        event.synchronize()
    elif how == "device":
        torch.cuda.synchronize()
    elif how == "other bytes":
        buffer = buffer[4:]
        second.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(second):
        read = buffer * 2
    torch.cuda.synchronize()
    del read, buffer
    return races.found


@pytest.mark.parametrize(
    ("how", "right"),
    [
        ("nothing", False),
        ("early event", False),
        ("event", True),
        ("host", True),
        ("device", True),
        ("other bytes", True),
    ],
)
def test_what_orders_two_streams(pool, how, right):
    (found,) = pool.run(1, _crosses, how)
    assert (not found) is right, found
