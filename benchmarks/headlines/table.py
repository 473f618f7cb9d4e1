"""Rows of headlines and their Markdown table."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks.headlines.data import HEADLINES, SETTINGS

__all__ = ["Row", "table"]

_HEADS = ("headline", "published", "how", "without", "its own method", "rival", "ours", "limit", "gain", "at most",
          "reached")  # fmt: skip


@dataclass(frozen=True)
class Row:
    """One line of the table.

    headline: of `HEADLINES`. how: simulated, modelled, counted or emulated. setting: of `SETTINGS`.
    times: of "none", "paper", "rival", "ours" and "limit", for each case, in `unit`; less is better.
    rival: its name. pick: the "mean" over cases, or the case of the "largest" gain.
    usual: a milder setting, which need not reach the headline. reason: why the headline is not reached.
    """

    headline: str
    how: str
    setting: str
    times: Mapping[str, Sequence[float]]
    rival: str
    unit: str = "s"
    pick: str = "mean"
    usual: bool = False
    reason: str = ""

    def _of(self, name: str) -> np.ndarray:
        return np.array(self.times[name], float)

    def _picked(self, values: np.ndarray) -> float:
        return float(values.mean() if self.pick == "mean" else values[self._gains("ours").argmax()])

    def _gains(self, name: str) -> np.ndarray:
        with np.errstate(divide="ignore"):
            return self._of(HEADLINES[self.headline].over) / self._of(name)

    def gain(self, name: str = "ours") -> float:
        """Times that this one of `times` is better than what the headline is over."""
        return self._picked(self._gains(name))

    @property
    def reached(self) -> bool:
        return round(self.gain(), 2) >= round(HEADLINES[self.headline].figure, 2)

    @property
    def fails(self) -> bool:
        """Whether the headline is missed for no reason that is known."""
        return not (self.usual or self.reached or self.reason)

    def cells(self) -> tuple[str, ...]:
        """The line, in the order of `_HEADS`."""
        shown = {name: f"{self._picked(self._of(name)):.3g} {self.unit}".strip() for name in self.times}
        most = self.gain("limit")
        verdict = "usual" if self.usual else "yes" if self.reached else f"no: {self.reason}"
        return (
            self.headline, str(HEADLINES[self.headline]), f"{self.how}, {self.setting}", shown["none"], shown["paper"],
            f"{shown['rival']} ({self.rival})", shown["ours"], shown["limit"], f"{self.gain():.2f}",
            "no bound" if math.isinf(most) else f"{most:.2f}", verdict,
        )  # fmt: skip


def table(rows: Sequence[Row]) -> str:
    """The rows as a Markdown table, and their settings below it."""
    lines = [_HEADS, *(row.cells() for row in rows)]
    widths = [max(len(line[at]) for line in lines) for at in range(len(_HEADS))]
    shown = ["| " + " | ".join(map(str.ljust, line, widths)) + " |" for line in lines]
    shown.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    used = {row.setting for row in rows}
    return "\n".join([*shown, "", *(f"- **{name}**: {text}" for name, text in SETTINGS.items() if name in used)])
