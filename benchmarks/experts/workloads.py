"""Workloads W0 to W7 of Megatron-LM's pull request 7488, a public benchmark of token imbalance, as loads alone.

    python -m benchmarks.experts.plans --workloads

The pull request says what each workload isolates; we found no numbers in it. The numbers are ours: hot experts have
four times the popularity of others. As in the pull request, popularity follows from workload and step alone, and the
draws from workload, seed and step. Every planner places replicas from the step before, as in training. Ours also places
them from the step itself, to show the cost of stale loads.

The last two are not of the pull request: popularity by Zipf's law and lognormal, both with a busiest rank of twice the
mean, since a lognormal fits recorded loads of DeepSeek-V3 best (`benchmarks.experts.synthetic`).
"""

import zlib
from collections.abc import Callable

import numpy as np

from balancing.cluster import Cluster
from balancing.experts import ReplicaPlacement, traffic
from balancing.experts.config import ExpertConfig
from benchmarks.baselines.experts import plan_replicas
from benchmarks.experts.fewest import BETWEEN, by_link
from benchmarks.experts.synthetic import DISTRIBUTIONS

__all__ = ["WORKLOADS", "compare", "draw", "print_workloads"]

_HEAT, _TOKENS, _PERIOD = 4.0, 65536, 8
_IMBALANCE = 2.0  # of drawn popularity
_PEERS = ("shadow", "prophet", "eplb")
Popularity = Callable[[int, int, int], np.ndarray]  # ranks, experts, step -> [source_rank, expert], not scaled


def _hot(experts: int, hot: np.ndarray | slice) -> np.ndarray:
    popularity = np.ones((1, experts))
    popularity[:, hot] = _HEAT
    return popularity


def _hot_rank(ranks: int, experts: int, rank: int) -> np.ndarray:
    each = experts // ranks
    return _hot(experts, slice(rank * each, (rank + 1) * each))


def _idle_rank(ranks: int, experts: int, step: int) -> np.ndarray:
    popularity = np.ones((1, experts))
    popularity[:, -(experts // ranks) :] = 0
    return popularity


def _drawn(name: str) -> Popularity:
    draw_popularity = DISTRIBUTIONS[name]
    return lambda ranks, experts, step: draw_popularity(experts, ranks, _IMBALANCE, np.random.default_rng(experts))[
        None
    ]


WORKLOADS: dict[str, Popularity] = {
    "W0 balanced": lambda ranks, experts, step: np.ones((1, experts)),
    "W1 hot expert set": lambda ranks, experts, step: _hot(experts, slice(experts // 8)),
    "W2 hot rank": lambda ranks, experts, step: _hot_rank(ranks, experts, 0),
    "W3 spread hot experts": lambda ranks, experts, step: _hot(experts, slice(None, None, 8)),
    "W4 source ragged": lambda ranks, experts, step: np.ones((1, experts)) * np.linspace(0.25, 1.75, ranks)[:, None],
    "W5 zero-expert rank": _idle_rank,
    "W6 rotating hotspot": lambda ranks, experts, step: _hot_rank(ranks, experts, step % ranks),
    "W7 burst": lambda ranks, experts, step: np.ones((1, experts)) if step % _PERIOD else _hot_rank(ranks, experts, 0),
    **{name: _drawn(name) for name in DISTRIBUTIONS},
}


def draw(workload: str, ranks: int, experts: int, seed: int, step: int) -> np.ndarray:
    """Tokens that each rank sends to each expert in a step: int64 [source_rank, expert]."""
    rng = np.random.default_rng([zlib.crc32(workload.encode()), seed, step])
    popularity = np.broadcast_to(WORKLOADS[workload](ranks, experts, step), (ranks, experts))
    weight = popularity.sum(1)
    tokens = np.rint(_TOKENS * weight / weight.mean()).astype(int)
    return np.stack([rng.multinomial(count, row / row.sum()) for count, row in zip(tokens, popularity, strict=True)])


def compare(workload: str, ranks: int, experts: int, steps: int) -> dict[str, tuple[float, float, float]]:
    """Mean and largest max / mean over steps, and mean weighted transfers: without replicas, planned from the step
    before by each peer and by `quota`, which places none without a gain, and by this one from the step itself."""
    cluster = Cluster.sheet("h100-8x400g").relabel(-(-ranks // 8), min(8, ranks))
    slots = ExpertConfig().replica_slots
    found: dict[str, list[tuple[float, int]]] = {name: [] for name in ("none", *_PEERS, "quota", "known")}
    for step in range(1, steps + 1):
        before, now = (draw(workload, ranks, experts, 0, at) for at in (step - 1, step))
        alone = plan_replicas(now, cluster, slots=slots, method="none")
        plans = {"none": alone}
        plans |= {peer: plan_replicas(before, cluster, slots=slots, method=peer) for peer in _PEERS}
        for name, load in (("quota", before), ("known", now)):
            plans[name] = plan_replicas(load, cluster, slots=slots)
        for name, plan in plans.items():
            inside, between = by_link(plan)
            found[name].append((_imbalance(now, plan), inside + BETWEEN * between))
    return {
        name: (float(np.mean([share for share, _ in each])), max(share for share, _ in each),
               float(np.mean([weight for _, weight in each])))
        for name, each in found.items()
    }  # fmt: skip


def _imbalance(load: np.ndarray, plan: ReplicaPlacement) -> float:
    tokens = traffic(load, plan).sum(0)
    return float(tokens.max() / tokens.mean())


def print_workloads(steps: int) -> None:
    """Print the table of 8 and 32 ranks. steps: of each workload."""
    print("max / mean, mean and largest of the steps, and weighted transfers; two slots a rank, planned without costs,")
    print("from the step before; the last column from the step itself")
    print(f"{'':28}{'none':>15}" + "".join(f"{name:>23}" for name in (*_PEERS, "quota", "quota, load known")))
    for ranks, experts in ((8, 64), (32, 128)):
        for name in WORKLOADS:
            none, *replicas = compare(name, ranks, experts, steps).values()
            cells = [f"{mean:.3f} ({most:.3f}), {weight:5.1f}" for mean, most, weight in replicas]
            line = f"EP {ranks:2}, {name:21}{f'{none[0]:.3f} ({none[1]:.3f})':>15}"
            print(line + "".join(f"{cell:>23}" for cell in cells), flush=True)
