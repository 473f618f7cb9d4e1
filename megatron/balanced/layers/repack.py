"""Decides when a running pipeline gets shorter, and to how many stages.

`balancing.layers.repack` simulates a step for each number of stages. This module gives it the measurements of the job
and the user's limits. Megatron-LM keeps losses on the last stage until it logs them, so the pipeline gets shorter right
after a log line.
"""

import numpy as np

from balancing.launch import detect_launch
from balancing.layers import LayerSeconds, StagePlan, choose_repack, repack_options
from balancing.layers.config import LayerConfig
from balancing.layers.from_report import RecordedRun, estimate_memory
from megatron.balanced.layers.planning import usable_memory
from megatron.balanced.shared.micro_batches import get_num_microbatches

__all__ = ["Repacker"]


class Repacker:
    """One on each rank; all make the same decision. The attribute `reason` explains the last one."""

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

    def consider(self, cost: LayerSeconds, plan: StagePlan, peaks: np.ndarray, ranks: int) -> bool:
        """Choose a shorter plan if the user allows it. `due` returns it at the next log line.

        cost: measured seconds of the layers.
        plan: the current plan.
        peaks: float array [stage], peak bytes of a rank of each stage.
        ranks: number of ranks of the job.

        Returns whether the pipeline will get shorter.
        """
        if not self._config.repacks or self._plan is not None or plan.stages <= self._config.repack_min_stages:
            return False
        per_stage = ranks // plan.stages
        per_node = detect_launch().ranks_per_node
        limit = self._limit()
        run = RecordedRun(cost, plan, get_num_microbatches(), per_stage, per_node, memory=peaks)
        options = repack_options(
            run,
            memory=None if limit is None else estimate_memory(run),
            memory_limit=limit,
            min_stages=self._config.repack_min_stages,
        )
        chosen = choose_repack((each for each in options if each.gpu_time < 1), self._floor)
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

    def _limit(self) -> float | None:
        """Bytes that a rank may use; None if the user gave no limit and there is no device with a memory of its own."""
        if self._config.repack_memory_limit is not None:
            return self._config.repack_memory_limit * 1e9
        usable = usable_memory()
        return usable if usable < np.inf else None
