"""The bad cases, and what is said of a job that ran one."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from balancing.trials import TrialConfig, TrialSchedule

__all__ = ["CASES", "EVEN_FROM", "Case", "Watch"]

EVEN_FROM = 60  # iteration, after the first round of trials


@dataclass(frozen=True)
class Case:
    """A job.

    what: in words.
    steps: of the job, with the default settings of trials.
    loads: of experts: even, uneven, or even later, which is from iteration EVEN_FROM on; None without balanced experts.
    documents: lengths of documents: even or uneven; None without balanced sequences.
    dear: balancers whose transfers take long beside what they balance.
    noisy: whether rank 1 is slow at times.
    slow: iteration that takes ten times as long.
    expected: balancer -> whether it is on at the end.
    slow_links: how many times as long transfers take as on the links of the preset.
    only_emulated: whether two cores cannot make it. Attention that is uneven needs so many tokens that experts are
        cheap to send, and links between processes of a machine are quick.
    """

    what: str
    steps: int
    expected: Mapping[str, bool]
    loads: str | None = None
    documents: str | None = None
    dear: frozenset[str] = frozenset()
    noisy: bool = False
    slow: int | None = None
    slow_links: float = 1.0
    only_emulated: bool = False

    def loads_at(self, iteration: int) -> str | None:
        """even or uneven."""
        if self.loads != "even later":
            return self.loads
        return "uneven" if iteration < EVEN_FROM else "even"


_EXPERTS, _SEQUENCES = frozenset(["experts"]), frozenset(["sequences"])
CASES = (
    Case("even loads, dear transfers", 700, {"experts": False}, "even", dear=_EXPERTS),
    Case("uneven loads", 700, {"experts": True}, "uneven"),
    Case("loads that become even, dear transfers", 2200, {"experts": False}, "even later", dear=_EXPERTS),
    Case("uneven loads, links at a fiftieth", 700, {"experts": False}, "uneven", slow_links=50, only_emulated=True),
    Case("uneven loads, one noisy rank", 700, {"experts": True}, "uneven", noisy=True),
    Case("uneven loads, one step ten times as long", 700, {"experts": True}, "uneven", slow=27),
    Case("uneven loads, even documents", 2200, {"experts": True, "sequences": False}, "uneven", "even",
         dear=_SEQUENCES),
    Case("even loads, uneven documents", 2200, {"experts": False, "sequences": True}, "even", "uneven",
         dear=_EXPERTS, only_emulated=True),
    Case("even loads, dear transfers, short job", 20, {"experts": True}, "even", dear=_EXPERTS),
)  # fmt: skip


class Watch:
    """Notes the seconds of each step of a job, and what it leaves out.

    case: of the job.
    steps: of the job.
    config: settings of its trials.
    """

    def __init__(self, case: Case, steps: int, config: TrialConfig) -> None:
        self._case, self._steps, self._config = case, steps, config
        self._seconds: list[float] = []
        self._left_out: list[frozenset[str]] = []

    def add(self, seconds: float, left_out: frozenset[str]) -> None:
        """A step has ended. left_out: the balancers that it ran without."""
        self._seconds.append(seconds)
        self._left_out.append(left_out)

    def row(self, gains: Mapping[str, Any]) -> dict[str, Any]:
        """Of the table, at the end of the job. gains: those of its trials. Milliseconds are of steps up to EVEN_FROM:
        emulated steps take time there."""
        decided = self._decided()
        on = {name: name not in decided[-1] for name in self._case.expected}
        off_since = {
            name: 1 + max((at for at, off in enumerate(decided) if name not in off), default=-1) for name in on
        }
        odd = [at for at, off in enumerate(decided) if off != self._left_out[at]]
        return {"case": self._case.what, "steps": self._steps, "on": on, "off_since": off_since,
                "gains": {name: str(gain) for name, gain in gains.items()}, "cost": self._cost(odd),
                "step_ms": float(np.median(self._seconds[:EVEN_FROM])) * 1e3}  # fmt: skip

    def _decided(self) -> list[frozenset[str]]:
        """What is off in each step. Trials, and the step before a round, may run otherwise."""
        schedule = TrialSchedule([*self._case.expected], self._config, steps=self._steps)
        decided, off = [], frozenset[str]()
        for at, left_out in enumerate(self._left_out):
            if schedule.combination(at) is None and schedule.combination(at + 1) is None:
                off = left_out
            decided.append(off)
        return decided

    def _cost(self, odd: Sequence[int]) -> float:
        """Seconds by which steps that ran otherwise than decided were longer, as a share of the job."""
        took, extra, usual = self._seconds, 0.0, 0.0
        for begin in range(0, len(took), self._config.interval):
            within = [at for at in odd if begin <= at < begin + self._config.interval]
            if within:
                usual = float(np.median([took[at] for at in range(begin, max(within) + 1) if at not in within]))
                extra += sum(took[at] - usual for at in within)
        return extra / (usual * len(took)) if usual else 0.0
