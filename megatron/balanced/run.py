"""A training run, and the order of its steps.

Megatron-LM's trainer (`megatron.balanced.trainer.train_step`) and `Balancers` of other loops (`megatron.balanced.loop`)
call the same `step`.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from megatron.balanced.shared.callbacks import StepCallback
from megatron.balanced.shared.job import Job

__all__ = ["Run", "Trained", "step"]


def step(run: "Run", config: Any, train: Callable[[Callable], Any]) -> Any:
    """One step of training, with all callbacks. All ranks of the job call it together.

    config: the config of the model, which the schedule reads.
    train: the loop's own part: takes the schedule, calls it, and steps the optimizer if the loop does so in one call.

    Returns what `train` returns.
    """
    # 1. The report's clock starts, trials choose which balancers the step leaves out, and the model may change.
    for callback in run.first:
        callback.begin_step(run.iteration, config)
    active = [balancer for balancer in run.balancers if balancer.name not in run.left_out]
    skipped = [balancer for balancer in run.balancers if balancer not in active]

    # 2. Layers decide, and may move.
    if run.next_step is not None:
        number, run.next_step = run.next_step, None
        for balancer in run.balancers:
            balancer.between_steps(number)

    # 3. Plans that were made meanwhile are adopted, and compared over ranks.
    for balancer in active:
        balancer.adopt_plans()

    # 4. The step begins.
    for balancer in skipped:
        balancer.skip_step()
    for callback in [*active, *run.last]:
        callback.begin_step(run.iteration, config)

    # 5. The schedule runs all passes, after `begin_schedule`.
    # 6. Gradients are reduced: `end_schedule`.
    # 7. The optimizer steps, in a loop whose `train` does that. It does so later in others.
    run.result = train(run.around(run.schedule))

    # 8. What was measured is reported.
    for callback in run.taking_part(reports=True):
        callback.end_step()
    run.left_out = frozenset()
    return run.result


class Trained(NamedTuple):
    """How far the training was when this run began."""

    steps: int
    samples: int


class Run:
    """What a loop has, and who takes part in its steps. One on each rank for each model.

    first: callbacks whose steps begin before those of the balancers: the report, trials, and those that change the
        model.
    last: callbacks whose steps begin after those of the balancers.
    build: functions that make the balancers from the run once the model is there, in the order in which their steps
        begin.
    build_last: makes one more balancer from the run, once the optimizer is there; None for no more.

    job, cluster: sizes of the run and speeds of its hardware; None for defaults.
    report: adds an event to the report; None without one.
    chunks: model chunks of this rank, in their wrappers for data parallelism.
    optimizer, scheduler: those of the model, from the first step on; None in a loop that does not pass them.
    data: iterator over micro-batches, or a list with one for each model chunk.
    micro_batches: number of micro-batches of the step in progress, or of the last one.
    trained: steps and samples before this run, once a checkpoint is loaded; None in a loop that does not say.
    schedule: the schedule of the step in progress, in the loop's own wrappers.
    new_schedule: replaces the loop's own, where process groups have changed since the loop chose it.
    iteration: number (from 0) of the step in progress, or of the next one.
    next_step: number (from 0) of the optimizer step that begins, where layers have not decided since the last one.
    left_out: `name` of the balancers that the step in progress leaves out.
    left_out_ahead: name of a balancer -> iteration -> whether that step will leave it out, also in other processes.
        Called once a checkpoint is loaded. None if that is not known in advance, or if no step leaves out a balancer.
    result: what the loop's own part of the last step has returned.
    """

    def __init__(
        self,
        first: Sequence[StepCallback] = (),
        last: Sequence[StepCallback] = (),
    ) -> None:
        self.first, self.last = list(first), list(last)
        self.balancers: list[StepCallback] = []
        self.build: list[Callable[[Run], StepCallback]] = []
        self.build_last: Callable[[Run], StepCallback] | None = None
        self.job: Job | None = None
        self.cluster: Any = None
        self.report: Callable[[Any], None] | None = None
        self.chunks: list[Any] = []
        self.optimizer: Any = None
        self.scheduler: Any = None
        self.data: Any = None
        self.micro_batches = 0
        self.trained: Callable[[], Trained] | None = None
        self.schedule: Any = None
        self.new_schedule: Callable | None = None
        self.iteration = 0
        self.next_step: int | None = None
        self.left_out: frozenset[str] = frozenset()
        self.left_out_ahead: Callable[[str], Callable[[int], bool]] | None = None
        self.result: Any = None

    @property
    def callbacks(self) -> list[StepCallback]:
        """All callbacks, in the order in which their steps begin."""
        return [*self.first, *self.balancers, *self.last]

    def attach(self, chunks: list[Any]) -> list[Any]:
        """The model has been built. Returns `chunks`, as Megatron-LM's model hooks must."""
        self.chunks = chunks
        for callback in self.callbacks:
            callback.run = self
        for callback in self.first:
            callback.attach(chunks)
        for build in self.build:
            self.add(build(self))
        for callback in self.last:
            callback.attach(chunks)
        return chunks

    def add(self, balancer: StepCallback) -> None:
        """Add a balancer whose steps begin after those of the others."""
        balancer.run = self
        self.balancers.append(balancer)

    def complete(self, optimizer: Any, scheduler: Any) -> None:
        """Make the balancer that needs the optimizer. Called before every step; only the first call has an effect."""
        self.optimizer, self.scheduler = optimizer, scheduler
        if self.build_last is not None:
            build, self.build_last = self.build_last, None
            self.add(build(self))

    def use_schedule(self, schedule: Callable) -> None:
        """Run `schedule` in this step and in later ones in place of the loop's own."""
        self.schedule = self.new_schedule = schedule

    def around(self, schedule: Callable) -> Callable:
        """`schedule` between `begin_schedule` and `end_schedule`."""

        @functools.wraps(schedule)
        def run(*args: Any, **kwargs: Any) -> Any:
            self.begin_schedule()
            result = schedule(*args, **kwargs)
            self.end_schedule()
            return result

        return run

    def begin_schedule(self) -> None:
        for callback in reversed(self.taking_part()):
            callback.begin_schedule()

    def end_schedule(self) -> None:
        for callback in self.taking_part():
            callback.end_schedule()

    def taking_part(self, *, reports: bool = False) -> list[StepCallback]:
        """The callbacks of the step in progress, the last one first.

        reports: without balancers that are left out and called only because the data was made for them.
        """
        return [
            callback
            for callback in reversed(self.callbacks)
            if callback.name not in self.left_out or (callback.follows_data and not reports)
        ]

    @contextlib.contextmanager
    def may_fail(self) -> Iterator[None]:
        """A context of a step. If it raises an exception, the loop may catch that and go on with another one."""
        try:
            yield
        except BaseException:
            for callback in reversed(self.callbacks):
                callback.abandon_schedule()
            self.left_out = frozenset()
            raise

    def will_route(self, loads: Sequence[Any]) -> None:
        """The routing of the next training schedule is known (`ExpertBalancer.will_route`)."""
        for callback in self.taking_part():
            callback.will_route(loads)

    def use_cluster(self, cluster: Any) -> None:
        """All callbacks plan for this `Cluster` of the whole job from now on."""
        for callback in self.callbacks:
            callback.use_cluster(cluster)

    def leave(self) -> None:
        """This rank has left the job. Its callbacks get no further call."""
        self.first, self.balancers, self.last = [], [], []

    def end_training(self) -> None:
        for callback in self.callbacks:
            callback.end_training()
