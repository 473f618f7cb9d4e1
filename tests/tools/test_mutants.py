"""Mutants keep up with the code: each one still applies, and its tests exist. `scripts/mutants.sh` runs them."""

import pytest

from tests.mutants import REPOSITORY, Mutant, find, node_id, read

MUTANTS = read()


def test_there_are_enough_and_each_has_a_name():
    assert len([mutant for mutant in MUTANTS if mutant.killed_by]) >= 40
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS)
    files = {find(mutant).relative_to(REPOSITORY).as_posix() for mutant in MUTANTS}
    for part in ("balancing/experts", "balancing/sequences", "balancing/layers", "megatron/balanced"):
        assert any(file.startswith(part) for file in files), part


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_mutant_applies(mutant: Mutant):
    """Once, to Python that is Python afterwards."""
    assert mutant.old != mutant.new
    path = find(mutant)
    compile(path.read_text().replace(mutant.old, mutant.new), str(path), "exec")
    for test in mutant.killed_by:
        node_id(test)


def test_a_stale_mutant_is_named():
    stale = Mutant("a wait is removed", "no such text", "pass", "")
    with pytest.raises(ValueError, match=r"mutant 'a wait is removed' is stale: its old text stands 0 times"):
        find(stale)
    with pytest.raises(ValueError, match=r"stands [0-9]+ times"):
        find(Mutant("everywhere", "import torch", "pass", ""))
    with pytest.raises(ValueError, match="test_nothing_of_the_kind is there 0 times"):
        node_id("test_nothing_of_the_kind")
