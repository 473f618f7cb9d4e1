"""Accesses that the CPU device carries out in the order of the program are ordered on a GPU, too."""

import pytest

from tests.support.checked_runs import RUNS, checked


@pytest.mark.parametrize("name", RUNS)
def test_accesses_are_ordered_between_streams(pool, name):
    assert not {race for rank in checked(pool, name) for race in rank.races}
