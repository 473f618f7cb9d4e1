"""Flags that a feature cannot live with: how each check lists them, and the one line that refuses.

A row of such a list has the name among the arguments, the value that is fine or a tuple of them, what the flag does
with any other ("which ..."), and the way out. None, False, 0 and nothing at all count as one value: the flag is off.
"""

import argparse
from collections.abc import Iterable

__all__ = ["Contradiction", "refuse", "shown"]

Contradiction = tuple[str, object, str, str]


def refuse(args: argparse.Namespace, feature: str, rows: Iterable[Contradiction]) -> None:
    """Raise ValueError for the first flag that contradicts `feature`, named as on the command line."""
    for name, fine, why, instead in rows:
        values = fine if isinstance(fine, tuple) else (fine,)
        value = getattr(args, name, values[0])
        if value not in values and (value or all(values)):
            raise ValueError(f"{feature} contradicts {shown(name, value)}, which {why}; {instead}")


def shown(name: str, value: object) -> str:
    """A flag as a user gives it."""
    given = " ".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)
    return "--" + name.replace("_", "-") + ("" if value is True else f" {given}")
