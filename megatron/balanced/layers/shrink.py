"""A pipeline that gets shorter while it trains: when and to how many stages, and how its last stages leave the job.

`balancing.layers.repack` simulates a step for each number of stages. `Repacker` gives it the measurements of the job
and the user's limits. The move to the shorter plan is one as all others (`megatron.balanced.layers.mover`), in which
the ranks of the last stages send everything away. How ranks leave is up to the loop (`Shrinking`). Megatron-LM keeps
losses on the last stage until it logs them, so the pipeline gets shorter right after a log line.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection

from balancing.launch import detect_launch
from balancing.layers import LayerSeconds, Release, StagePlan, choose_repack, release_of, repack_options
from balancing.layers.config import LayerConfig
from balancing.layers.recorded import RecordedRun, estimate_memory
from megatron.balanced.layers.move_groups import MoveGroups
from megatron.balanced.shared.callbacks import StepCallback

__all__ = ["Departure", "Repacker", "Shrinking"]


class Departure(Protocol):
    """A release of ranks in progress. leaves: whether this rank leaves."""

    leaves: bool

    def finish(self) -> None:
        """Called when this rank has sent and received everything. Does not return on ranks that leave."""


@dataclass(frozen=True)
class Shrinking:
    """What a loop provides so that its pipeline may get shorter.

    build: builds the model of this rank's stage, in a shorter pipeline.
    depart: begins a release of ranks. Takes the release, the model chunks of this rank, and a function that gathers
        over all ranks.
    renew_schedule: chooses the schedule of micro-batches again, for the process groups after a release.
    """

    build: Callable[[ProcessGroupCollection], torch.nn.Module]
    depart: Callable[[Release, list[torch.nn.Module], Callable[[Any], list[Any]]], Departure]
    renew_schedule: Callable[[], None]

    def begin(
        self,
        stages: tuple[int, int],
        chunks: Sequence[torch.nn.Module],
        callbacks: Sequence[StepCallback],
        gather: Callable[[Any], list[Any]],
    ) -> Departure:
        """Let ranks depart. All ranks call it together. stages: before and after."""
        for callback in callbacks:
            callback.flush()
        release = release_of(dist.get_world_size(), *stages, detect_launch().ranks_per_node)
        return self.depart(release, list(chunks), gather)

    def finish(self, departure: Departure, groups: MoveGroups) -> None:
        """All tensors have arrived. Ranks that leave end here. The others get new process groups."""
        groups.gather(None)  # fails at once if a rank has died; a later death would show only as a timeout
        departure.finish()
        groups.renew()
        self.renew_schedule()


class Repacker:
    """Decides when a pipeline gets shorter, and to how many stages. One on each rank; all make the same decision. The
    attribute `reason` explains the last one.

    log_interval: iterations between two logs of losses. Ranks may leave only after a log.
    """

    def __init__(self, config: LayerConfig, log_interval: int) -> None:
        self.reason = ""
        self._config, self._log_interval = config, log_interval
        # The lowest throughput allowed, as a fraction of that with the current number of stages.
        self._floor = config.repack_throughput_floor or np.finfo(float).tiny
        self._plan: StagePlan | None = None

    def due(self, iteration: int) -> StagePlan | None:
        """The shorter plan from this iteration on, or None."""
        if self._plan is None or iteration % self._log_interval:
            return None
        plan, self._plan = self._plan, None
        return plan

    def consider(
        self, cost: LayerSeconds, plan: StagePlan, peaks: np.ndarray, micro_batches: int, ranks: int, usable: float
    ) -> bool:
        """Choose a shorter plan if the user allows it. `due` returns it at the next log line.

        cost: measured seconds of the layers.
        plan: the current plan.
        peaks: float array [stage], peak bytes of a rank of each stage.
        micro_batches: number of micro-batches of a step.
        ranks: number of ranks of the job.
        usable: bytes that a plan may use on a rank's device; infinite if it has no memory of its own.

        Returns whether the pipeline will get shorter.
        """
        if not self._config.repacks or self._plan is not None or plan.stages <= self._config.repack_min_stages:
            return False
        per_stage, per_node = ranks // plan.stages, detect_launch().ranks_per_node
        limit = self._limit(usable)
        run = RecordedRun(cost, plan, micro_batches, per_stage, per_node, memory=peaks)
        options = repack_options(
            run,
            memory=None if limit is None else estimate_memory(run),
            memory_limit=limit,
            min_stages=self._config.repack_min_stages,
        )
        chosen = choose_repack((size for size in options if size.gpu_time < 1), self._floor)
        if chosen is None:
            return False
        assert chosen.plan is not None
        self._plan = chosen.plan
        self._floor = min(self._floor / chosen.throughput, 1.0)
        self.reason = (
            f"{chosen.stages} of {plan.stages} stages keep {chosen.throughput:.1%} of the throughput for "
            f"{chosen.gpu_time:.1%} of the GPU-hours"
        )
        return True

    def _limit(self, usable: float) -> float | None:
        """Bytes that a rank may use; None if the user gave no limit and there is no device with a memory of its own."""
        if self._config.repack_memory_limit is not None:
            return self._config.repack_memory_limit * 1e9
        return usable if usable < np.inf else None
