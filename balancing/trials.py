"""Whether a balancer pays, by the clock of the job itself.

A balancer changes no number of the training, so a step may run without it. A round of trials is a few blocks of
consecutive steps. In each block every combination of balancers on and off runs once, in a drawn order, so that what
drifts over the run falls on all of them alike. With one balancer a block is a pair of steps; with two it has four, and
gives two pairs for each (a full factorial design). The gain of a balancer is the median over pairs of the seconds
without it over those with it. Its interval is that of the sign test, which holds for any distribution of noise, and
which one slow step cannot move far. If a balancer is off, one step with all of them comes before a round, since some
plan from what they see in the step before, such as the load of experts.

`Trials` says which balancers a step leaves out, takes the seconds of the step, and decides. It communicates with
nobody: ranks that give it the same seconds decide alike. `megatron.balanced.observe.trials` runs it.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from balancing.settings import check_settings, setting

__all__ = ["ClockGain", "TrialConfig", "Trials", "Verdict", "median_gain"]

_CONFIDENCE = 0.95
_WARM_UP = 20  # steps before the first round
_FEWEST = 6  # pairs without which there is no interval, and no first round
_RECENT = 10  # pairs that a decision looks back at


@dataclass(frozen=True)
class TrialConfig:
    """Raises SettingError, a ValueError, for a value out of range."""

    pairs: int = setting(
        10,
        "Pairs of steps with and without each balancer in the first round of trials. A balancer that makes steps "
        "longer is switched off, and tried again later. 0: no trials; balancers stay on.",
        least=0,
    )
    interval: int = setting(1000, "Steps from one round of trials to the next.", least=100)
    share: float = setting(
        0.01, "Most steps that trials may run otherwise than decided, as a share of all steps.", above=0, most=1
    )
    steps: int = setting(
        0,
        "Run N steps of trials of all balancers that are on, print what each gains by the clock, and stop.",
        flag="--balance-trial",
        metavar="N",
        least=0,
    )

    def __post_init__(self) -> None:
        check_settings(self)


@dataclass(frozen=True)
class ClockGain:
    """Seconds of a step without a balancer over those with it: the median of `pairs` pairs, and its interval. Above 1
    the balancer makes steps shorter. With fewer than 6 pairs the interval is unknown: 0 to infinity."""

    ratio: float
    low: float
    high: float
    pairs: int

    def __str__(self) -> str:
        if math.isinf(self.high):
            return f"{self.ratio:.2f}x ({self.pairs} pairs)"
        return f"{self.ratio:.2f}x ({self.low:.2f} to {self.high:.2f}, {self.pairs} pairs)"


@dataclass(frozen=True)
class Verdict:
    """What a round of trials says of one balancer. on: whether it is on from now on. changed: whether it was not."""

    name: str
    gain: ClockGain
    on: bool
    changed: bool

    def __str__(self) -> str:
        """A line for the user."""
        if not self.changed:
            return f"{self.name} {'on' if self.on else 'off'}: {self.gain}"
        if self.on:
            return f"{self.name} on again: without it steps take {self.gain} the time"
        slower = ClockGain(1 / self.gain.ratio, 1 / self.gain.high, 1 / self.gain.low, self.gain.pairs)
        return f"{self.name} off: with it steps take {slower} the time"


def median_gain(logarithms: Sequence[float]) -> ClockGain | None:
    """The median of ratios and its interval, from their logarithms; None without any.

    The interval lies between the k-th smallest and the k-th largest ratio, with the largest k for which the sign test
    keeps 95 % (Conover, Practical Nonparametric Statistics, section 3.2).
    """
    if not len(logarithms):
        return None
    values = np.sort(np.asarray(logarithms, dtype=float))
    number, tail, outside = len(values), 0.0, 0
    while (tail := tail + math.comb(number, outside) / 2**number) <= (1 - _CONFIDENCE) / 2:
        outside += 1
    ratio = float(np.exp(np.median(values)))
    if not outside:
        return ClockGain(ratio, 0.0, math.inf, number)
    low, high = np.exp(values[[outside - 1, number - outside]]).tolist()
    return ClockGain(ratio, low, high, number)


class Trials:
    """The trials of one run. All ranks make the same one.

    names: the balancers that a step can leave out.
    config: settings.
    steps: of the run; None if unknown.
    first: the first iteration of the run, which may go on from a checkpoint.
    seed: of the order of steps in blocks.

    Raises ValueError for more than three names: a block of all combinations would be too long.
    """

    def __init__(
        self, names: Sequence[str], config: TrialConfig, *, steps: int | None = None, first: int = 0, seed: int = 0
    ) -> None:
        if len(names) > 3:
            raise ValueError(f"{len(names)} balancers cannot be tried together ({', '.join(names)}); try at most 3")
        self.names, self._config, self._steps, self._seed = tuple(names), config, steps, seed
        self._first = first
        self._off: set[str] = set()
        self._logarithms: dict[str, list[float]] = {name: [] for name in self.names}
        self._together: list[float] = []
        self._block: dict[int, float] = {}  # combination -> seconds, of the block in progress
        self._warm_up = max(2, config.steps // 10) if config.steps else _WARM_UP
        self._interval = config.steps or config.interval  # a run of trials has one round
        self._spent = 0  # steps that rounds before this one ran otherwise than decided
        self._lead = 0  # steps with everything on before this round
        self._round, self._blocks = 0, self._blocks_of_round(0)

    @property
    def _length(self) -> int:
        """Steps of a block."""
        return 1 << len(self.names)

    def _blocks_of_round(self, number: int) -> int:
        """How many blocks round `number` has, of the steps that are left to trials."""
        if not self.names:
            return 0
        if self._config.steps:
            return (self._config.steps - self._warm_up) // self._length if number == 0 else 0
        until = (number + 1) * self._interval
        if self._steps is not None:
            until = min(until, self._steps - self._first)
        blocks = math.ceil(self._config.pairs / (self._length // 2))
        changed = self._length - 1  # steps of a block that run otherwise than decided
        left = int(self._config.share * until + 1e-9) - self._spent - self._lead
        blocks = max(0, min(blocks, left // changed))
        enough = blocks * (self._length // 2) >= _FEWEST or number > 0
        fits = self._warm_up + blocks * self._length <= until - number * self._interval
        return blocks if enough and fits else 0

    def _since(self, iteration: int) -> int:
        """Steps since the first trial of the round."""
        return iteration - self._first - self._round * self._interval - self._warm_up

    def _combination(self, iteration: int) -> int | None:
        """Bits of the balancers that a trial of `iteration` leaves out; None if it is no trial."""
        block, place = divmod(self._since(iteration), self._length)
        if not 0 <= block < self._blocks:
            return None
        order = np.random.default_rng((self._seed, self._round, block)).permutation(self._length)
        return int(order[place])

    def left_out(self, iteration: int) -> frozenset[str]:
        """The balancers that step `iteration` leaves out. Call it in the order of iterations."""
        while iteration - self._first >= (self._round + 1) * self._interval:
            self._spent += self._blocks * (self._length - 1) + self._lead
            self._round += 1
            self._lead = int(bool(self._off))
            self._blocks = self._blocks_of_round(self._round)
            self._lead *= bool(self._blocks)
            self._block = {}
        combination = self._combination(iteration)
        if combination is None:
            return frozenset() if 0 < -self._since(iteration) <= self._lead else frozenset(self._off)
        return frozenset(name for bit, name in enumerate(self.names) if combination >> bit & 1)

    def is_trial(self, iteration: int) -> bool:
        """Whether the seconds of `iteration` are wanted."""
        return self._combination(iteration) is not None

    def ends_round(self, iteration: int) -> bool:
        """Whether `iteration` is the last of a round of trials."""
        return self.is_trial(iteration) and not self.is_trial(iteration + 1)

    def add(self, iteration: int, seconds: float) -> None:
        """Add the seconds of a trial, those of the slowest rank. A block of which a step is missing does not count."""
        combination = self._combination(iteration)
        if combination is None or seconds <= 0 or not math.isfinite(seconds):
            return
        if self._since(iteration) % self._length == 0:
            self._block = {}
        self._block[combination] = math.log(seconds)
        if len(self._block) < self._length:
            return
        for bit, name in enumerate(self.names):
            self._logarithms[name] += [
                self._block[others | 1 << bit] - self._block[others]
                for others in range(self._length)
                if not others >> bit & 1
            ]
        self._together.append(self._block[self._length - 1] - self._block[0])
        self._block = {}

    def gains(self) -> dict[str, ClockGain]:
        """What each balancer gained in all trials so far, and "together" all of them if there are several."""
        found = {name: median_gain(values) for name, values in self._logarithms.items()}
        if len(self.names) > 1:
            found["together"] = median_gain(self._together)
        return {name: gain for name, gain in found.items() if gain is not None}

    def decide(self) -> list[Verdict]:
        """Switch balancers on and off by the latest pairs, at the end of a round. Returns what it says of each."""
        verdicts = []
        for name in self.names:
            gain = median_gain(self._logarithms[name][-_RECENT:])
            if gain is None:
                continue
            was_on = name not in self._off
            is_on = gain.high >= 1 if was_on else gain.low > 1
            (self._off.discard if is_on else self._off.add)(name)
            verdicts.append(Verdict(name, gain, is_on, is_on != was_on))
        return verdicts
