"""What the layers of a model are built from, and where its layout is stored. This does not depend on the loop."""

import contextlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout
from megatron.core.transformer.transformer_config import TransformerConfig

from balancing.pipeline.layout import from_layout, to_layout
from balancing.pipeline.pattern import read_pattern
from balancing.pipeline.stage_plan import StagePlan

__all__ = ["LayerSource"]


def _forget(layout: str) -> None:
    """Write the layout nowhere."""


@dataclass
class LayerSource:
    """Where layers of one model come from.

    config: the config of the transformer, shared by all chunks.
    layer_spec: virtual stage of a chunk -> the spec of its layers in the layout of `config`, as for `GPTModel`. Not
        called for hybrid models, whose chunks keep their spec.
    pattern: the pattern of the layers of a hybrid model, in the current layout; None for a GPT model.
    on_layout: called with the string of each new layout, for checkpoints and logs.
    """

    config: TransformerConfig
    layer_spec: Callable[[int | None], Any]
    pattern: str | None = None
    on_layout: Callable[[str], None] = _forget

    @property
    def flag(self) -> str:
        """The flag of Megatron-LM that sets the layers of each stage."""
        return "--pipeline-model-parallel-layout" if self.pattern is None else "--hybrid-layer-pattern"

    def text(self, plan: StagePlan) -> str:
        """The value of `flag` for `plan`."""
        return to_layout(plan) if self.pattern is None else read_pattern(self.pattern).text(plan)

    def read(self, text: str, now: StagePlan) -> StagePlan:
        """The plan of a value of `flag`. Raises ValueError unless it has the layers and stages of the plan `now`."""
        if self.pattern is None:
            return from_layout(text, now.stages, layers=now.layers)
        given = read_pattern(text)
        plan = given.plan(now.stages)
        if not given.has_layers_of(read_pattern(self.pattern)):
            raise ValueError(f"{text} has other layers than the model, {self.pattern}; only move |")
        if plan.virtual != now.virtual:
            raise ValueError(
                f"{text} has {plan.virtual} chunks a stage, and the model {now.virtual}; keep the number of |"
            )
        return plan

    def set_layout(self, plan: StagePlan, chunks: Iterable[torch.nn.Module]) -> None:
        """Write the layout of `plan` to all places that Megatron-LM reads it from.

        chunks: the model chunks of this rank, whose modules' configs are changed.
        """
        text = self.text(plan)
        if self.pattern is not None:
            self.pattern = text
            for chunk in chunks:
                for module in chunk.modules():
                    if hasattr(module, "hybrid_layer_pattern"):
                        module.hybrid_layer_pattern = text
        else:
            layout = PipelineParallelLayerLayout(text, plan.stages)
            layout.validate_layer_layout(plan.layers, plan.tail_layers or None)
            self.config.pipeline_model_parallel_layout = layout
            for chunk in chunks:
                for module in chunk.modules():
                    config = getattr(module, "config", None)
                    if hasattr(config, "pipeline_model_parallel_layout"):
                        config.pipeline_model_parallel_layout = layout
        self.on_layout(text)

    @contextlib.contextmanager
    def without_layers(self, stages: int) -> Iterator[None]:
        """A context in which the layout is that of a pipeline of `stages` stages without layers."""
        before = self.config.pipeline_model_parallel_layout
        if self.pattern is not None:
            self.on_layout("|" * (stages - 1))
        else:
            empty = PipelineParallelLayerLayout("E" + "|" * (stages - 1) + "L", stages)
            self.config.pipeline_model_parallel_layout = empty
        try:
            yield
        finally:
            self.config.pipeline_model_parallel_layout = before
            if self.pattern is not None:
                self.on_layout(self.pattern)
