"""Modelled throughput with hot experts over that of even routing, by the number of micro-batches of an iteration.

Replicas that keep tokens in their node make all-to-alls shorter than even routing does, where every token goes to a
random rank ("forced balance"). Their transfers are paid once an iteration. Replicas are placed from the loads of the
iteration before, in two slots a rank, and each micro-batch is split and costed by itself (`balancing.experts.cost`,
with attention). Loads and machine are those of `benchmarks.experts.emulated_workload`.
"""

from typing import Any

import numpy as np

from balancing.experts import ReplicaPlacement, contiguous_homes, plan_replicas, traffic
from balancing.experts.config import ExpertConfig
from balancing.experts.cost import TransferWindow, layer_cost
from benchmarks.baselines import experts as baselines
from benchmarks.experts.emulated_workload import SHAPE, Loads, Scale

__all__ = ["bound_of_forced_balance", "modelled_seconds", "of_forced_balance"]


def of_forced_balance(loads: Loads, scale: Scale, method: Any, micro_batches: int) -> float:
    """Throughput over that of even loads, of all layers and steps together. Parameters as in `modelled_seconds`."""
    even, own = modelled_seconds(loads, scale, method, micro_batches)
    return even / own


def modelled_seconds(
    loads: Loads, scale: Scale, method: Any, micro_batches: int, slots: int = ExpertConfig().replica_slots
) -> tuple[float, float]:
    """Seconds of even loads, and of these loads with replicas, of all layers, steps and given micro-batches together.

    loads: with few micro-batches, which stand for all of an iteration.
    scale: the machine.
    method: of `plan_replicas`.
    micro_batches: of an iteration.
    slots: most replicas on a rank.
    """
    cluster, hidden = scale.cluster, scale.attention_seconds
    even = own = 0.0
    for now, before, level in zip(loads.now, loads.before, loads.even.now, strict=True):
        for layer in range(now.shape[1]):
            window = TransferWindow(hidden, layer == 0, micro_batches)

            def seconds(load: np.ndarray, plan: ReplicaPlacement, window: TransferWindow = window) -> float:
                return layer_cost(traffic(load, plan), plan, cluster, SHAPE, window).total + 3 * hidden

            def tokens(load: np.ndarray) -> np.ndarray:
                return np.rint(load * scale.tokens).astype(np.int64)

            planned = tokens(before[:, layer].mean(1))
            alone = baselines.plan_replicas(planned, cluster, slots=slots, method="none")
            plan = baselines.plan_replicas(planned, cluster, slots=slots, shape=SHAPE, window=window, method=method)
            for batch in range(now.shape[2]):
                even += seconds(tokens(level[:, layer, batch]), alone)
                own += seconds(tokens(now[:, layer, batch]), plan)
    return even, own


def bound_of_forced_balance(loads: Loads, scale: Scale, micro_batches: int) -> float:
    """Upper bound of what `of_forced_balance` gives for any placements. The parameters are those of that function."""
    cluster, hidden = scale.cluster, scale.attention_seconds
    alone = plan_replicas(loads.now[0][:, 0, 0], cluster, slots=0, method="none")
    even = least = 0.0
    for now, level in zip(loads.now, loads.even.now, strict=True):
        of_even = np.rint(level[:, 0, 0] * scale.tokens).astype(np.int64)
        for layer in range(now.shape[1]):
            window = TransferWindow(hidden, layer == 0, micro_batches)
            load = np.rint(now[:, layer].swapaxes(0, 1) * scale.tokens)
            even += layer_cost(traffic(of_even, alone), alone, cluster, SHAPE, window).total + 3 * hidden
            least += _least_seconds(load, scale, window) + 3 * hidden
    return even / least


def _least_seconds(load: np.ndarray, scale: Scale, window: TransferWindow) -> float:
    """Lower bound of a layer's seconds and micro-batch, the mean of some. load: [micro_batch, source_rank, expert]."""
    cluster, (batches, ranks, experts) = scale.cluster, load.shape
    per_node, nics = cluster.ranks_per_node, cluster.nodes * cluster.nics_per_node
    wanted = load.reshape(batches, cluster.nodes, per_node, experts).sum(2)
    home, expert = contiguous_homes(experts, ranks) // per_node, np.arange(experts)
    at_node = np.stack([wanted.sum(1)[:, home == node].sum(1) for node in range(cluster.nodes)], axis=1)
    wanted[:, home, expert] = 0
    kept = -np.sort(-wanted.reshape(batches, -1), axis=1).cumsum(1)  # by the best copies between nodes, one or more
    leaving = wanted.sum((1, 2))[:, None] - np.pad(kept, ((0, 0), (1, 0)))
    exchange = leaving * SHAPE.hidden * SHAPE.bytes_per_parameter / (nics * cluster.nic_bandwidth)
    copies = np.arange(leaving.shape[1])
    tokens = np.where(copies, load.sum((1, 2))[:, None] / ranks, at_node.max(1)[:, None] / per_node)
    forward = tokens * SHAPE.forward_seconds(cluster)
    sent = np.where(copies, np.maximum(1, copies / nics), 0) * SHAPE.parameters / cluster.nic_bandwidth
    assert window.hidden_under is not None
    hidden = window.hidden_under + (0 if window.first else forward.max(0))
    exposed = np.maximum(0, sent * SHAPE.bytes_per_parameter - hidden)
    exposed += np.maximum(0, sent * SHAPE.gradient_bytes - 2 * hidden)
    return float(((4 * exchange + 3 * forward).mean(0) + exposed / window.micro_batches).min())
