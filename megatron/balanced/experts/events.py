"""The event of one balanced MoE layer and step, for the report's event log."""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch

from balancing.report import event, imbalance
from megatron.balanced.experts.gradients import ExpertChunk
from megatron.balanced.experts.moe_layer import BalancedMoELayer
from megatron.balanced.experts.planning import LayerPlan

__all__ = ["LayerMilliseconds", "layer_event"]


class LayerMilliseconds(NamedTuple):
    """Milliseconds of a layer in a step.

    exposed: computation waited for the layer's replicas.
    plan: planning of the layer.
    plan_wait: the step waited for the layer's plan.
    """

    exposed: float
    plan: float
    plan_wait: float


def layer_event(
    iteration: int,
    layer: BalancedMoELayer,
    chunk: ExpertChunk,
    plan: LayerPlan,
    planner: str,
    spent: LayerMilliseconds,
) -> Callable[[], dict[str, Any]]:
    """A function that makes the event of a layer. Copies of loads to the host start here. Call the function once the
    device has passed the end of the step, so that the host does not wait for them.

    iteration: the iteration that has ended, from 0.
    layer: the layer, with the loads of the iteration's micro-batches.
    chunk: its model chunk, whose slots know what was sent.
    plan: the layer's placement and history.
    planner: name of the planner, as in the config of experts.
    spent: milliseconds of the layer.
    """
    homes, replicas = layer.num_local_experts, layer.placement.replicas
    loads, served = _copy(layer.loads), _copy(layer.served) if layer.served else None
    position = layer.experts.position
    late = 0 if chunk.late is None else chunk.late.copies[position]
    known = {
        "plan_ms": spent.plan,
        "apply_ms": spent.exposed,
        "moved_bytes": sum(slots.moved_bytes(position) for slots in chunk.all_slots),
        "slot_bytes": sum(slots.memory_bytes for slots in chunk.all_slots),
        "action": "replicate" if replicas or late else "keep",
        "reason": "" if replicas or late else _why_none(layer, iteration),
        "layer": layer.index,
        "planner": planner,
        "drift": plan.drift,
        "plan_age": plan.age,
        "replicas": replicas,
        "late_copies": late,
        "plan_wait_ms": spent.plan_wait,
    }

    def line() -> dict[str, Any]:
        at_home = np.asarray(loads).sum(1).reshape(len(loads), -1, homes).sum(2)  # [micro-batch, rank]
        tokens = at_home if served is None else np.asarray(served)
        return event(
            iteration + 1,
            "experts",
            "layer",
            imbalance_before=float(np.mean([imbalance(tokens_by_rank) for tokens_by_rank in at_home])),
            imbalance_after=float(np.mean([imbalance(tokens_by_rank) for tokens_by_rank in tokens])),
            tokens_per_rank=tokens.sum(0),
            **known,
        )

    return line


def _copy(values: list[Any]) -> Any:
    """The arrays of all micro-batches on the host, those from a GPU once the device has passed this point."""
    if isinstance(values[0], torch.Tensor):
        return torch.stack(values).to("cpu", non_blocking=True)
    return np.stack(values)


def _why_none(layer: BalancedMoELayer, iteration: int) -> str:
    if layer.frozen:
        return "frozen"
    return "nothing to gain" if iteration else "no load seen yet"
