"""Operations that gloo carries out in any order are started in one that NCCL carries out, too."""

import pytest

from tests.support.checked_runs import RUNS, checked
from tests.support.collective_order import replay
from tests.support.fault_runs import changes_no_number, small
from tests.support.seeded_faults import FAULTS, SMALL_JOBS


@pytest.mark.parametrize("name", RUNS)
def test_operations_meet_under_the_rules_of_nccl(pool, name):
    logs = [rank.operations for rank in checked(pool, name)]
    files = {file for log in logs for operation in log for file, _ in operation.where}
    missing = [name for name in RUNS[name].files if not any(file.endswith(name) for file in files)]
    assert not missing, "the run did not start what is to be checked"
    assert replay(logs) is None


@pytest.mark.parametrize("job", SMALL_JOBS)
def test_small_jobs_are_right_before_a_fault_is_planted(pool, job):
    assert replay([noted.operations for _, noted in small(pool, job)]) is None


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
