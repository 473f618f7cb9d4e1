"""Callbacks of a training run: around each step, around the schedule inside it, and when layers move.

The report and the balancers are callbacks, in every loop (`megatron.balanced.run`). Users pass theirs to
`megatron.balanced.trainer.train.train`.
"""

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

__all__ = ["HeldBytes", "StepCallback"]


class HeldBytes(NamedTuple):
    """Device memory in bytes that a callback needs on this rank, in addition to the model.

    layers: layer number (from 0) -> bytes that move with this layer.
    buffers: bytes that a rank needs whichever layers it has.
    """

    layers: Mapping[int, float] = MappingProxyType({})
    buffers: float = 0.0


def _no_report(event: dict[str, Any]) -> None:
    """Drop an event of a run without a report."""


class StepCallback:
    """Base class of all callbacks. Every method does nothing; override those you need.

    Every rank has its own instance. All methods but `layer_arrived`, `head_arrived` and `abandon_schedule` are called
    on all ranks of the job, so they may communicate. Callbacks are called in the order of registration; `end_schedule`
    and `end_step` in reverse order. An exception in a callback ends the run.

    run: the run (`megatron.balanced.run.Run`), from `attach` on. It has the optimizer, for instance.
    report: adds an event (`balancing.report.event`) to the report of the step in progress, if there is a report.
    name: name of a balancer that a step can leave out without changing a number. Such a step calls its `skip_step`,
        and nothing else. None for others.
    follows_data: whether the schedule needs the balancer in those steps as well, since the data loader has made their
        batches in its terms. `begin_schedule` and `end_schedule` are then called.
    """

    run: Any = None
    report: Callable[[dict[str, Any]], None] = staticmethod(_no_report)
    name: str | None = None
    follows_data = False

    def attach(self, chunks: list[Any]) -> None:
        """The model has been built; the optimizer has not. `chunks`: this rank's model chunks, wrapped for data
        parallelism. The list and the wrappers stay the same for the whole run. Do not replace modules from now on:
        data parallelism refers to them."""

    def begin_step(self, iteration: int, config: Any) -> None:
        """Before iteration `iteration` (from 0). `config` is the model's config, which the schedule reads."""

    def between_steps(self, step: int) -> None:
        """For balancers. The optimizer has stepped, and step `step` (from 0) begins. Layers may move here."""

    def adopt_plans(self) -> None:
        """For balancers. Take the plans that were made since the last step, and compare them over ranks."""

    def skip_step(self) -> None:
        """For balancers. The step runs without this one."""

    def set_aside(self) -> None:
        """The step in progress runs otherwise than the others. Nothing should be learned from what it takes."""

    def will_route(self, loads: Sequence[Any]) -> None:
        """The routing of the next schedule is known (`ExpertBalancer.will_route`)."""

    def begin_schedule(self) -> None:
        """Before the first forward pass. The schedule may begin and end twice within a step: Megatron-LM runs it again
        if a loss looks wrong, or if a rank got more tokens than --moe-expert-rank-capacity-factor allows."""

    def end_schedule(self) -> None:
        """After the last backward pass and gradient reduction, before the optimizer's step."""

    def end_step(self) -> None:
        """After the optimizer's step."""

    def abandon_schedule(self) -> None:
        """The schedule, or a callback around it, has raised an exception that the loop may catch. Undo on this rank
        what `begin_step` and `begin_schedule` have done, if they were called. Do not communicate: other ranks may be
        elsewhere. Not called in Megatron-LM's loop, where an exception ends the run."""

    def layer_arrived(self, layer: Any, chunk: int) -> None:
        """`layer` has moved to model chunk `chunk` of this rank as it was, with its optimizer state. It is new.
        Hooks and attributes of balancers and callbacks have been left out: set yours again."""

    def layers_moved(self) -> None:
        """Layers have moved, perhaps not to or from this rank. Gradient buffers, buckets and optimizer have been
        rebuilt on every rank. The job may have fewer ranks than before. Called after `layer_arrived` and
        `head_arrived`, before the step goes on."""

    def flush(self) -> None:
        """Write what has been measured. Ranks are about to leave the job, and get no further call."""

    def head_arrived(self, model: Any) -> None:
        """`model`, a chunk of this rank, has received the final norm and the head from a rank that has left."""

    def use_cluster(self, cluster: Any) -> None:
        """Plan for this `Cluster` of the whole job from now on. Called between steps, with the same on all ranks."""

    def held(self) -> HeldBytes:
        """The memory that this callback needs, for planners of the free memory. Called between steps and at
        `attach`."""
        return HeldBytes()

    def end_training(self) -> None:
        """After the last step, also when Megatron-LM ends the run early, for instance at --exit-interval. Not called
        when an exception ends it."""
