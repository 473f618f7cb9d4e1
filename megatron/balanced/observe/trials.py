"""Runs trials of balancers (`balancing.trials`) in a training loop: leaves them out of single steps and takes the time.

The time of a step is that of its slowest rank, by marks on the device that are read when a round of trials has ended.
So the host waits for the device, and ranks for each other, once a round.
"""

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist

from balancing.clock import CpuClock, CudaClock
from balancing.report import event
from balancing.trials import ClockGain, TrialConfig, Trials
from megatron.balanced.cpu.device import is_cpu
from megatron.balanced.shared.callbacks import StepCallback

__all__ = ["StepTrials"]


class StepTrials(StepCallback):
    """One on each rank. It comes before the balancers in the order of callbacks.

    callbacks: of the loop. Those with a `trial_name` take part.
    config: settings.
    steps: of the run; None if unknown.
    report: receives the events; None without a report.
    stop_after: told, in a run of trials alone, the iteration (from 0) after which the run shall stop.
    """

    def __init__(
        self,
        callbacks: Iterable[Any],
        config: TrialConfig,
        *,
        steps: int | None = None,
        report: Callable[[dict[str, Any]], None] | None = None,
        stop_after: Callable[[int], None] | None = None,
    ) -> None:
        self._callbacks, self._config, self._steps = callbacks, config, steps
        self._report, self._stop_after = report, stop_after
        self._trials: Trials | None = None
        self._balancers: dict[str, StepCallback] = {}
        self._clock = CpuClock() if is_cpu() else CudaClock()
        self._iteration, self._begin = 0, None
        self._timed: list[tuple[int, Any, Any]] = []  # iteration, and marks at its begin and end

    def begin_step(self, iteration: int, config: Any) -> None:
        if self._trials is None:
            self._start(iteration)
        assert self._trials is not None
        self._iteration, left_out = iteration, self._trials.left_out(iteration)
        for name, balancer in self._balancers.items():
            balancer.left_out = name in left_out
        self._begin = self._clock.mark() if self._trials.is_trial(iteration) else None

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

    def _start(self, iteration: int) -> None:
        known = [callback for callback in self._callbacks if isinstance(callback, StepCallback)]
        self._balancers = {callback.trial_name: callback for callback in known if callback.trial_name}
        self._trials = Trials(list(self._balancers), self._config, steps=self._steps, first=iteration)
        if self._config.steps and self._stop_after is not None:
            self._stop_after(iteration + self._config.steps - 1)

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
        verdicts = {verdict.name: verdict for verdict in self._trials.decide()}
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
