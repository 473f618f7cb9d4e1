"""Whether a balancer pays, by the clock of the job itself.

A balancer changes no number of the training, so a step may run without it. A round of trials is a few blocks of
consecutive steps. In each block every combination of balancers on and off runs once, in a drawn order, so that what
drifts over the run falls on all of them alike. With one balancer a block is a pair of steps; with two it has four, and
gives two pairs for each (a full factorial design). The gain of a balancer is the median over pairs of the seconds
without it over those with it. Its interval is the narrower one of two. That of the sign test cannot be moved far by a
slow step. That of the signed-rank test needs fewer pairs; it holds since the order in a pair is drawn, so that noise
moves a ratio up as often as down. If a balancer is off, one step with all of them comes before a round, since some plan
from what they see in the step before, such as the load of experts.

Every job of 50 steps or more has decided by its step 30. A balancer is left out in at most 10 steps of this first
round. If it pays, that loses its gain for 10 steps. If it does not, a job of N steps that did not look would lose as
much in N - 30 of them. Later rounds, and the first, take at most 1 % of all steps of a long job together.

`TrialSchedule` says which steps are trials, and of what; it is known before the run. `Trials` takes the seconds of
steps, and decides. It communicates with nobody: ranks that give it the same seconds decide alike.
`megatron.balanced.trials.step_trials` runs it.
"""

import math
from collections.abc import Mapping, MutableSequence, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from balancing.settings import SettingError, check_settings, setting

__all__ = [
    "ClockGain", "LeftOut", "Pair", "TrialConfig", "TrialSchedule", "Trials", "Verdict", "median_gain", "product",
]  # fmt: skip

_KEPT = 0.975  # by each of two tests
_WARM_UP = 8  # steps before the first round
_FIRST_ENDS = 30  # steps, of which the first round is a part
_SHORTEST = 50  # steps of a job that has trials
_FEWEST = 7  # pairs without which there is no interval, and no first round
_RECENT = 10  # pairs that a decision looks back at
_MOST = 300  # pairs that a gain is of, the last ones: the exact tests take n^3 operations


@dataclass(frozen=True)
class TrialConfig:
    """Raises SettingError, a ValueError, for a value out of range."""

    pairs: int = setting(
        10,
        "Pairs of steps with and without each balancer in a round of trials; the first one ends by step 30 and needs "
        "7. A balancer that makes steps longer is switched off, and tried again later. 0: no trials; balancers stay "
        "on.",
        least=0,
    )
    interval: int = setting(1000, "Steps from one round of trials to the next.", least=100)
    share: float = setting(
        0.01,
        "Most steps that rounds after the first may run otherwise than decided, as a share of all.",
        above=0,
        most=1,
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
    the balancer makes steps shorter. With fewer than 7 pairs the interval is unknown: 0 to infinity."""

    ratio: float
    low: float
    high: float
    pairs: int

    def __str__(self) -> str:
        pairs = f"{self.pairs} pair{'s' * (self.pairs != 1)}"
        if math.isinf(self.high):
            return f"{self.ratio:.2f}x ({pairs})"
        return f"{self.ratio:.2f}x ({self.low:.2f} to {self.high:.2f}, {pairs})"


class Pair(NamedTuple):
    """Two steps, without a balancer and with it. iteration: of the later one. ratio: their seconds, one over the
    other."""

    iteration: int
    ratio: float


def product(gains: Sequence[ClockGain]) -> ClockGain:
    """What several balancers gained together, of which each was measured by itself. gains: at least one.

    Its interval is that of all gains at their lower ends, and at their upper ends, so it is wider than it need be.
    """
    ratio, low, high = (math.prod(getattr(gain, end) for gain in gains) for end in ("ratio", "low", "high"))
    return ClockGain(ratio, low, high, min(gain.pairs for gain in gains))


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


def median_gain(ratios: Sequence[float]) -> ClockGain | None:
    """The median of ratios, the last 300 of more, and its interval; None without any.

    Both tests keep 97.5 %, so that what both keep holds in 95 %. The interval of the sign test lies between the k-th
    smallest and the k-th largest ratio, that of the signed-rank test between the k-th smallest and largest mean of two
    ratios, or of one with itself (Conover, Practical Nonparametric Statistics, sections 3.2 and 5.7).
    """
    if not len(ratios):
        return None
    values = np.sort(np.log(np.asarray(ratios[-_MOST:], dtype=float)))  # their median is that of the inverse, too
    number = len(values)
    means = np.sort((values[:, None] + values)[np.triu_indices(number)] / 2)
    signs = np.array([math.comb(number, positive) for positive in range(number + 1)], dtype=float)
    ranks = np.ones(1)  # [sum of ranks] -> sets of ranks
    for rank in range(1, number + 1):
        ranks = np.pad(ranks, (0, rank)) + np.pad(ranks, (rank, 0))
    middle = float(np.median(values))
    low, high = -math.inf, math.inf
    for ordered, outcomes in ((values, signs), (means, ranks)):
        if outside := _outside(outcomes):
            low, high = max(low, ordered[outside - 1]), min(high, ordered[-outside])
    ratio, least, most = np.exp([middle, min(low, middle), max(high, middle)]).tolist()
    return ClockGain(ratio, least, most, number)


def _outside(counts: np.ndarray) -> int:
    """How many values from the smallest lie outside of an interval that keeps 97.5 %.

    counts: [value of the test's statistic] -> number of equally likely outcomes.
    """
    return int(np.searchsorted(np.cumsum(counts / counts.sum()), (1 - _KEPT) / 2, side="right"))


class TrialSchedule:
    """Which steps of a run are trials, and which balancers they leave out. All ranks make the same one. It can be
    pickled.

    names: the balancers that a step can leave out.
    config: settings.
    steps: number of steps of the run; None if unknown.
    first: the iteration from which rounds are counted: the first one with these balancers.
    begins: the first iteration of this run, if it goes on with the schedule of an earlier one; its warm-up has no
        trials.
    seed: seed of the order of steps in blocks.

    Raises ValueError for more than three names: a block of all combinations would be too long. Raises SettingError if a
    run of trials alone would have no pair of steps to compare.
    """

    def __init__(
        self,
        names: Sequence[str],
        config: TrialConfig,
        *,
        steps: int | None = None,
        first: int = 0,
        begins: int | None = None,
        seed: int = 0,
    ) -> None:
        if len(names) > 3:
            raise ValueError(f"{len(names)} balancers cannot be tried together ({', '.join(names)}); try at most 3")
        self.names, self._config, self._steps, self._first, self._seed = tuple(names), config, steps, first, seed
        self._warm_up = max(2, config.steps // 10) if config.steps else _WARM_UP
        self._warm_from = (first if begins is None else begins) + self._warm_up
        self._interval = config.steps or config.interval  # a run of trials has one round
        self._rounds: list[int] = []  # blocks of each round so far
        self._spent = 0  # steps that these rounds may run otherwise than decided
        if config.steps and not names:
            why = "has nothing to try: no balancer of this run can be left out of a step; drop it"
            raise SettingError("--balance-trial", config.steps, why)
        if config.steps and self._blocks(0) < 1:
            fewest = self._warm_up + self.length
            why = f"is too short to run steps with and without {' and '.join(names)}; use at least {fewest}"
            raise SettingError("--balance-trial", config.steps, why)

    @property
    def length(self) -> int:
        """Steps of a block."""
        return 1 << len(self.names)

    def _blocks(self, number: int) -> int:
        """How many blocks round `number` has."""
        while len(self._rounds) <= number:
            at = len(self._rounds)
            lead = int(at > 0)
            blocks = self._blocks_of_next(at, lead)
            self._spent += blocks * (self.length - 1) + lead * (blocks > 0)
            self._rounds.append(blocks)
        return self._rounds[number]

    def _blocks_of_next(self, number: int, lead: int) -> int:
        """How many blocks round `number` has, of the steps that the rounds before it leave to trials.

        lead: steps before its first block that may run otherwise than decided.
        """
        if not self.names:
            return 0
        if self._config.steps:
            return (self._config.steps - self._warm_up) // self.length if number == 0 else 0
        until = (number + 1) * self._interval
        if self._steps is not None:
            until = min(until, self._steps - self._first)
        if number == 0:
            fitting = (_FIRST_ENDS - self._warm_up) // self.length
            blocks = min(math.ceil(self._config.pairs / (self.length // 2)), fitting)
            return blocks if until >= _SHORTEST and blocks * (self.length // 2) >= _FEWEST else 0
        blocks = math.ceil(self._config.pairs / (self.length // 2))
        changed = self.length - 1  # steps of a block that run otherwise than decided
        left = int(self._config.share * until + 1e-9) - self._spent - lead
        blocks = max(0, min(blocks, left // changed))
        fits = self._warm_up + blocks * self.length <= until - number * self._interval
        return blocks if fits else 0

    def _place(self, iteration: int) -> tuple[int, int]:
        """The round of `iteration`, and the steps since its first trial."""
        number, since = divmod(iteration - self._first, self._interval)
        return number, since - self._warm_up

    def begins_block(self, iteration: int) -> bool:
        """Whether the trial `iteration` is the first of its block."""
        return self._place(iteration)[1] % self.length == 0

    def combination(self, iteration: int) -> int | None:
        """Bits of the balancers that a trial of `iteration` leaves out; None if it is no trial."""
        number, since = self._place(iteration)
        block, place = divmod(since, self.length)
        if number < 0 or iteration < self._warm_from or not 0 <= block < self._blocks(number):
            return None
        order = np.random.default_rng((self._seed, number, block)).permutation(self.length)
        return int(order[place])

    def left_out(self, iteration: int, off: frozenset[str]) -> frozenset[str]:
        """The balancers that step `iteration` leaves out. off: those that are switched off by then."""
        combination = self.combination(iteration)
        if combination is not None:
            return frozenset(name for bit, name in enumerate(self.names) if combination >> bit & 1)
        number, since = self._place(iteration)
        return frozenset() if since == -1 and number > 0 and self._blocks(number) else off


def _is_off(switched: int, iteration: int) -> bool:
    """Whether a balancer is switched off in `iteration`. switched: 0 if it never was, n + 1 if it is off from iteration
    n on, -n - 1 if it is on again from iteration n on."""
    return iteration >= switched - 1 if switched > 0 else iteration < -switched - 1


@dataclass(frozen=True)
class LeftOut:
    """Whether iterations leave out one balancer, told before they begin. It can be pickled, if `switched` can.

    schedule: the schedule of the run.
    name: name of the balancer, one of those of `schedule`.
    switched: that of `Trials`.
    """

    schedule: TrialSchedule
    name: str
    switched: Sequence[int]

    def __call__(self, iteration: int) -> bool:
        is_off = _is_off(int(self.switched[self.schedule.names.index(self.name)]), iteration)
        return self.name in self.schedule.left_out(iteration, frozenset([self.name] if is_off else []))


class Trials:
    """The trials of one run. All ranks make the same one.

    schedule: which steps are trials.
    delays: balancer -> steps from a decision until it takes effect, for balancers that prepare steps in advance.
    switched: one number for each balancer, 0 at first: when it was last switched, as `LeftOut` reads it. Other
        processes may read it, too.
    can_gain: whether balance can make steps shorter here. If ranks share cores or a device, the sum of their work
        counts, whoever does it, so that a balancer is on only if trials have shown a gain.

    `pairs` are those so far by balancer, "together" of all that steps leave out if there are several, and "layers" of
    steps before and after moves.
    """

    def __init__(
        self,
        schedule: TrialSchedule,
        delays: Mapping[str, int] | None = None,
        switched: MutableSequence[int] | None = None,
        can_gain: bool = True,
    ) -> None:
        self.can_gain = can_gain
        self.schedule, self.names, self._delays = schedule, schedule.names, delays or {}
        self._switched = [0] * len(self.names) if switched is None else switched
        self.pairs: dict[str, list[Pair]] = {name: [] for name in self.names}
        if len(self.names) > 1:
            self.pairs["together"] = []
        self._moves: list[ClockGain] = []
        self._block: dict[int, float] = {}  # combination -> seconds, of the block in progress

    def off(self, iteration: int) -> frozenset[str]:
        """The balancers that are switched off in `iteration`."""
        return frozenset(
            name for name, at in zip(self.names, self._switched, strict=True) if _is_off(int(at), iteration)
        )

    def left_out(self, iteration: int) -> frozenset[str]:
        """The balancers that step `iteration` leaves out."""
        return self.schedule.left_out(iteration, self.off(iteration))

    def is_perturbed(self, iteration: int) -> bool:
        """True for a step that runs differently from a normal one."""
        return self.left_out(iteration) != self.off(iteration)

    def is_trial(self, iteration: int) -> bool:
        """Whether the seconds of `iteration` are wanted."""
        return self.schedule.combination(iteration) is not None

    def ends_round(self, iteration: int) -> bool:
        """Whether `iteration` is the last of a round of trials."""
        return self.is_trial(iteration) and not self.is_trial(iteration + 1)

    def add(self, iteration: int, seconds: float) -> None:
        """Add the seconds of a trial, those of the slowest rank. A block of which a step is missing does not count."""
        combination = self.schedule.combination(iteration)
        if combination is None or seconds <= 0 or not math.isfinite(seconds):
            return
        if self.schedule.begins_block(iteration):
            self._block = {}
        self._block[combination] = seconds
        if len(self._block) < self.schedule.length:
            return
        for bit, name in enumerate(self.names):
            self.pairs[name] += [
                Pair(iteration, self._block[others | 1 << bit] / self._block[others])
                for others in range(self.schedule.length)
                if not others >> bit & 1
            ]
        if "together" in self.pairs:
            self.pairs["together"].append(Pair(iteration, self._block[self.schedule.length - 1] / self._block[0]))
        self._block = {}

    def add_move(self, iteration: int, before: Sequence[float], after: Sequence[float]) -> None:
        """Layers have moved: seconds of steps before and after, without trials among them, in order. The nearest ones
        are compared first. iteration: the last of these steps."""
        pairs = [Pair(iteration, one / other) for one, other in zip(reversed(before), after, strict=False)]
        gain = median_gain([pair.ratio for pair in pairs])
        if gain is not None and gain.pairs >= _FEWEST:
            self._moves.append(gain)
            self.pairs.setdefault("layers", []).extend(pairs)

    def gains(self) -> dict[str, ClockGain]:
        """What each balancer gained in all trials so far, layers in all moves, and "together" all of them if there are
        several."""
        found = {name: median_gain([pair.ratio for pair in pairs]) for name, pairs in self.pairs.items()}
        gains = {name: gain for name, gain in found.items() if gain is not None}
        if self._moves:
            both = gains.pop("together", None) or (gains[self.names[0]] if self.names and len(gains) > 1 else None)
            gains["layers"] = product(self._moves)
            if both is not None:
                gains["together"] = product([both, gains["layers"]])
        return gains

    def decide(self, iteration: int) -> list[Verdict]:
        """Switch balancers on and off by the latest pairs, at the end of a round. Returns what it says of each.

        iteration: the one that has ended.
        """
        verdicts = []
        for bit, name in enumerate(self.names):
            gain = median_gain([pair.ratio for pair in self.pairs[name][-_RECENT:]])
            if gain is None:
                continue
            was_on = int(self._switched[bit]) <= 0
            is_on = gain.high >= 1 if was_on and self.can_gain else gain.low > 1
            if is_on != was_on:
                begins = iteration + 1 + self._delays.get(name, 0)
                self._switched[bit] = -begins - 1 if is_on else begins + 1
            verdicts.append(Verdict(name, gain, is_on, is_on != was_on))
        return verdicts
