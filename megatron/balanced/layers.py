"""Layers kept where every pipeline stage costs the same, while Megatron-LM trains."""

import argparse
from typing import Any

import torch
from megatron.training.models.gpt import GPTModelConfig

from balancing.layers.config import LayerConfig
from balancing.layers.stages import StagePlan
from megatron.balanced import step
from megatron.balanced.move import LayerMover

__all__ = ["LayerBalancer"]


class LayerBalancer:
    """A `megatron.balanced.step.StepCallback`. One on each rank; all ranks decide alike."""

    def __init__(self, args: argparse.Namespace, config: LayerConfig, spec: GPTModelConfig) -> None:
        self.mover = LayerMover(args, spec)
        self.iteration = 0
        self._args, self.config = args, config

    def attach(self, chunks: list[torch.nn.Module]) -> list[torch.nn.Module]:
        return self.mover.attach(chunks)

    def begin_step(self, iteration: int, config: Any) -> None:
        self.iteration = iteration
        plan = self.decide()
        if plan is not None and plan.chunks != self.mover.plan.chunks:
            trained = step.trained()
            self.mover.move(plan, trained.optimizer, trained.scheduler)

    def decide(self) -> StagePlan | None:
        return None

    def begin_schedule(self) -> None:
        pass

    def end_schedule(self) -> None:
        pass

    def end_step(self) -> None:
        pass
