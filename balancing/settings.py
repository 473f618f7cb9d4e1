"""Settings: what users can set, as fields of frozen dataclasses.

A field holds its help and its range. Those that users decide often have a flag, whose name stands at the field; all can
be given in Python, and in a file of `pretrain_gpt.py --balance-config`.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

__all__ = ["SettingError", "check_settings", "setting"]


class SettingError(ValueError):
    """A value that a config refuses. name: its field. why: a clause whose subject is the value."""

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
    choices: Sequence[str] = (),
    needs: str | None = None,
    **bounds: float,
) -> Any:
    """A field of a config.

    flag: its flag on the command line, if it has one, such as "--balance-experts"; metavar: its value there.
    choices: the values that a text may have.
    needs: the field without which this one has no effect, for those who check that.
    bounds: of a number: `least` and `most` are allowed values, `above` and `below` are not. None is in all bounds.
    """
    assert bounds.keys() <= {"least", "most", "above", "below"}, bounds
    given = {"help": explanation, "flag": flag, "metavar": metavar, "choices": list(choices), "needs": needs}
    return dataclasses.field(default=default, metadata=given | {"bounds": bounds})


def check_settings(config: Any) -> None:
    """Raise SettingError for the first field of a config that is out of its range."""
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
    """Whether a number is in its bounds, as one that is not finite never is."""
    return above < value < below and least <= value <= most


def _range(
    least: float | None = None, most: float | None = None, above: float | None = None, below: float | None = None
) -> str:
    """Bounds in words."""
    if least is not None and most is not None:
        return f"lie between {least} and {most}"
    words = {"at least": least, "above": above, "at most": most, "below": below}
    return "be " + " and ".join(f"{word} {bound}" for word, bound in words.items() if bound is not None)
