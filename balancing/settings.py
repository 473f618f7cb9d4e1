"""User settings as fields of frozen dataclasses.

A field holds its help text and its range. Frequently used settings also name a command-line flag. All settings can be
given in Python and in a file for `pretrain_gpt.py --balance-config`.
"""

import dataclasses
import math
from collections.abc import Collection
from typing import Any

__all__ = ["SettingError", "check_settings", "setting"]


class SettingError(ValueError):
    """A config refuses a value. name: the field. why: a clause whose subject is the value."""

    def __init__(self, name: str, value: object, why: str) -> None:
        super().__init__(f"{name} {value} {why}")
        self.name, self.value, self.why = name, value, why

    def __reduce__(self) -> tuple[type, tuple[str, object, str]]:
        return type(self), (self.name, self.value, self.why)


def setting(
    default: object,
    explanation: str,
    *,
    flag: str | None = None,
    metavar: str | None = None,
    choices: Collection[str] = (),
    needs: str | None = None,
    **bounds: float,
) -> Any:
    """A field of a config.

    flag: the command-line flag, if there is one, such as "--balance-experts".
    metavar: the name of the flag's value in the help text.
    choices: the values that a string may have, such as the keys of a dict of planners.
    needs: another field without which this field has no effect. Callers check it.
    bounds: limits of a number. `least` and `most` are allowed values, `above` and `below` are not. None is always
        allowed.
    """
    assert bounds.keys() <= {"least", "most", "above", "below"}, bounds
    given = {"help": explanation, "flag": flag, "metavar": metavar, "choices": choices, "needs": needs}
    return dataclasses.field(default=default, metadata=given | {"bounds": bounds})


def check_settings(config: Any) -> None:
    """Raise SettingError for the first field of `config` with a value out of range or not among its choices."""
    for field in dataclasses.fields(config):
        value, choices = getattr(config, field.name), field.metadata.get("choices")
        if choices and value not in choices:
            raise SettingError(field.name, value, f"is none of {', '.join(choices)}")
        bounds = field.metadata.get("bounds")
        if bounds and value is not None and not _within(value, **bounds):
            finite = "" if math.isfinite(value) else ", and finite"
            raise SettingError(field.name, value, f"must {_range(**bounds)}{finite}")


def _within(
    value: float,
    least: float = float("-inf"),
    most: float = float("inf"),
    above: float = float("-inf"),
    below: float = float("inf"),
) -> bool:
    """Whether a number is within its bounds. Numbers that are not finite never are."""
    return above < value < below and least <= value <= most


def _range(
    least: float | None = None, most: float | None = None, above: float | None = None, below: float | None = None
) -> str:
    """Bounds in words."""
    if least is not None and most is not None:
        return f"lie between {least} and {most}"
    words = {"at least": least, "above": above, "at most": most, "below": below}
    return "be " + " and ".join(f"{word} {bound}" for word, bound in words.items() if bound is not None)
