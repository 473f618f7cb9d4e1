"""Routing that is known before a step runs it, as in reinforcement learning, where the rollout has routed the tokens.

`ExpertBalancer.will_route` takes the loads of the next schedule. Replicas are then placed for them, without prediction.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region

from megatron.balanced.experts.moe_layer import BalancedMoELayer

__all__ = ["check_loads", "count_routed", "gather_loads"]


def count_routed(experts: torch.Tensor, width: int) -> torch.Tensor:
    """The load of one micro-batch: int64 [layer, expert].

    experts: int [token, layer, k], the experts of each token, as rollouts return them.
    width: experts of a layer.
    """
    experts_by_layer = experts.long().transpose(0, 1).flatten(1)
    empty = torch.zeros(len(experts_by_layer), width, dtype=torch.int64, device=experts.device)
    return empty.scatter_add(1, experts_by_layer, torch.ones_like(experts_by_layer))


def check_loads(loads: Sequence[torch.Tensor], layers: int, width: int) -> None:
    """Raise ValueError unless the loads of `ExpertBalancer.will_route` fit a model of `layers` layers with `width`
    experts."""
    for number, load in enumerate(loads):
        if tuple(load.shape) != (layers, width):
            raise ValueError(
                f"will_route got a load of shape {[*load.shape]} for micro-batch {number}; it takes [layer, expert], "
                f"{[layers, width]}, with a row for every layer of the whole model"
            )


def gather_loads(layers: Sequence[BalancedMoELayer], loads: Sequence[torch.Tensor]) -> list[list[Any]]:
    """Loads of all ranks that route together, [layer][micro-batch] -> int [source_rank, expert]. All of them call it.

    layers: MoE layers of this rank, at least one.
    loads: the loads of this rank, [micro-batch] -> int [layer of the model, expert].
    """
    here = torch.tensor([layer.index for layer in layers])
    mine = torch.stack([load.cpu()[here] for load in loads])  # [micro-batch, layer, expert]
    dispatcher = layers[0].token_dispatcher
    gathered = gather_from_sequence_parallel_region(
        mine.to(layers[0].router.weight.device, torch.int64).flatten(), group=dispatcher.tp_ep_group
    )
    counts: np.ndarray = gathered.view(-1, dispatcher.tp_size, *mine.shape).sum(1).cpu().numpy()
    return [[counts[:, number, layer] for number in range(len(loads))] for layer in range(len(layers))]
