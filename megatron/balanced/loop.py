"""Balancing in any loop that trains with `megatron.core`: balancers of a finished model, around the loop's schedule.

Every loop calls a schedule of `megatron.core.pipeline_parallel.schedules`, which is handed the model chunks, the number
of micro-batches and whether it runs forward only. `Balancers.schedule` wraps that call; nothing else of the loop
changes. `examples/plain_loop.py` shows it.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.pipeline_parallel import schedules
from megatron.core.utils import get_model_config

from balancing.cluster import Cluster
from balancing.experts.config import ExpertConfig
from megatron.balanced.experts import balancer as experts
from megatron.balanced.experts.exchange import balance_layers, use_balanced, use_plain
from megatron.balanced.shared.callbacks import StepCallback
from megatron.balanced.shared.job import Job
from megatron.balanced.shared.micro_batches import schedule_of

__all__ = ["Balancers", "ExpertBalancer"]

_SCHEDULES = (
    "forward_backward_no_pipelining",
    "forward_backward_pipelining_without_interleaving",
    "forward_backward_pipelining_with_interleaving",
)


class ExpertBalancer(experts.ExpertBalancer):
    """Replicas of hot experts for a model that exists. Made on all ranks together, before the first step.

    Layers are balanced while a training schedule of `Balancers` runs, and Megatron's at all other times: an evaluation,
    log-probabilities and an export of weights see the plain model.

    chunks: the model chunks of this rank, each in `DistributedDataParallel`.
    config: `replica_slots`, `min_gain` and others.
    job: the run.
    cluster: speeds of the hardware for the cost model; None plans for balance alone.
    report: called on one rank of each expert-parallel group with each event of a step, as a function that gives it.

    Raises ValueError for a model that cannot be balanced, and ReplicaMemoryError, on all ranks, where slots do not fit.
    """

    def __init__(
        self,
        chunks: Sequence[torch.nn.Module],
        config: ExpertConfig | None = None,
        *,
        job: Job,
        cluster: Cluster | None = None,
        report: Callable[[Callable[[], dict[str, Any]]], None] | None = None,
    ) -> None:
        for chunk in chunks:
            if not isinstance(chunk, DistributedDataParallel):
                raise ValueError(
                    f"a model chunk of class {type(chunk).__name__} cannot be balanced; wrap it in megatron.core's "
                    "DistributedDataParallel first"
                )
        super().__init__(job, config or ExpertConfig(enabled=True), cluster, report)
        self._exchanged = balance_layers(chunks, self.config.replica_slots)
        if not self._exchanged:
            raise ValueError("the model has no MoE layer of megatron.core that is not balanced yet; drop the balancer")
        self.attach(list(chunks))
        model = get_model_config(chunks[0])
        if model.grad_sync_func is not None:  # taken from the chunks before the balancer was there
            functions = [chunk.start_grad_sync for chunk in chunks]
            model.grad_sync_func = functions if isinstance(model.grad_sync_func, list) else functions[0]
        use_plain(self._exchanged)

    @property
    def chunks(self) -> list[torch.nn.Module]:
        """The model chunks that it balances."""
        return self._model

    def release(self) -> None:
        """Free the memory of replica slots until `restore`, for an offload or a rollout. All ranks call it together."""
        for chunk in self._chunk_at.values():
            chunk.take_off()
        self._chunk_at = {}

    def restore(self) -> None:
        """Allocate the slots again, for the placements that there were. All ranks call it together."""
        use_balanced(self._exchanged)
        self.layers_moved()
        use_plain(self._exchanged)

    def begin_step(self, iteration: int, config: Any) -> None:
        if not self._chunk_at:
            raise ValueError("the balancer has released its replica slots; call restore() before a training schedule")
        use_balanced(self._exchanged)
        super().begin_step(iteration, config)

    def end_step(self) -> None:
        super().end_step()
        use_plain(self._exchanged)


class Balancers:
    """The balancers of one model. Several models of a process, such as an actor and a critic, have one each."""

    def __init__(self, *balancers: StepCallback) -> None:
        kinds = [type(balancer) for balancer in balancers]
        if len({*kinds}) < len(kinds):
            raise ValueError(f"{kinds[0].__name__} is given twice; a model has one balancer of a kind")
        self._balancers = balancers
        self._chunks = {id(chunk) for balancer in balancers for chunk in getattr(balancer, "chunks", ())}
        self._schedules = 0
        self._installed: list[tuple[str, Callable]] = []  # schedules of megatron.core that are wrapped

    def schedule(self, forward_backward_func: Callable) -> Callable:
        """The schedule with the balancers around it. Calls with forward_only and those of other models pass through."""

        @functools.wraps(forward_backward_func)
        def run(*args: Any, **kwargs: Any) -> Any:
            if kwargs.get("forward_only") or id(_first(kwargs["model"])) not in self._chunks:
                return forward_backward_func(*args, **kwargs)
            with schedule_of(kwargs["num_microbatches"]):
                config = get_model_config(_first(kwargs["model"]))
                for balancer in self._balancers:
                    balancer.begin_step(self._schedules, config)
                for balancer in self._balancers:
                    balancer.begin_schedule()
                result = forward_backward_func(*args, **kwargs)
                for balancer in reversed(self._balancers):
                    balancer.end_schedule()
                for balancer in reversed(self._balancers):
                    balancer.end_step()
            self._schedules += 1
            return result

        return run

    def install(self) -> None:
        """Wrap the schedules of `megatron.core` themselves, for a loop whose call one cannot edit. Schedules that the
        loop has looked up before are not wrapped."""
        if self._installed:
            raise ValueError("the balancers are installed already; close() them first")
        for name in _SCHEDULES:
            self._installed.append((name, getattr(schedules, name)))
            setattr(schedules, name, self.schedule(getattr(schedules, name)))

    def close(self) -> None:
        """Undo `install`, and free what the balancers hold. The model is plain from now on."""
        while self._installed:
            setattr(schedules, *self._installed.pop())
        for balancer in self._balancers:
            if isinstance(balancer, ExpertBalancer):
                balancer.release()


def _first(model: Any) -> torch.nn.Module:
    return model[0] if isinstance(model, list) else model
