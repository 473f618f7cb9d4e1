"""Families of tests of which a few members always run, and all of them with --exhaustive."""

from collections.abc import Iterable
from typing import Any

import pytest

__all__ = ["sampled"]


def sampled(cases: Iterable[Any], *always: Any) -> list[Any]:
    """Parameters of a test. Cases that are not in `always` run with --exhaustive, and by chance with --sample.

    A case of several parameters is a tuple. Raises AssertionError for a case of `always` that there is not.
    """
    cases = list(cases)
    missing = [case for case in always if case not in cases]
    assert not missing, f"not among the cases: {missing}"
    return [
        pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=marks)
        for case in cases
        for marks in [() if case in always else pytest.mark.exhaustive]
    ]
