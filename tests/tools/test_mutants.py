"""Mutants keep up with the code: each one still applies, and its tests exist. `scripts/mutants.sh` runs them."""

import ast

import pytest

from tests.mutants import REPOSITORY, Mutant, find, mutated, node_id, read

MUTANTS = read()


def test_they_are_few_and_each_has_a_name():
    assert 0 < len(MUTANTS) <= 42 and all(mutant.killed_by for mutant in MUTANTS)
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS)
    files = {find(mutant).relative_to(REPOSITORY).as_posix() for mutant in MUTANTS}
    for part in ("balancing/experts", "balancing/sequences", "megatron/balanced/layers", "megatron/balanced/experts"):
        assert any(file.startswith(part) for file in files), part


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_mutant_applies(mutant: Mutant):
    """Once, to Python that is Python afterwards."""
    path = find(mutant)
    compile(mutated(mutant, path.read_text()), str(path), "exec")
    for test in mutant.killed_by:
        node_id(test)


SOURCE = """
class Slots:
    def acquire(self):
        self.wait(1)
        if self.open:
            done = first + second
            return done
"""


def _mutant(at="Slots.acquire", **fault):
    return Mutant("a fault", at, "", (), **fault)


@pytest.mark.parametrize(
    "fault, old, new",
    [
        ({"drop": "self.wait"}, "self.wait(1)", "pass"),
        ({"drop": "done"}, "done = first + second", "pass"),
        ({"change": ("first + second", "first")}, "first + second", "first"),
    ],
)
def test_what_a_mutant_changes(fault, old, new):
    assert mutated(_mutant(**fault), SOURCE) == ast.unparse(ast.parse(SOURCE.replace(old, new)))


def test_a_stale_mutant_is_named():
    for fault in ({"drop": "self.close"}, {"change": ("self", "other")}):
        with pytest.raises(ValueError, match=r"mutant 'a fault' is stale: Slots.acquire has self.* [02] times"):
            mutated(_mutant(**fault), SOURCE)
    with pytest.raises(ValueError, match=r"mutant 'a fault' is stale: Nobody.knows stands 0 times"):
        find(_mutant("Nobody.knows", drop="pass"))
    with pytest.raises(ValueError, match="test_nothing_of_the_kind is there 0 times"):
        node_id("test_nothing_of_the_kind")
