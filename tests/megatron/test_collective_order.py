"""Operations that gloo carries out in any order are started in one that NCCL carries out, too."""

import pytest

from tests.support.checked_runs import RUNS, checked
from tests.support.collective_order import replay


@pytest.mark.parametrize("name", RUNS)
def test_operations_meet_under_the_rules_of_nccl(pool, name):
    logs = [rank.operations for rank in checked(pool, name)]
    files = {file for log in logs for operation in log for file, _ in operation.where}
    missing = [name for name in RUNS[name].files if not any(file.endswith(name) for file in files)]
    assert not missing, "the run did not start what is to be checked"
    assert replay(logs) is None
