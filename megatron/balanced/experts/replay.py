"""Routing that is known before a step runs it, as in reinforcement learning, where the rollout has routed the tokens.

Megatron-LM replays recorded experts with `--moe-enable-routing-replay` (`megatron.core.transformer.moe.router_replay`).
Whoever sets the experts of a step's micro-batches there can tell them here first, all of them. Replicas are then placed
by the load that the step will have, and nothing is predicted.
"""

from collections.abc import Sequence
from typing import Any

import torch
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.moe.router_replay import RouterReplay

from megatron.balanced.experts.moe_layer import BalancedMoELayer

__all__ = ["take_known_loads", "will_route"]

_known: list[list[Sequence[torch.Tensor]]] = []  # of the next step, at most one


def will_route(experts: Sequence[Sequence[torch.Tensor]]) -> None:
    """Tell the experts of all micro-batches of the next step; all ranks do, or none.

    To be called before the step's schedule, for instance from `begin_step` of a callback
    (`megatron.balanced.shared.callbacks`).

    experts: [micro-batch][router] -> int [token, k], of this rank. Routers are those of
        `RouterReplay.global_router_replay_instances`, in that order, as in `RouterReplay.set_replay_data`.

    Raises ValueError where there are not as many routers.
    """
    routers = len(RouterReplay.global_router_replay_instances)
    if not routers:
        raise ValueError("no router replays; add --moe-enable-routing-replay")
    for number, of_routers in enumerate(experts):
        if len(of_routers) != routers:
            raise ValueError(f"micro-batch {number} has the experts of {len(of_routers)} routers, not of {routers}")
    _known[:] = [list(experts)]


def take_known_loads(layers: Sequence[BalancedMoELayer]) -> list[list[Any]] | None:
    """Loads of the step that begins, [layer][micro-batch] -> int [source_rank, expert]; None where none was told.

    layers: MoE layers of this rank. Collective over the ranks that route together, if it was told.
    """
    if not _known:
        return None
    (micro_batches,) = _known
    _known.clear()
    if not layers:
        return []
    at = [RouterReplay.global_router_replay_instances.index(layer.router.router_replay) for layer in layers]
    width = layers[0].config.num_moe_experts
    counts = torch.stack(
        [
            torch.stack([torch.bincount(given[place].flatten().long(), minlength=width) for given in micro_batches])
            for place in at
        ]
    )  # [layer, micro-batch, expert]
    dispatcher = layers[0].token_dispatcher
    gathered = gather_from_sequence_parallel_region(
        counts.to(layers[0].router.weight.device).flatten(), group=dispatcher.tp_ep_group
    )
    loads = gathered.view(-1, dispatcher.tp_size, *counts.shape).sum(1).cpu().numpy()
    return [[loads[:, layer, number] for number in range(len(micro_batches))] for layer in range(len(layers))]
