"""Orders that a CPU forgives and a GPU does not: of operations in a communicator, and of accesses on several streams.

Each run is made once and checked for both.
"""

import pytest

from tests.support.checkers.checked_runs import RUNS, checked
from tests.support.checkers.collective_order import replay
from tests.support.checkers.device_log import Operation
from tests.support.checkers.fault_runs import changes_no_number, small
from tests.support.checkers.seeded_faults import FAULTS, SMALL_JOBS
from tests.support.sampled import sampled

# Runs that every test run makes; the others are left to --exhaustive.
SAMPLE = (
    "experts, resident slots, many buckets, both overlaps",
    "early exit, moved and released",
)
NAMES = sampled(RUNS, *SAMPLE)


@pytest.mark.parametrize("name", NAMES)
def test_operations_meet_under_the_rules_of_nccl(pool, name):
    logs = [rank.operations for rank in checked(pool, name)]
    files = {file for log in logs for operation in log for file, _ in operation.where}
    missing = [name for name in RUNS[name].files if not any(file.endswith(name) for file in files)]
    assert not missing, "the run did not start what is to be checked"
    assert replay(logs) is None


_OURS = ("/balancing/", "/megatron/balanced/")
_OF_STEPS = tuple(f"megatron/core/{part}/" for part in ("pipeline_parallel", "distributed", "optimizer"))


def _connected_late(log: list[Operation]) -> list[Operation]:
    """The operations of a rank that connect ranks for messages of balancers once training has begun, but for those of
    a release."""
    late, trains, released = [], False, False
    known: set[tuple[str, int | None]] = set()  # communicators, and pairs in them, that have been connected
    for operation in log:
        files = [file for file, _ in operation.where]
        trains |= any(part in files[0] for part in _OF_STEPS)
        released |= any(file.endswith("trainer/release.py") for file in files)
        connects = files[0].endswith("balancing/messages.py") and operation.kind != "all_to_all_single"
        meets = {(operation.comm, message.peer) for message in operation.messages} or {(operation.comm, None)}
        is_ours = any(part in files[0] for part in _OURS) and not operation.on_host
        if is_ours and (trains and not released if connects else meets - known):
            late.append(operation)
        if connects or not operation.messages:
            known |= meets
    return late


@pytest.mark.parametrize("name", NAMES)
def test_nothing_connects_while_training(pool, name):
    """NCCL would take memory that nobody has counted, and the hosts of two ranks would wait for each other."""
    for rank in checked(pool, name):
        assert [str(operation) for operation in _connected_late(rank.operations)] == []


def test_turns_are_posted_between_modules(pool):
    """One queue serves all streams of these runs (CUDA_DEVICE_MAX_CONNECTIONS=1)."""
    name = "experts, resident slots, many buckets, both overlaps"
    calls = {operation.where for rank in checked(pool, name) for operation in rank.operations}
    posted = [where for where in calls if where[1][0].endswith("engine/posting.py")]
    directions = {line for where in posted for file, line in where[2:] if file.endswith("experts/gradients.py")}
    assert len(directions) == 2, "forward and backward"


def test_all_transfers_of_replicas_share_a_stream(pool):
    """torch has 32 streams, from which NCCL's communicators take theirs, too: one more for each transfer, and transfers
    would wait for what has nothing to do with them."""
    ranks = checked(pool, "experts, resident slots, many buckets, both overlaps")
    assert [rank.streams for rank in ranks] == [1] * 4


@pytest.mark.parametrize("job", SMALL_JOBS)
def test_small_jobs_are_right_before_a_fault_is_planted(pool, job):
    notes = [noted for _, noted in small(pool, job)]
    assert replay([noted.operations for noted in notes]) is None
    assert not {race for noted in notes for race in noted.races}


@pytest.mark.parametrize("name", [name for name, fault in FAULTS.items() if fault.checker == "order"])
def test_a_fault_in_the_order_is_named(pool, name):
    fault = FAULTS[name]
    found = replay([noted.operations for _, noted in small(pool, fault.job, name)])
    assert found is not None
    assert all(part in found for part in fault.named), found
    assert changes_no_number(pool, name)


def test_kernels_side_by_side_do_not_wait_for_each_other(pool):
    """What two communicators do in different order is a fault only where their kernels take turns."""
    logs = [noted.operations for _, noted in small(pool, "layers", "two communicators in another order")]
    assert replay(logs, "streams") is None
    assert replay(logs, "one queue") is None
    assert replay(logs, "one kernel") is not None


@pytest.mark.parametrize("name", NAMES)
def test_accesses_are_ordered_between_streams(pool, name):
    assert not {race for rank in checked(pool, name) for race in rank.races}


@pytest.mark.parametrize("name", [name for name, fault in FAULTS.items() if fault.checker == "races"])
def test_a_fault_between_streams_is_named(pool, name):
    fault = FAULTS[name]
    found = {race for _, noted in small(pool, fault.job, name) for race in noted.races}
    assert any(all(part in race for part in fault.named) for race in found), found
    assert changes_no_number(pool, name)


def _reads_beside(recorded: bool) -> list[str]:
    """Read on a second stream what is freed before anybody waits for it."""
    import torch

    from tests.support.checkers.noted_device import install
    from tests.support.checkers.stream_races import watch_streams

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

    from tests.support.checkers.noted_device import install
    from tests.support.checkers.stream_races import watch_streams

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
