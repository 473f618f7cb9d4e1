"""Few rows of a table that together have every pair, or triple, of values of its axes.

A greedy set cover over all rows that can be. Of libraries, allpairspy leaves out 35 possible pairs where values exclude
each other as they do in `tests.support.structures`.
"""

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

__all__ = ["Axes", "Conditions", "covering"]

Axes = Mapping[str, tuple[Any, ...]]  # name -> values
Conditions = Sequence[tuple[tuple[str, ...], Callable[[Any], bool]]]  # axes, and what must hold for their values


def covering(axes: Axes, conditions: Conditions, strength: int) -> list[dict[str, Any]]:
    """Rows that together have every tuple of `strength` values of different axes that some row can have."""
    sizes = [len(values) for values in axes.values()]
    candidates = np.argwhere(_possible(axes, conditions))  # [row, axis]
    # Numbers of the tuples that each row has, a column for each set of axes, unique over all columns.
    columns, starts = [], [0]
    for chosen in itertools.combinations(range(len(sizes)), strength):
        numbers = np.ravel_multi_index(candidates[:, chosen].T, [sizes[axis] for axis in chosen])
        columns.append((starts[-1] + numbers).astype(np.int32))
        starts.append(starts[-1] + math.prod(sizes[axis] for axis in chosen))
    missing = np.zeros(starts[-1], bool)
    for column in columns:
        missing[column] = True
    random = np.random.default_rng(0)
    table = []
    while missing.any():
        # A sample of the rows that have the first missing tuple: the best of all rows is hardly better.
        first = np.argmax(missing)
        having = np.flatnonzero(columns[np.searchsorted(starts, first, "right") - 1] == first)
        sample = random.choice(having, min(2000, len(having)), replace=False)
        tuples = np.stack([column[sample] for column in columns], axis=1)
        best = np.argmax(missing[tuples].sum(axis=1))
        missing[tuples[best]] = False
        table.append({axis: axes[axis][value] for axis, value in zip(axes, candidates[sample[best]], strict=True)})
    return table


def _possible(axes: Axes, conditions: Conditions) -> np.ndarray:
    """bool, a dimension for each axis: which rows meet all conditions."""
    names, shape = list(axes), [len(values) for values in axes.values()]
    possible = np.ones(shape, bool)
    for named, condition in conditions:
        asked = sorted(named, key=names.index)
        parts = itertools.product(*(axes[axis] for axis in asked))
        holds = np.array([condition(dict(zip(asked, part, strict=True))) for part in parts])
        possible &= holds.reshape([size if name in asked else 1 for name, size in zip(names, shape, strict=True)])
    return possible
