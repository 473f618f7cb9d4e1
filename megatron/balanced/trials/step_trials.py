"""Runs trials of balancers (`balancing.trials`) in a training loop: leaves them out of single steps and takes the time.

Layers would have to move back to be left out. Instead, the last steps before a move are compared with steps after it.
The time of a step is that of its slowest rank, by marks on the device that are read when a round of trials, or the
steps after a move, have ended. So the host waits for the device, and ranks for each other, once a round.
"""

import math
from collections import deque
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from balancing.clock import CpuClock, CudaClock
from balancing.report import event
from balancing.trials import ClockGain, LeftOut, Pair, TrialConfig, Trials, TrialSchedule
from megatron.balanced.cpu.device import is_cpu
from megatron.balanced.run import Run
from megatron.balanced.shared.callbacks import StepCallback
from megatron.balanced.trials.shares import what_ranks_share

__all__ = ["StepTrials"]

_WINDOW = 10  # steps before a move, and after it, that are compared
_SETTLE = 3  # fewest steps after a move that are not: layers that arrived have no replicas yet, and memory is allocated


class _Timed(NamedTuple):
    """A step, and marks at its begin and end."""

    iteration: int
    begin: Any
    end: Any


class StepTrials(StepCallback):
    """One on each rank. Its steps begin before those of the balancers.

    of: the run. Its balancers with a `name` take part. If it says how far it is trained, it also gets to know in
        advance which steps leave out a balancer.
    config: settings.
    steps: number of steps of the run; None if unknown.
    delays: steps from a decision until it takes effect, by name of the balancer.
    moves: whether layers may move.
    settle: steps that run otherwise after a move, such as without a CUDA graph.
    report: receives the events; None without a report.
    stop_after: told, in a run of trials alone, the iteration (from 0) after which the run shall stop.
    record: what a checkpoint holds for the run that goes on from it: the iteration from which rounds are counted, and
        which balancers are switched off. Kept up to date; empty in a run that goes on from none.
    """

    def __init__(
        self,
        of: Run,
        config: TrialConfig,
        *,
        steps: int | None = None,
        delays: Mapping[str, int] | None = None,
        moves: bool = False,
        settle: int = 0,
        report: Callable[[dict[str, Any]], None] | None = None,
        stop_after: Callable[[int], None] | None = None,
        record: MutableMapping[str, Any] | None = None,
    ) -> None:
        self.run, self._config, self._steps = of, config, steps
        self._delays = delays or {}
        self._report, self._stop_after = report, stop_after
        self._record = {} if record is None else record
        self._trials: Trials | None = None
        self._shared: str | None = None  # what ranks share; None before the first step
        self._names: list[str] = []  # of the balancers that take part
        self._switched = torch.zeros(0, dtype=torch.int64)
        self._clock = CpuClock() if is_cpu() else CudaClock()
        self._iteration, self._begin = 0, None
        self._timed: list[_Timed] = []  # of the round in progress
        # Of the steps that are no trials: the latest ones, since layers have moved, and those before the move.
        self._latest: deque[_Timed] = deque(maxlen=_WINDOW if moves else 0)
        self._before: list[_Timed] | None = None
        self._settle, self._settling = max(settle, _SETTLE), 0
        self._told: dict[str, int] = {}  # pairs that are in the report, by balancer
        if of.trained is not None:
            of.left_out_ahead = self._left_out_ahead

    def begin_step(self, iteration: int, config: Any) -> None:
        trials = self._start(iteration)
        if self._shared is None:
            self._shared = what_ranks_share() or ""
            trials.can_gain = not self._shared
            if self._shared and self._names and not dist.get_rank():
                print(
                    f"> {self._shared}: balance cannot make steps shorter here, since the sum of the work counts; a "
                    "balancer stays on only if trials show a gain",
                    flush=True,
                )
        self._iteration, self.run.left_out = iteration, trials.left_out(iteration)
        if is_perturbed := trials.is_perturbed(iteration):
            for callback in self.run.callbacks:
                callback.set_aside()
        wanted = trials.is_trial(iteration) or (self._latest.maxlen and not is_perturbed)
        self._begin = self._clock.mark() if wanted else None

    def end_step(self) -> None:
        if self._begin is None or self._trials is None:
            return
        step, self._begin = _Timed(self._iteration, self._begin, self._clock.mark()), None
        if self._trials.is_trial(self._iteration):
            self._end_move()  # balancers may be on behind a round that were off before it
            self._latest.clear()
            self._timed.append(step)
            if self._trials.ends_round(self._iteration):
                self._end_round()
        elif self._settling:
            self._settling -= 1
        else:
            self._latest.append(step)
            if len(self._latest) == self._latest.maxlen:
                self._end_move()

    def abandon_schedule(self) -> None:
        self._begin = None

    def layers_moved(self) -> None:
        """Steps before a move are compared with those after it, but not in one round of trials. The step in progress,
        in which layers move, counts for neither."""
        self._end_move()
        self._begin, self._before = None, list(self._latest)
        self._latest.clear()
        self._timed.clear()
        self._settling = self._settle

    def flush(self) -> None:
        """Steps of fewer ranks are not compared with those of all."""
        self._end_round()
        self._end_move()
        self._begin = self._before = None
        self._latest.clear()

    def end_training(self) -> None:
        """Say what balancing gained, on rank 0."""
        self._end_round()
        self._end_move()
        gained = ", ".join(f"{name} {gain}" for name, gain in self.gains.items())
        if self._config.steps and not gained:
            gained = f"unknown, since the run ended before --balance-trial {self._config.steps} had a pair of steps"
        if gained and not dist.get_rank():
            print(f"> gained, by the clock: {gained}", flush=True)

    @property
    def gains(self) -> dict[str, ClockGain]:
        """What each balancer gained so far, as `Trials.gains`."""
        return {} if self._trials is None else self._trials.gains()

    def _left_out_ahead(self, name: str) -> Callable[[int], bool]:
        """As `Run.left_out_ahead`. Called when the balancers are there."""
        assert self.run.trained is not None
        return LeftOut(self._start(self.run.trained().steps).schedule, name, self._switched)  # type: ignore[arg-type]

    def _start(self, iteration: int) -> Trials:
        """The trials of a run whose first iteration is `iteration`, made at the first call."""
        if self._trials is None:
            self._names = [name for balancer in self.run.balancers if (name := balancer.name)]
            self._switched = torch.zeros(len(self._names), dtype=torch.int64)
            if any(self._delays.values()):  # others prepare steps, in processes of their own
                self._switched.share_memory_()
            first = iteration if self._config.steps else self._resume(iteration)
            schedule = TrialSchedule(self._names, self._config, steps=self._steps, first=first, begins=iteration)
            self._trials = Trials(schedule, self._delays, self._switched)  # type: ignore[arg-type]
            if self._config.steps and self._stop_after is not None:
                self._stop_after(iteration + self._config.steps - 1)
        return self._trials

    def _resume(self, iteration: int) -> int:
        """Go on as the record says, at `iteration`. Returns the iteration from which rounds are counted."""
        record, switched = self._record, self._record.get("switched")
        first = record.get("first")
        if type(first) is not int or not 0 <= first <= iteration or not isinstance(switched, dict):
            first, switched = iteration, {}
        for place, name in enumerate(self._names):
            at = switched.get(name, 0)
            self._switched[place] = at if type(at) is int else 0
        record.update(first=first, switched=self._told_of_switched())
        off = [name for name, at in record["switched"].items() if at > 0]
        if off and not dist.get_rank():
            print(f"> {' and '.join(off)} off, as trials had decided when the checkpoint was saved", flush=True)
        return first

    def _told_of_switched(self) -> dict[str, int]:
        return dict(zip(self._names, self._switched.tolist(), strict=True))

    def _end_round(self) -> None:
        """Give the trials the seconds of a round, and tell what they decide."""
        timed, self._timed = self._timed, []
        if not timed or self._trials is None:
            return
        for step, slowest in zip(timed, self._slowest(timed), strict=True):
            self._trials.add(step.iteration, slowest)
        verdicts = self._trials.decide(self._iteration)
        if not self._config.steps:
            self._record["switched"] = self._told_of_switched()
        if not dist.get_rank():
            for verdict in verdicts:
                if verdict.changed:
                    print(f"> {verdict}", flush=True)
        self._tell({verdict.name: (verdict.on, str(verdict)) for verdict in verdicts})

    def _end_move(self) -> None:
        """Compare the steps before the last move with those after it, if there is one to compare."""
        before, self._before = self._before, None
        if not before or not self._latest or self._trials is None:
            return
        seconds = self._slowest([*before, *self._latest])
        self._trials.add_move(self._latest[-1].iteration, seconds[: len(before)], seconds[len(before) :])
        self._tell({})

    def _slowest(self, timed: list[_Timed]) -> list[float]:
        """The seconds of steps on their slowest ranks."""
        if not is_cpu():
            timed[-1].end.synchronize()
        seconds = torch.tensor(
            [self._clock.seconds(step.begin, step.begin, step.end)[1] for step in timed],
            dtype=torch.float64,
            device=torch.cuda.current_device(),
        )
        dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
        return seconds.tolist()

    def _tell(self, decided: dict[str, tuple[bool, str]]) -> None:
        """Report what has new pairs. decided: balancer -> whether it is on from now on, and the line that says so."""
        if self._report is None or self._trials is None or dist.get_rank():
            return
        pairs = self._trials.pairs
        new = {name: every[self._told.get(name, 0) :] for name, every in pairs.items()}
        self._told = {name: len(every) for name, every in pairs.items()}
        for name, gain in self.gains.items():
            if new.get(name) or (name == "together" and any(new.values())):
                self._report(self._event(name, gain, *decided.get(name, (True, "")), new.get(name, [])))

    def _event(self, name: str, gain: ClockGain, on: bool, reason: str, pairs: list[Pair]) -> dict[str, Any]:
        high = None if math.isinf(gain.high) else gain.high
        return event(
            self._iteration + 1,
            name,
            "step",
            imbalance_before=1.0,
            action="trial",
            reason=reason,
            gain=gain.ratio,
            gain_low=gain.low,
            gain_high=high,
            pairs=gain.pairs,
            pair_iterations=[pair.iteration + 1 for pair in pairs],
            pair_ratios=[pair.ratio for pair in pairs],
            on=on,
        )
