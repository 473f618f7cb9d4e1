"""Replicas of experts where one CUDA graph holds all passes of an iteration (`megatron.balanced.experts.graphs`)."""

from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from balancing.experts.config import ExpertConfig
from megatron.balanced.experts.balancer import ExpertBalancer
from megatron.balanced.experts.gradients import ExpertChunk
from megatron.balanced.experts.graphs import check_kernels
from megatron.balanced.experts.moe_layer import BalancedMoELayer
from megatron.balanced.shared.captured_schedule import drop_graph, graph_of_iterations

__all__ = ["CapturedExpertBalancer"]


class CapturedExpertBalancer(ExpertBalancer):
    """An `ExpertBalancer` whose iterations are captured. Placements change every `plan_interval` iterations, and the
    graph is then captured anew. Trials do not leave it out: each step without replicas would need a capture."""

    name = None  # type: ignore[assignment]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._first = 0  # the first iteration of the run
        self._has_begun = False
        self._awaits = False  # placements that were planned since the last iteration
        check_kernels(self._layers())

    def _planner_config(self) -> ExpertConfig:
        """Loads are only submitted when a plan is due."""
        return replace(self.config, plan_interval=1)

    def begin_step(self, iteration: int, config: Any) -> None:
        """Drop the graph if a placement has changed on any rank, since all ranks capture together."""
        super().begin_step(iteration, config)
        if not self._has_begun:
            self._has_begun, self._first = True, iteration
            graph_of_iterations(self.run.schedule, self.chunks, super()._begin_passes)
        elif self._awaits:
            self._awaits = False
            changed = any(layer.placement != self._plans[layer].placed for layer in self._layers())
            anywhere = torch.tensor([changed], dtype=torch.int32, device=torch.cuda.current_device())
            dist.all_reduce(anywhere, op=dist.ReduceOp.MAX)
            if anywhere.item():
                drop_graph(self.run.schedule, "training")

    def _is_due(self, iteration: int) -> bool:
        """Whether replicas are placed after `iteration`."""
        return iteration == self._first or (iteration + 1) % self.config.plan_interval == 0

    def _begin_passes(self) -> None:
        """Nothing: an iteration that is captured or runs without a graph begins them. Transfers that start there are
        part of the graph."""

    def end_schedule(self) -> None:
        super().end_schedule()
        if self._is_due(self._iteration):
            self._awaits = True
            for chunk in self._chunk_at.values():
                for layer in chunk.layers:
                    overlap = self._overlap(chunk, layer)
                    self._planner.submit(layer, self._plans[layer], layer.loads, self._iteration + 1, overlap)

    def _submit(self, chunk: ExpertChunk, layer: BalancedMoELayer, load: Any) -> None:
        """Nothing: loads are submitted once the schedule has ended."""
