"""Pro-Prophet's planner (arXiv 2411.10003, Algorithm 1): the heaviest device sends its expert to those that use it.

Each step takes the expert of the heaviest device and replicates it on all devices but the n with the fewest tokens for
it. A replica serves only the tokens that start on its own device, which then travel nowhere. The search stops when
loads are even to within alpha times the mean (Eq. 7), or when the heaviest device's expert has been used, and keeps the
prefix of steps with the least estimated time, Eq. 6, or Eq. 8 for a planner that knows what the scheduler hides.

The paper has one expert on a device, leaves n to the user, and does not bound the memory of replicas. Here

- a device has several experts: the heaviest device's expert that others send the most tokens to, of those not yet used;
- n is tried from none to all but two of the devices, doubling, if it is not given;
- a device takes no more replicas than it has slots: one without a free slot counts among those left out;
- the home is never among the n, since it holds the expert anyway.
"""

from dataclasses import dataclass

import numpy as np

from balancing.cluster import Cluster
from balancing.experts.cost import ExpertShape

__all__ = ["paper_seconds", "prophet_slots"]


def prophet_slots(
    load: np.ndarray,
    home: np.ndarray,
    cluster: Cluster,
    slots: int,
    *,
    shape: ExpertShape | None = None,
    excluded: int | None = None,
    alpha: float = 0.05,
    hidden_under: float | None = None,
) -> np.ndarray:
    """One layer's plan: int64 [rank, slot], the expert in each slot, -1 in empty ones.

    load: [source_rank, expert], tokens. home: int [expert]. shape: without it the estimate is the largest load alone.
    excluded: n, or None to search for it. alpha: unevenness (largest minus smallest load, over the mean) that is good
    enough. hidden_under: seconds of forward compute that hide transfers besides the experts' own (Eq. 8), None for Eq.
    6.

    Raises ValueError for an n that leaves no device to send to, and a negative alpha.
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
    """0, 1, 2, 4 and so on up to `most`, and `most`."""
    return sorted({0, max(0, most), *(1 << power for power in range(16) if 1 << power < most)})


@dataclass(frozen=True)
class _Estimate:
    """T' of a set of loads: Eq. 6 or 8, or the largest load where no sizes are known."""

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
        """The mean over pairs of ranks, which is all the paper's model knows."""
        if self.ranks == 1:
            return 1.0  # nothing travels
        others = [self.cluster.bandwidth(0, rank) for rank in range(1, self.ranks)]
        return sum(others) / len(others)


def _search(
    load: np.ndarray, home: np.ndarray, slots: int, excluded: int, alpha: float, estimate: _Estimate
) -> tuple[float, np.ndarray]:
    """Algorithm 1 for one n: the least estimate and the slots that give it."""
    ranks, experts = load.shape
    total, own = load.sum(0), load[home, np.arange(experts)]
    computed = np.bincount(home, weights=total, minlength=ranks)
    received = np.bincount(home, weights=total - own, minlength=ranks)
    enough = alpha * computed.sum() / ranks
    used, used_slots = np.zeros(experts, dtype=bool), np.zeros(ranks, dtype=np.int64)
    placed = np.full((ranks, slots), -1)
    best, best_placed, copies = estimate(received, computed, 0), placed.copy(), 0
    while computed.max() - computed.min() >= max(enough, 1):
        device = int(computed.argmax())
        candidates = np.flatnonzero((home == device) & ~used)
        if not candidates.size:
            break
        expert = int(candidates[(total - own)[candidates].argmax()])
        used[expert] = True
        others = np.array([rank for rank in range(ranks) if rank != device])
        # The n with the fewest tokens stay out; of equals those with the higher number.
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
        copies += 1 + len(chosen)  # the paper counts the home among the D - n
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
    """The paper's T', Eq. 6, or Eq. 8 with `hidden_under`: seconds of a layer on D devices with one bandwidth.

    received, computed: [device], inputs that a device receives from others, and computes. copies: s (D - n), the number
    of devices that experts are sent to, summed over experts. bandwidth: bytes/s. throughput: inputs/s of expert compute
    on one device. hidden_under: seconds of other forward compute in the block, T_FNEC; twice that backward.
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
