"""What is replaced by name takes the calls of what it replaces, in every test, benchmark, script and example."""

import functools
import inspect
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.replaced import mismatch, replace_name
from tests.support.replaced_names import REPOSITORY, Replacement, replacements


def _original(lengths: Any, cluster: Any, /, shape: Any, *, method: str = "chunks") -> None: ...


@pytest.mark.parametrize(
    ("replacement", "why"),
    [
        (lambda *given, **named: None, ""),
        (lambda first, second, shape, method="": None, ""),
        (lambda first, second, /, shape, *, method="", more=0: None, ""),
        (lambda first, *given, **named: None, ""),
        # As benchmarks.together had it, after a caller gave the second argument by its place.
        (lambda lengths, **options: None, "takes no argument 2, 'cluster' of"),
        (lambda *given: None, "does not take 'shape' of"),
        (lambda first, second, form, method="": None, "takes 'form' where"),
        (lambda first, second, shape, method: None, "needs 'method', which"),
        (lambda first, second, shape, *, way, method="": None, "needs 'way', which"),
        (lambda first, second, shape, way, **named: None, "needs 'way', which"),
    ],
)
def test_a_replacement_takes_the_calls_of_the_original(replacement, why):
    owner = SimpleNamespace(plan=_original)
    if not why:
        replace_name(owner, "plan", replacement)
        assert owner.plan is replacement
        return
    with pytest.raises(ValueError, match=rf"SimpleNamespace\.plan cannot be replaced: .*{why}"):
        replace_name(owner, "plan", replacement)
    assert owner.plan is _original


def test_signatures_are_those_that_callers_see():
    @functools.wraps(_original)
    def wrapped(*given: Any) -> None: ...

    owner = SimpleNamespace(plan=wrapped, limit=3)
    with pytest.raises(ValueError, match="does not take 'shape'"):
        replace_name(owner, "plan", wrapped)
    with pytest.raises(ValueError, match="takes fewer arguments"):
        replace_name(SimpleNamespace(plan=lambda *given, **named: None), "plan", lambda one, **named: None)
    assert not mismatch(None, inspect.signature(_original)), "of a function in C"
    replace_name(owner, "limit", 4)
    with pytest.raises(AttributeError, match="most"):
        replace_name(owner, "most", 4)


def test_methods_and_classes_are_replaced_by_what_is_called_alike():
    class Owner:
        def run(self, batch: int) -> None: ...

        @staticmethod
        def of(name: str) -> None: ...

        def __init__(self, size: int) -> None: ...

    home = SimpleNamespace(Owner=Owner)
    replace_name(Owner, "run", lambda this, batch: None)
    replace_name(Owner, "of", staticmethod(lambda name: None))
    replace_name(home, "Owner", lambda size: None)
    with pytest.raises(ValueError, match=r"Owner\.run cannot be replaced"):
        replace_name(Owner, "run", lambda batch: None)
    with pytest.raises(ValueError, match="takes no argument 1, 'size'"):
        replace_name(SimpleNamespace(Owner=Owner), "Owner", lambda: None)


def test_monkeypatch_checks_signatures_too(monkeypatch):
    from balancing.sequences import plan

    original = plan.plan_sequences
    for target in ((plan, "plan_sequences"), ("balancing.sequences.plan.plan_sequences",)):
        with pytest.raises(ValueError, match="takes no argument 2, 'cluster'"):
            monkeypatch.setattr(*target, lambda lengths, **options: None)
        assert plan.plan_sequences is original
    monkeypatch.setattr("balancing.sequences.plan.plan_sequences", lambda *given, **named: None)
    assert plan.plan_sequences is not original


def _wrong(found: Replacement) -> str:
    """Why a replacement that stands in the source is refused, empty if it is not."""
    if found.replacement is None:
        return "its signature is known in the run alone; use replace_name of benchmarks.replaced"
    return mismatch(found.replacement, found.original)


@pytest.mark.parametrize("folder", ["tests", "benchmarks", "scripts", "examples"])
def test_nothing_is_replaced_by_what_is_called_otherwise(folder):
    found = [each for path in sorted((REPOSITORY / folder).rglob("*.py")) for each in replacements(path)]
    assert len(found) > 100 or folder != "tests", "they are found"
    if folder != "tests":  # a benchmark runs seldom
        assert not [f"{each.where}: {each.target}, without replace_name" for each in found]
    assert not [f"{each.where}: {each.target}: {why}" for each in found if (why := _wrong(each))]


def test_replacements_are_found_in_any_form(tmp_path, monkeypatch):
    monkeypatch.setattr("tests.support.replaced_names.REPOSITORY", tmp_path)
    path = Path(tmp_path, "made_up.py")
    path.write_text(
        "from functools import wraps\n"
        "from balancing.sequences import plan as plans\n"
        "from balancing.sequences.engine.transport import Pending\n"
        "def outer(named):\n"
        "    from megatron.balanced.sequences import planner\n"
        "    def planned(lengths, **options): ...\n"
        "    def counted(function):\n"
        "        def call(*given): ...\n"
        "        return call\n"
        "    planner.plan_sequences = planned\n"
        "    plans.plan_sequences, Pending.wait = counted(planned), lambda self: None\n"
        "    plans.plan_sequences = wraps(planned)(lambda: None)\n"
        "    setattr(planner, 'plan_sequences', named)\n"
        "    setattr(planner, named, planned)\n"
        "    planner._NUMBER = 3\n"
        "    planner._number = named\n"
        "    planner.plan_sequences = None\n"
        "    Pending.gone = planned\n"
    )
    found = {(int(each.where.partition(":")[2]), each.target.rpartition(".")[2]): _wrong(each)[:30]
             for each in replacements(path)}  # fmt: skip
    assert found == {
        (10, "plan_sequences"): "(lengths, **options) takes no ",
        (11, "plan_sequences"): "(*given) does not take 'length",
        (11, "wait"): "",
        (12, "plan_sequences"): "() takes no argument 1, 'lengt",
        (13, "plan_sequences"): "its signature is known in the ",
        (14, "*"): "its signature is known in the ",
        (15, "_NUMBER, which is not there"): "its signature is known in the ",
        (16, "_number, which is not there"): "its signature is known in the ",
        (18, "gone, which is not there"): "its signature is known in the ",
    }
