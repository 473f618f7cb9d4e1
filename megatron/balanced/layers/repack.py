"""When a running pipeline gets shorter, and what is asked of it then.

`balancing.layers.repack` weighs sizes by their simulated step; here it is given what this job has measured and what the
user allows. Megatron-LM keeps losses on the last stage until it logs them, so stages get fewer right after a log line.
"""

import argparse

import numpy as np
import torch
from megatron.core.num_microbatches_calculator import get_num_microbatches

from balancing.launch import detect_launch
from balancing.layers import LayerSeconds, StagePlan, choose_repack, repack_options
from balancing.layers.config import LayerConfig
from balancing.layers.from_report import RecordedRun, estimate_memory
from megatron.balanced.cpu.device import is_cpu

__all__ = ["Repacker"]

_SHARE_OF_DEVICE = 0.9  # of a GPU's memory that stages may fill: some goes to buffers of collectives


class Repacker:
    """One on each rank; all decide alike. reason: of the last choice."""

    def __init__(self, args: argparse.Namespace, config: LayerConfig) -> None:
        self.reason = ""
        self._args, self._config = args, config
        # A share of the throughput at the start, or of the least that is left of it after a release.
        self._floor = config.repack_throughput_floor or np.finfo(float).tiny
        self._plan: StagePlan | None = None

    def due(self, iteration: int) -> StagePlan | None:
        """The shorter plan that is to be in force from this iteration on, if there is one."""
        if self._plan is None or iteration % self._args.log_interval:
            return None
        plan, self._plan = self._plan, None
        return plan

    def consider(self, cost: LayerSeconds, plan: StagePlan, peaks: np.ndarray) -> bool:
        """Choose a number of stages, if the user asks for it. A choice is made once, and stands until `due` has given
        it out. peaks: the most bytes that a rank of each stage has held. Returns whether there are to be fewer."""
        if not self._config.repacks or self._plan is not None or plan.stages <= self._config.repack_min_stages:
            return False
        per_stage = self._args.world_size // plan.stages
        per_node = detect_launch().ranks_per_node
        limit = self._limit()
        run = RecordedRun(cost, plan, get_num_microbatches(), per_stage, per_node, 0.0, peaks)
        options = repack_options(
            cost,
            plan,
            run.micro_batches,
            memory=None if limit is None else estimate_memory(run),
            memory_limit=limit,
            ranks_per_stage=per_stage,
            ranks_per_node=per_node,
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
        """Bytes a rank may use; None where nobody said and no device can be asked."""
        if self._config.repack_memory_limit is not None:
            return self._config.repack_memory_limit * 1e9
        if is_cpu():  # ranks share the machine's memory
            return None
        return _SHARE_OF_DEVICE * torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
