"""Pro-Prophet's planner (arXiv 2411.10003, Algorithm 1), a baseline: replicate experts of the most loaded device.

Each step takes an expert of the most loaded device and replicates it on all devices except the n with the fewest tokens
for it. A replica serves only the tokens of its own device, so these tokens are not sent. The search stops when loads
are balanced to within alpha times the mean (Eq. 7), or when the most loaded device's experts have all been used. Of all
prefixes of the steps, the one with the least estimated time is chosen, by Eq. 6, or by Eq. 8 with a scheduler.

The paper has one expert a device, leaves n to the user, and does not bound the memory of replicas. Here

- a device has several experts. Of those not yet used, the one with the most tokens from other devices is taken;
- n is searched unless it is given: 0, 1, 2, 4, ... up to the number of devices minus two;
- a device takes no more replicas than it has slots. A device without a free slot gets no replica;
- the home is never among the n, since it holds the expert anyway.
"""

from dataclasses import dataclass

import numpy as np

from balancing.cluster import Cluster
from balancing.experts.cost import ExpertShape
from balancing.experts.placement import ReplicaPlacement
from balancing.experts.planners.problem import Problem

__all__ = ["paper_seconds", "plan_prophet", "prophet_slots"]


def plan_prophet(loads: np.ndarray, problem: Problem) -> list[ReplicaPlacement]:
    """Plans each layer by `prophet_slots`, with a scheduler if transfers are hidden."""
    where, costs = (problem.home, problem.cluster, problem.slots), (problem.shape, problem.window.hidden_under)
    return [problem.placement(prophet_slots(load, *where, *costs), "own") for load in loads]


def prophet_slots(
    load: np.ndarray,
    home: np.ndarray,
    cluster: Cluster,
    slots: int,
    shape: ExpertShape | None = None,
    hidden_under: float | None = None,
    *,
    excluded: int | None = None,
    alpha: float = 0.05,
) -> np.ndarray:
    """One layer's plan: int64 [rank, slot], the expert in each slot, -1 in empty ones.

    load: [source_rank, expert], tokens.
    home: int [expert], home ranks.
    cluster: compute and link speeds.
    slots: largest number of replicas on a rank.
    shape: size of an expert; without it, the estimate is the largest load.
    hidden_under: seconds of forward compute outside the experts that hides transfers (Eq. 8); None for Eq. 6.
    excluded: n; None to search for it.
    alpha: imbalance (largest minus smallest load, over the mean) at which the search stops.

    Raises ValueError for an n with which no device gets a replica, and for a negative alpha.
    """
    ranks = len(load)
    if excluded is not None and not 0 <= excluded < max(1, ranks - 1):
        raise ValueError(f"excluded={excluded} must lie between 0 and {max(0, ranks - 2)} for {ranks} ranks")
    if alpha < 0:
        raise ValueError(f"alpha={alpha} must not be negative")
    estimate = _Estimate(cluster, shape, hidden_under, ranks)
    tries = [excluded] if excluded is not None else _doubling(ranks - 2)
    plans = [_search(load, home, slots, left_out, alpha, estimate) for left_out in tries]
    return min(plans, key=lambda plan: plan[0])[1]


def _doubling(most: int) -> list[int]:
    """0, the powers of two below `most`, and `most`."""
    return sorted({0, max(0, most), *(1 << power for power in range(16) if 1 << power < most)})


@dataclass(frozen=True)
class _Estimate:
    """The estimated seconds T' (Eq. 6 or 8) for given loads; the largest load in tokens if `shape` is None."""

    cluster: Cluster
    shape: ExpertShape | None
    hidden_under: float | None
    ranks: int

    def __call__(self, received: np.ndarray, computed: np.ndarray, copies: int) -> float:
        if self.shape is None:
            return float(computed.max())
        return paper_seconds(
            received,
            computed,
            copies,
            bandwidth=self._bandwidth(),
            throughput=1 / self.shape.forward_seconds(self.cluster),
            input_bytes=self.shape.hidden * self.shape.bytes_per_parameter,
            parameter_bytes=self.shape.weight_bytes,
            gradient_bytes=self.shape.parameters * self.shape.gradient_bytes,
            hidden_under=self.hidden_under,
        )

    def _bandwidth(self) -> float:
        """The bandwidth of the paper's model: the mean over pairs of ranks, in bytes/s."""
        if self.ranks == 1:
            return 1.0  # nothing is sent
        others = [self.cluster.bandwidth(0, rank) for rank in range(1, self.ranks)]
        return sum(others) / len(others)


def _search(
    load: np.ndarray, home: np.ndarray, slots: int, excluded: int, alpha: float, estimate: _Estimate
) -> tuple[float, np.ndarray]:
    """Algorithm 1 for one n. Returns the least estimate and its slots, int [rank, slot]."""
    ranks, experts = load.shape
    total, at_home = load.sum(0), load[home, np.arange(experts)]
    computed = np.bincount(home, weights=total, minlength=ranks)
    received = np.bincount(home, weights=total - at_home, minlength=ranks)
    enough = alpha * computed.sum() / ranks
    used, used_slots = np.zeros(experts, dtype=bool), np.zeros(ranks, dtype=np.int64)
    placed = np.full((ranks, slots), -1)
    best, best_placed, copies = estimate(received, computed, 0), placed.copy(), 0
    while computed.max() - computed.min() >= max(enough, 1):
        device = int(computed.argmax())
        candidates = np.flatnonzero((home == device) & ~used)
        if not candidates.size:
            break
        expert = int(candidates[(total - at_home)[candidates].argmax()])
        used[expert] = True
        others = np.array([rank for rank in range(ranks) if rank != device])
        # The n devices with the fewest tokens are left out; among equals, those with higher numbers.
        most_first = others[np.argsort(-load[others, expert], kind="stable")][: max(0, ranks - 1 - excluded)]
        chosen = most_first[used_slots[most_first] < slots]
        if not chosen.size:
            continue
        placed[chosen, used_slots[chosen]] = expert
        used_slots[chosen] += 1
        stay = load[chosen, expert]
        computed[chosen] += stay
        computed[device] -= stay.sum()
        received[device] -= stay.sum()
        copies += 1 + len(chosen)  # the paper counts the home among the D - n devices
        seconds = estimate(received, computed, copies)
        if seconds < best:
            best, best_placed = seconds, placed.copy()
    return best, best_placed


def paper_seconds(
    received: np.ndarray,
    computed: np.ndarray,
    copies: int,
    *,
    bandwidth: float,
    throughput: float,
    input_bytes: float,
    parameter_bytes: float,
    gradient_bytes: float,
    hidden_under: float | None = None,
) -> float:
    """The paper's T': seconds of a layer on D devices with one bandwidth, by Eq. 6, or Eq. 8 with `hidden_under`.

    received: [device], tokens that each device receives from others.
    computed: [device], tokens that each device computes.
    copies: s (D - n), the number of devices that experts are sent to, summed over experts.
    bandwidth: bytes/s.
    throughput: tokens/s of expert compute on one device.
    input_bytes: bytes of one token.
    parameter_bytes: bytes of one expert's weights.
    gradient_bytes: bytes of one expert's gradients.
    hidden_under: seconds of other forward compute in the block, T_FNEC; twice that backward.
    """
    devices = len(computed)
    all_to_all = float(np.max(received)) * input_bytes / bandwidth  # Eq. 1
    forward = float(np.max(computed)) / throughput  # Eq. 2; Eq. 3 is twice that
    trans = copies * parameter_bytes / (devices * bandwidth)  # Eq. 4
    agg = copies * gradient_bytes / (devices * bandwidth)  # Eq. 5
    if hidden_under is not None:
        trans = max(0.0, trans - forward - hidden_under)
        agg = max(0.0, agg - 2 * forward - 2 * hidden_under)
    return 4 * all_to_all + 3 * forward + trans + agg
