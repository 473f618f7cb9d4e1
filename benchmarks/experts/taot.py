"""TAOT's table of transfers (arXiv 2608.03676, table 1), with `quota` and the fewest transfers beside it.

    python -m benchmarks.experts.taot [--draws N]

TAOT balances a load that is known, and counts transfers of experts: 1 inside a node, 3 between nodes. Its table gives
them for four methods, and how much of the initial imbalance each leaves. Beside it stand, for known loads of the same
ranks and imbalance: the least imbalance found for no more transfers than TAOT's; the fewest transfers found for 1 %;
and `quota` without costs, which fills its slots. The paper's loads, numbers of experts and ranks of a node are not
known here: these have 128 experts, by Zipf's law and lognormal, and 8 ranks a node. Nothing is trained.
"""

import argparse
from collections.abc import Callable

import numpy as np

from balancing.cluster import Cluster
from balancing.experts import ReplicaPlacement, plan_replicas, traffic
from balancing.experts.config import ExpertConfig
from benchmarks.command import show_table
from benchmarks.experts.fewest import BETWEEN, by_link, fewest_replicas, weight
from benchmarks.experts.synthetic import DISTRIBUTIONS, sampled_load

__all__ = ["PUBLISHED", "compare"]

# (ranks, initial imbalance in %): weighted transfers of ECHO, LLEP, LPLB and TAOT, and the points that each leaves.
PUBLISHED = {
    (16, 10): ((24, 20, 32, 17), (0.6, 0.6, 1.2, 0.6)),
    (16, 30): ((24, 22, 32, 18), (2.3, 1.3, 1.1, 1.3)),
    (16, 70): ((42, 29, 32, 27), (1.8, 1.1, 0.5, 1.1)),
    (32, 10): ((72, 44, 128, 38), (0.5, 0.5, 1.4, 0.5)),
    (32, 30): ((75, 42, 128, 37), (1.8, 1.6, 2.4, 1.6)),
    (32, 70): ((74, 40, 128, 33), (3.6, 3.3, 7.0, 3.3)),
}
_EXPERTS, _TOKENS, _PER_NODE = 128, 65536, 8
# Imbalances that are tried for a number of transfers.
_TARGETS = (1.0005, 1.001, 1.002, 1.003, 1.005, 1.0075, 1.01, 1.015, 1.02, 1.03, 1.05, 1.1)


def _points(load: np.ndarray, placement: ReplicaPlacement) -> float:
    """Imbalance that is left, in %."""
    tokens = traffic(load, placement).sum(0)
    return 100 * float(tokens.max() / tokens.mean() - 1)


def _within(load: np.ndarray, cluster: Cluster, slots: int, most: int) -> ReplicaPlacement:
    """The placement of least imbalance found with at most this weight."""
    for target in _TARGETS:
        found = fewest_replicas(load, cluster, slots=slots, imbalance=target)
        if found is not None and weight(found) <= most:
            return found
    return plan_replicas(load, cluster, slots=slots, method="none")


def compare(ranks: int, percent: int, draw: Callable, draws: int) -> dict[str, tuple[float, float, float]]:
    """Mean replicas inside nodes and between nodes, and points left: of as many as TAOT's, the fewest, and quota."""
    cluster = Cluster.sheet("h100-8x400g").relabel(ranks // _PER_NODE, _PER_NODE)
    slots = ExpertConfig().replica_slots
    rows: dict[str, list[tuple[float, float, float]]] = {}
    for number in range(draws):
        rng = np.random.default_rng(number)
        load = sampled_load(draw(_EXPERTS, ranks, 1 + percent / 100, rng), ranks, _TOKENS, rng)
        found = {
            "as TAOT": _within(load, cluster, slots, PUBLISHED[ranks, percent][0][-1]),
            "for 1 %": fewest_replicas(load, cluster, slots=slots),
            "quota": plan_replicas(load, cluster, slots=slots),
        }
        for name, placement in found.items():
            assert placement is not None, "two slots a rank are enough for these loads"
            rows.setdefault(name, []).append((*by_link(placement), _points(load, placement)))
    return {name: tuple(np.mean(each, 0).tolist()) for name, each in rows.items()}


def main(arguments: list[str] | None = None) -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draws", type=int, default=10, help="number of loads of each row (default 10)")
    options = parser.parse_args(arguments)
    lines = []
    for (ranks, percent), (transfers, left) in PUBLISHED.items():
        told = [f"{number}, {points:3.1f}" for number, points in zip(transfers, left, strict=True)]
        for name, draw in DISTRIBUTIONS.items():
            found = compare(ranks, percent, draw, options.draws)
            cells = [
                f"{inside + BETWEEN * between:.0f} ({inside:.0f} + {BETWEEN} x {between:.0f}), {points:.1f}"
                for inside, between, points in found.values()
            ]
            lines.append((f"EP {ranks}, {percent} %, {name}", *told, *cells))
    heads = ("case", "ECHO", "LLEP", "LPLB", "TAOT", "as TAOT", "for 1 %", "quota, all slots")
    show_table(
        "weighted transfers (inside + 3 x between), points of imbalance left; ECHO to TAOT published", heads, lines
    )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
