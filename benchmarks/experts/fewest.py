"""The fewest transfers of replicas that bring a known load down to a given imbalance, and transfers by link.

The planners of `balancing` use every slot that costs nothing, since loads differ from their prediction. The fewest
replicas that suffice for a known load show what a transfer is worth. A replica of an expert of the same node weighs 1,
one from another node 3, as TAOT (arXiv 2608.03676) counts them.

The search is greedy with random restarts. Ranks above the target give their excess to ranks below it. Nodes above the
target send their surplus to other nodes first, in the largest pieces there are; then each node balances its ranks. A
piece is the load that one replica serves. It goes to a rank where it just fits, so that the giving rank reaches the
target, else to the rank with most room, so that the taking rank reaches it. Replicas that turn out not to be needed are
dropped. Results are upper bounds.
"""

import numpy as np

from balancing.cluster import Cluster
from balancing.experts import ReplicaPlacement, contiguous_homes, traffic

__all__ = ["BETWEEN", "by_link", "fewest_replicas", "weight"]

# Parts of the imbalance that are aimed at: the split of training is iterated and stays a little above what it could be.
_AIMS = (1.0, 0.8, 0.6)
_NOISE = 0.3
_LIGHTEST = 3  # placements that are looked at once more
BETWEEN = 3  # weight of a transfer between nodes; one inside a node weighs 1


def by_link(placement: ReplicaPlacement) -> tuple[int, int]:
    """Replicas whose expert lives in their own node, and all others."""
    rank, slot = np.nonzero(placement.slot_expert >= 0)
    per_node = placement.ranks_per_node
    same = placement.home[placement.slot_expert[rank, slot]] // per_node == rank // per_node
    return int(same.sum()), int((~same).sum())


def weight(placement: ReplicaPlacement) -> int:
    """Weighted transfers of a placement."""
    inside, between = by_link(placement)
    return inside + BETWEEN * between


def fewest_replicas(
    load: np.ndarray, cluster: Cluster, *, slots: int, imbalance: float = 1.01, trials: int = 9, seed: int = 0
) -> ReplicaPlacement | None:
    """The placement of least weight found that leaves at most this imbalance; None where none was found.

    load: int [source_rank, expert], tokens. Homes are contiguous blocks.
    cluster: its first ranks are the expert-parallel group.
    slots: maximal number of replicas on a rank.
    imbalance: busiest rank over the mean, to reach; the tokens of a rank are whole, so one more is allowed.
    trials: number of restarts.
    seed: of the order in which equal choices are tried.
    """
    search, rng = _Search(load, cluster, slots, imbalance), np.random.default_rng(seed)
    found = [search.greedy(rng, _NOISE * (at >= len(_AIMS)), _AIMS[at % len(_AIMS)]) for at in range(trials)]
    lightest = sorted((each for each in found if search.reached(each)), key=weight)[:_LIGHTEST]
    return min(map(search.without_needless, lightest), key=weight, default=None)


class _Search:
    """One load and its limit; parameters of `fewest_replicas`."""

    def __init__(self, load: np.ndarray, cluster: Cluster, slots: int, imbalance: float) -> None:
        self._load, self._cluster, self._slots = load, cluster, slots
        self._ranks, experts = load.shape
        self._home, self._total = contiguous_homes(experts, self._ranks), load.sum(0).astype(float)
        self._per_node = min(self._ranks, cluster.ranks_per_node)
        self._node = np.arange(self._ranks) // self._per_node
        self._mean, self._imbalance = self._total.sum() / self._ranks, imbalance

    def reached(self, placement: ReplicaPlacement) -> bool:
        """Whether the split that training makes stays at the limit."""
        return bool(traffic(self._load, placement).sum(0).max() <= self._imbalance * self._mean + 1)

    def greedy(self, rng: np.random.Generator, noise: float, aim: float) -> ReplicaPlacement:
        """One placement. noise: relative, of sizes by which pieces are chosen. aim: part of the imbalance allowed."""
        ranks, limit = self._ranks, (1 + aim * (self._imbalance - 1)) * self._mean
        self._held = [set[int]() for _ in range(ranks)]
        self._left = self._total.copy()  # tokens of each expert that its home serves
        self._room = limit - np.bincount(self._home, weights=self._total, minlength=ranks)
        self._scale = np.exp(noise * rng.standard_normal(ranks))
        surplus = -np.bincount(self._node, weights=self._room)
        for node in np.argsort(-surplus):
            while surplus[node] > 1:
                sent = self._send(self._node == node, self._node != node, surplus[node])
                if not sent:
                    break
                surplus[node] -= sent
        for node in range(len(surplus)):
            here = self._node == node
            while self._send(here, here):
                pass
        while self._send(self._room < 0, self._room > 0):
            pass
        return self._placement(self._held)

    def _send(self, givers: np.ndarray, takers: np.ndarray, most: float = np.inf) -> float:
        """Let one of the givers have a replica on one of the takers; returns its tokens, 0 where none is left.

        givers, takers: bool [rank]. most: tokens.
        """
        excess = np.where(givers, -self._room, 0.0)
        free = np.array([len(held) < self._slots for held in self._held])
        for giver in np.argsort(-excess * self._scale):
            wanted = min(float(excess[giver]), most)
            if wanted <= 1 or excess[giver] <= 1:
                continue
            own = np.flatnonzero(self._home == giver)
            for expert in own[np.argsort(-self._left[own])]:
                piece = min(wanted, float(self._left[expert]))
                if piece <= 1:
                    break
                lacks = np.array([expert not in held for held in self._held])
                room = np.where(takers & free & lacks, self._room, 0.0)
                fits = room >= piece
                if fits.any():
                    taker = int(np.where(fits, room * self._scale, np.inf).argmin())
                else:
                    taker = int((room * self._scale).argmax())
                sent = min(piece, float(room[taker]))
                if sent > 1:
                    self._held[taker].add(int(expert))
                    self._left[expert] -= sent
                    self._room[giver] += sent
                    self._room[taker] -= sent
                    return sent
        return 0.0

    def without_needless(self, placement: ReplicaPlacement) -> ReplicaPlacement:
        """The placement without replicas that the limit does not need, those between nodes first."""
        held = [set(own) - {-1} for own in placement.slot_expert.tolist()]
        each = [(int(self._node[self._home[expert]] == self._node[rank]), rank, expert)
                for rank, own in enumerate(held) for expert in own]  # fmt: skip
        for _, rank, expert in sorted(each):
            held[rank].remove(expert)
            if not self.reached(self._placement(held)):
                held[rank].add(expert)
        return self._placement(held)

    def _placement(self, held: list[set[int]]) -> ReplicaPlacement:
        slots = [[*sorted(own), *[-1] * (self._slots - len(own))] for own in held]
        table = np.array(slots, dtype=np.int64).reshape(self._ranks, self._slots)
        return ReplicaPlacement(self._home, table, "level", self._per_node, self._cluster.nics_per_node)
