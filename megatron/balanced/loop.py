"""Balancers for any loop that trains with `megatron.core`. They take a finished model and wrap the loop's schedule.

Every loop calls a schedule of `megatron.core.pipeline_parallel.schedules`. `Balancers.schedule` wraps that call in
`megatron.balanced.run.step`. Layer balancing also needs `Balancers.after_step` after each optimizer step, so that
layers never move while gradients are accumulated. Nothing else in the loop changes.
`examples/plain_loop.py` is an example.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from megatron.core.pipeline_parallel import schedules
from megatron.core.utils import get_model_config

from balancing.trials import ClockGain, TrialConfig
from megatron.balanced.experts.balancer import ExpertBalancer
from megatron.balanced.layers.balancer import LayerBalancer
from megatron.balanced.run import Run, step
from megatron.balanced.sequences.balancer import SequenceBalancer
from megatron.balanced.shared.callbacks import StepCallback
from megatron.balanced.shared.counters import keep_counters_exact
from megatron.balanced.shared.loss_scale import share_loss_scale
from megatron.balanced.shared.model_checks import unmark_model
from megatron.balanced.trials.step_trials import StepTrials

__all__ = ["Balancers", "ExpertBalancer", "LayerBalancer", "SequenceBalancer"]

_SCHEDULES = (
    "forward_backward_no_pipelining",
    "forward_backward_pipelining_without_interleaving",
    "forward_backward_pipelining_with_interleaving",
)


class Balancers:
    """The balancers of one model. A process with several models, such as an actor and a critic, makes one for each.

    before: called with the keyword arguments of each balanced schedule before it begins, and may replace them; None
        for nothing. A loop whose micro-batches hold replayed routing calls `will_route` here.
    trials: leave balancers out of single schedules, to say by the clock what they gain and to switch off what does not
        pay (`balancing.trials`). None: no trials.

    `run` has the balancers and what the loop passes to them.
    """

    def __init__(
        self,
        *balancers: StepCallback,
        before: Callable[[dict[str, Any]], None] | None = None,
        trials: TrialConfig | None = None,
    ) -> None:
        kinds = [type(balancer) for balancer in balancers]
        if len({*kinds}) < len(kinds):
            raise ValueError(f"{kinds[0].__name__} is given twice; a model has one balancer of a kind")
        self._before = before
        moving = [balancer for balancer in balancers if isinstance(balancer, LayerBalancer)]
        self.run = run = Run(first=[balancer.observer for balancer in moving])
        self._trials = None if trials is None else StepTrials(run, trials, moves=bool(moving))
        run.first += [] if self._trials is None else [self._trials]
        for chunk in (chunks := [chunk for balancer in balancers for chunk in getattr(balancer, "chunks", ())]):
            keep_counters_exact(chunk.modules())
        self._chunks = set(map(id, chunks))
        run.attach([*{id(chunk): chunk for chunk in chunks}.values()])
        for balancer in balancers:
            run.add(balancer)
        run.next_step = self._steps = 0  # of the optimizer
        self._installed: list[tuple[str, Any]] = []  # schedules of megatron.core: name, and what is there now

    def schedule(self, forward_backward_func: Callable) -> Callable:
        """Wrap a schedule with the balancers. Calls with `forward_only` and calls for other models run unchanged."""

        @functools.wraps(forward_backward_func)
        def balanced(*args: Any, **kwargs: Any) -> Any:
            plain = balanced.__wrapped__  # another model's `close` may have changed it
            if kwargs.get("forward_only") or id(_first(kwargs["model"])) not in self._chunks:
                return plain(*args, **kwargs)
            if self._before is not None:
                self._before(kwargs)
            config = get_model_config(_first(kwargs["model"]))
            share_loss_scale(config.grad_scale_func)
            self.run.schedule, self.run.data = plain, kwargs.get("data_iterator")
            self.run.micro_batches = kwargs["num_microbatches"]
            with self.run.may_fail():
                result = step(self.run, config, lambda schedule: schedule(*args, **kwargs))
            self.run.iteration += 1
            return result

        return balanced

    def after_step(self) -> None:
        """Call this after each optimizer step if layers are balanced. They may move when the next schedule begins."""
        self._steps += 1
        self.run.next_step = self._steps

    def install(self) -> None:
        """Wrap the schedules inside `megatron.core`, for a loop whose code you cannot edit. Call it before the loop
        looks up its schedule. Raises ValueError if the balancers are installed already."""
        if self._installed:
            raise ValueError("the balancers are installed already; close() them first")
        for name in _SCHEDULES:
            self._installed.append((name, self.schedule(getattr(schedules, name))))
            setattr(schedules, *self._installed[-1])

    def will_route(self, loads: Sequence[Any]) -> None:
        """Announce the routing of the next training schedule, as `ExpertBalancer.will_route` does."""
        self.run.will_route(loads)

    def release(self) -> None:
        """Free the memory of replica slots until `restore`, for example for a rollout. All ranks call it together."""
        for balancer in self.run.balancers:
            if isinstance(balancer, ExpertBalancer):
                balancer.release()

    def restore(self) -> None:
        """Allocate the slots again. All ranks call it together."""
        for balancer in self.run.balancers:
            if isinstance(balancer, ExpertBalancer):
                balancer.restore()

    @property
    def gains(self) -> dict[str, ClockGain]:
        """What each balancer gained by the clock in all trials so far, and "together" if there are several."""
        return {} if self._trials is None else self._trials.gains

    def close(self) -> None:
        """Undo `install` and free the balancers' memory. The model is plain from now on."""
        self._chunks.clear()  # wrapped schedules that others wrapped again, or looked up, run unchanged from now on
        while self._installed:
            name, ours = self._installed.pop()
            over = getattr(schedules, name)  # of another model, if it has been installed since
            if over is ours:
                setattr(schedules, name, ours.__wrapped__)
            while over is not None and over.__dict__.get("__wrapped__") is not ours:
                over = over.__dict__.get("__wrapped__")
            if over is not None:
                over.__wrapped__ = ours.__wrapped__
        for balancer in self.run.balancers:
            if isinstance(balancer, ExpertBalancer | SequenceBalancer | LayerBalancer):
                balancer.close()
            unmark_model(type(balancer).__name__, getattr(balancer, "chunks", ()))


def _first(model: Any) -> torch.nn.Module:
    return model[0] if isinstance(model, list) else model
