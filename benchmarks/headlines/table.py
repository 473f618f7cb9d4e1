"""Rows of headlines and their Markdown tables, one for each question of a reader."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks.headlines.data import HEADLINES, NAMES, QUESTIONS, SETTINGS

__all__ = ["Row", "table"]

_HEADS = ("headline", "published", "how", "without", "its own method", "rival", "ours, limit", "gain, at most")


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
    def missed(self) -> bool:
        return not (self.usual or self.reached)

    @property
    def fails(self) -> bool:
        """Whether the headline is missed for no reason that is known."""
        return self.missed and not self.reason

    def cells(self) -> tuple[str, ...]:
        """The line, in the order of `_HEADS`."""
        shown = {name: f"{self._picked(self._of(name)):.3g} {self.unit}".strip() for name in self.times}
        most = self.gain("limit")
        bound = ", no bound" if math.isinf(most) else f" of {most:.2f}"
        verdict = "usual" if self.usual else "reached" if self.reached else "missed"
        return (
            self.headline, str(HEADLINES[self.headline]), f"{self.how}, {NAMES[self.setting]}", shown["none"],
            shown["paper"], f"{shown['rival']} ({self.rival})", f"{shown['ours']}, {shown['limit']}",
            f"{self.gain():.2f}{bound}, {verdict}",
        )  # fmt: skip


def table(rows: Sequence[Row]) -> str:
    """The rows as Markdown: for each of `QUESTIONS` a table, why headlines are missed, and the settings."""
    asked = ((text, [row for row in rows if row.setting.startswith(letter)]) for letter, text in QUESTIONS.items())
    return "\n\n".join(_section(question, own) for question, own in asked if own)


def _section(question: str, rows: Sequence[Row]) -> str:
    lines = [_HEADS, *(row.cells() for row in rows)]
    widths = [max(len(line[at]) for line in lines) for at in range(len(_HEADS))]
    shown = ["| " + " | ".join(map(str.ljust, line, widths)) + " |" for line in lines]
    shown.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    missed: dict[str, list[str]] = {}
    for row in rows:
        if row.missed:
            missed.setdefault(row.reason, []).append(f"{row.headline}, {row.how}")
    reasons = [f"- Missed, {reason}: {'; '.join(names)}." for reason, names in missed.items()]
    used = {row.setting for row in rows}
    settings = [f"- **{NAMES[name]}**: {text}" for name, text in SETTINGS.items() if name in used]
    return "\n".join([f"### {question}", "", *shown, "", *reasons, *settings])
