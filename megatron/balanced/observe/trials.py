"""Runs trials of balancers (`balancing.trials`) in a training loop: leaves them out of single steps and takes the time.

The time of a step is that of its slowest rank, by marks on the device that are read when a round of trials has ended.
So the host waits for the device, and ranks for each other, once a round.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist

from balancing.clock import CpuClock, CudaClock
from balancing.report import event
from balancing.trials import ClockGain, LeftOut, TrialConfig, Trials, TrialSchedule
from megatron.balanced.cpu.device import is_cpu
from megatron.balanced.shared.callbacks import StepCallback

__all__ = ["StepTrials"]


class StepTrials(StepCallback):
    """One on each rank. It comes before the balancers in the order of callbacks.

    callbacks: of the loop. Those with a `trial_name` take part.
    config: settings.
    steps: of the run; None if unknown.
    first: gives the first iteration of the run, once the balancers are there. None: that of the first step.
    delays: steps from a decision until it takes effect, by `trial_name`.
    report: receives the events; None without a report.
    stop_after: told, in a run of trials alone, the iteration (from 0) after which the run shall stop.
    """

    def __init__(
        self,
        callbacks: Iterable[Any],
        config: TrialConfig,
        *,
        steps: int | None = None,
        first: Callable[[], int] | None = None,
        delays: Mapping[str, int] | None = None,
        report: Callable[[dict[str, Any]], None] | None = None,
        stop_after: Callable[[int], None] | None = None,
    ) -> None:
        self._callbacks, self._config, self._steps = callbacks, config, steps
        self._first, self._delays = first, delays or {}
        self._report, self._stop_after = report, stop_after
        self._trials: Trials | None = None
        self._balancers: dict[str, StepCallback] = {}
        self._switched = torch.zeros(0, dtype=torch.int64)
        self._clock = CpuClock() if is_cpu() else CudaClock()
        self._iteration, self._begin = 0, None
        self._timed: list[tuple[int, Any, Any]] = []  # iteration, and marks at its begin and end

    def begin_step(self, iteration: int, config: Any) -> None:
        trials = self._start(iteration)
        self._iteration, left_out = iteration, trials.left_out(iteration)
        for name, balancer in self._balancers.items():
            balancer.left_out = name in left_out
        self._begin = self._clock.mark() if trials.is_trial(iteration) else None

    def end_step(self) -> None:
        if self._begin is not None:
            self._timed.append((self._iteration, self._begin, self._clock.mark()))
            self._begin = None
            if self._trials is not None and self._trials.ends_round(self._iteration):
                self._end_round()

    def abandon_schedule(self) -> None:
        self._begin = None

    def layers_moved(self) -> None:
        """Steps before a move are not compared with steps after it."""
        self._timed.clear()

    def end_training(self) -> None:
        """Say what balancing gained, on rank 0."""
        self._end_round()
        if self.gains and not dist.get_rank():
            gained = ", ".join(f"{name} {gain}" for name, gain in self.gains.items())
            print(f"> gained, by the clock: {gained}", flush=True)

    @property
    def gains(self) -> dict[str, ClockGain]:
        """What each balancer gained in all trials so far, as `Trials.gains`."""
        return {} if self._trials is None else self._trials.gains()

    def told_ahead(self, name: str) -> Callable[[int], bool]:
        """Which iterations leave out the balancer of this `trial_name`, told before they begin, also in other
        processes. Called when the balancers are there."""
        assert self._first is not None
        return LeftOut(self._start(self._first()).schedule, name, self._switched)  # type: ignore[arg-type]

    def _start(self, iteration: int) -> Trials:
        """The trials of a run whose first iteration is `iteration`, made at the first call."""
        if self._trials is None:
            known = [callback for callback in self._callbacks if isinstance(callback, StepCallback)]
            self._balancers = {callback.trial_name: callback for callback in known if callback.trial_name}
            self._switched = torch.zeros(len(self._balancers), dtype=torch.int64)
            if any(self._delays.values()):  # others prepare steps, in processes that were started earlier
                self._switched.share_memory_()
            schedule = TrialSchedule(list(self._balancers), self._config, steps=self._steps, first=iteration)
            self._trials = Trials(schedule, self._delays, self._switched)  # type: ignore[arg-type]
            if self._config.steps and self._stop_after is not None:
                self._stop_after(iteration + self._config.steps - 1)
        return self._trials

    def _end_round(self) -> None:
        """Give the trials the seconds of the slowest rank, and tell what they decide."""
        timed, self._timed = self._timed, []
        if not timed or self._trials is None:
            return
        if not is_cpu():
            timed[-1][2].synchronize()
        seconds = torch.tensor(
            [self._clock.seconds(begin, begin, end)[1] for _, begin, end in timed],
            dtype=torch.float64,
            device=torch.cuda.current_device(),
        )
        dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
        for (iteration, *_), slowest in zip(timed, seconds.tolist(), strict=True):
            self._trials.add(iteration, slowest)
        verdicts = {verdict.name: verdict for verdict in self._trials.decide(self._iteration)}
        if dist.get_rank():
            return
        for verdict in verdicts.values():
            if verdict.changed:
                print(f"> {verdict}", flush=True)
        for name, gain in self.gains.items():
            verdict = verdicts.get(name)
            self._tell(name, gain, verdict is None or verdict.on, str(verdict or ""))

    def _tell(self, name: str, gain: ClockGain, on: bool, reason: str) -> None:
        if self._report is not None:
            high = None if math.isinf(gain.high) else gain.high
            figures = {"gain": gain.ratio, "gain_low": gain.low, "gain_high": high, "pairs": gain.pairs}
            line = event(self._iteration + 1, name, "step", imbalance_before=1.0, action="trial", reason=reason)
            self._report(line | figures | {"on": on})
