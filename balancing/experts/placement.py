"""Placement of expert replicas: which expert is in which slot of which rank, and how weights and gradients travel.

An expert and its optimizer state stay at its home rank. Replicas are copies of its weights in the slots of other ranks,
for one iteration (the lightweight expert placement of Pro-Prophet, arXiv 2411.10003, section IV). Physical numbers
count each rank's home experts first and its slots after them. Token dispatchers use physical numbers, as if there were
ranks x (homes + slots) experts.
"""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
from numpy.typing import ArrayLike

__all__ = ["Copy", "ReplicaPlacement", "SplitRule", "color_by_rank", "contiguous_homes"]

SplitRule = Literal["level", "own", "even"]
"""How an expert's tokens are divided over its instances. "level": so that the loads of ranks are as equal as possible.
"own": a replica serves the tokens of its own rank, and the home serves all others. "even": equally."""


class Copy(NamedTuple):
    """One replica: `expert` is copied from its home rank `source` into slot `slot` of rank `rank`."""

    expert: int
    source: int
    rank: int
    slot: int


def contiguous_homes(experts: int, ranks: int) -> np.ndarray:
    """The home rank of each expert, in equal contiguous blocks as in Megatron-LM: int64 [expert].

    Raises ValueError if the number of experts is no multiple of the ranks.
    """
    if ranks < 1 or experts < 1 or experts % ranks:
        raise ValueError(
            f"{experts} experts do not divide into equal blocks on {ranks} ranks; "
            "use a number of experts that is a multiple of the expert-parallel size"
        )
    return np.arange(experts) // (experts // ranks)


@dataclass(frozen=True, eq=False)
class ReplicaPlacement:
    """The replicas of one layer on the ranks of one expert-parallel group. Placements with equal contents are equal.

    home: int [expert], home rank of each expert; every rank is home to the same number of experts.
    slot_expert: int [rank, slot], the expert whose replica is in each slot, -1 for an empty slot.
    split: how tokens are divided over instances, see `SplitRule`.
    ranks_per_node: ranks 0 to ranks_per_node - 1 are on the first node, and so on; 0: all ranks on one node.
    nics_per_node: NICs of a node, shared by neighbouring ranks; 0: one for each rank.
    late_slots: the last so many slots of each rank are for late copies (`add_late_copies`), decided inside the layer.
        Planners leave them empty.

    The arrays are copied and made read-only. Raises ValueError for homes that are uneven or no valid ranks. Raises it
    for a slot with an expert that does not exist, that is at home on the rank, or that is in another slot of the rank.
    """

    home: np.ndarray
    slot_expert: np.ndarray
    split: SplitRule = "level"
    ranks_per_node: int = 0
    nics_per_node: int = 0
    late_slots: int = 0

    def __post_init__(self) -> None:
        home, slots = _frozen(self.home, 1, "home"), _frozen(self.slot_expert, 2, "slot_expert")
        ranks, experts = len(slots), len(home)
        if self.split not in get_args(SplitRule):
            raise ValueError(f"split={self.split!r} is not one of {', '.join(get_args(SplitRule))}")
        if not 0 <= self.ranks_per_node <= max(ranks, 1):
            raise ValueError(f"ranks_per_node={self.ranks_per_node} must lie between 0 and the {ranks} ranks")
        if not 0 <= self.late_slots <= slots.shape[1]:
            raise ValueError(
                f"late_slots={self.late_slots} must lie between 0 and the {slots.shape[1]} slots of a rank"
            )
        _check_homes(home, ranks)
        if slots.size and not -1 <= slots.min() <= slots.max() < experts:
            wrong = int(slots.max() if slots.max() >= experts else slots.min())
            raise ValueError(f"slot_expert names expert {wrong}, but experts are 0 to {experts - 1}, and -1 is empty")
        object.__setattr__(self, "home", home)
        object.__setattr__(self, "slot_expert", slots)
        object.__setattr__(self, "ranks_per_node", int(self.ranks_per_node) or ranks)
        present = self.phys2log.reshape(ranks, -1)
        empty = -1 - np.arange(present.shape[1])  # different numbers, so that empty slots are no duplicates
        present = np.sort(np.where(present < 0, empty, present), axis=1)
        rank, column = np.nonzero(present[:, 1:] == present[:, :-1])
        if rank.size:
            twice = present[rank[0], column[0]]
            raise ValueError(f"expert {twice} is twice on rank {rank[0]}; place its replica on another rank")

    @property
    def experts(self) -> int:
        """Number of experts of the layer."""
        return len(self.home)

    @property
    def num_ranks(self) -> int:
        """Number of ranks: the expert-parallel size."""
        return len(self.slot_expert)

    @property
    def slots(self) -> int:
        """Number of slots of a rank, full or empty."""
        return self.slot_expert.shape[1]

    @property
    def homes_per_rank(self) -> int:
        """Number of experts that a rank is home to."""
        return self.experts // self.num_ranks

    @cached_property
    def replicas(self) -> int:
        """Number of replicas on all ranks together."""
        return int((self.slot_expert >= 0).sum())

    @property
    def late(self) -> np.ndarray:
        """The late copies: int64 [rank, late slot], the expert in each late slot, -1 in empty ones."""
        return self.slot_expert[:, self.slots - self.late_slots :]

    @property
    def late_copies(self) -> int:
        """Number of late copies on all ranks together."""
        return int((self.late >= 0).sum())

    @cached_property
    def late_experts(self) -> tuple[int, ...]:
        """The experts with late copies, in the order of late slots: the first slot of all ranks, then the second."""
        return tuple(dict.fromkeys(self.late.T[self.late.T >= 0].tolist()))

    @cached_property
    def planned(self) -> "ReplicaPlacement":
        """The placement without its late slots; itself if it has none."""
        return replace(self, slot_expert=self._planned_slots, late_slots=0) if self.late_slots else self

    @property
    def _planned_slots(self) -> np.ndarray:
        return self.slot_expert[:, : self.slots - self.late_slots]

    def with_late(self, late: ArrayLike) -> "ReplicaPlacement":
        """The planned replicas with these late slots in place of others.

        late: int [rank, late slot], -1 in empty slots.
        """
        columns = _frozen(late, 2, "late")
        slots = np.concatenate([self._planned_slots, columns], axis=1)
        return replace(self, slot_expert=slots, late_slots=columns.shape[1])

    def ranks(self, expert: int) -> tuple[int, ...]:
        """The ranks that hold `expert`: the home, then the others in ascending order."""
        if not 0 <= expert < self.experts:
            raise ValueError(f"expert {expert} is not among the {self.experts} experts (0 to {self.experts - 1})")
        home = int(self.home[expert])
        return (home, *(int(rank) for rank in np.nonzero(self.slot_expert == expert)[0]))

    def slots_of(self, rank: int) -> tuple[int, ...]:
        """The expert in each slot of `rank`, -1 for an empty slot."""
        if not 0 <= rank < self.num_ranks:
            raise ValueError(f"rank {rank} is not among the {self.num_ranks} ranks (0 to {self.num_ranks - 1})")
        return tuple(int(expert) for expert in self.slot_expert[rank])

    @cached_property
    def phys2log(self) -> np.ndarray:
        """Expert of each physical number, int64 [rank * (homes_per_rank + slots) + local], -1 for an empty slot.

        `local` numbers the home experts of the rank in ascending order, then its slots.
        """
        ranks, experts = len(self.slot_expert), len(self.home)
        homes = np.argsort(self.home, kind="stable").reshape(ranks, experts // ranks)
        return _frozen(np.concatenate([homes, self.slot_expert], axis=1).reshape(-1), 1, "phys2log")

    @cached_property
    def log2phys(self) -> np.ndarray:
        """Physical number of each instance, int64 [expert, rank], -1 where the rank does not hold the expert."""
        table = np.full((self.experts, self.num_ranks), -1)
        full = np.flatnonzero(self.phys2log >= 0)
        table[self.phys2log[full], full // (self.homes_per_rank + self.slots)] = full
        return _frozen(table, 2, "log2phys")

    def copies(self) -> Iterator[Copy]:
        """All replicas, by rank and slot."""
        for rank, slot in zip(*np.nonzero(self.slot_expert >= 0), strict=True):
            expert = int(self.slot_expert[rank, slot])
            yield Copy(expert, int(self.home[expert]), int(rank), int(slot))

    @cached_property
    def chains(self) -> dict[int, tuple[int, ...]]:
        """For each expert with replicas, in ascending order, its ranks in the order in which they relay its weights.

        The home comes first, then the other ranks of its node, then other nodes. Every rank receives and sends the
        weights at most once, and they enter each node once. Sent in pieces, such a broadcast takes hardly longer than
        one copy. Gradients travel in the reverse order and each rank adds its own, so the order of the sum is fixed.

        The ranks at which an expert leaves a node and enters the next are chosen so that the NICs of a node send and
        receive equally often. The other ranks of a node are in ascending order. Ranks with late copies
        follow the others of their node, in ascending order; those of new nodes come last.
        """
        if self.late_copies:
            chains = dict(self.planned.chains)
            for hot in self.late_experts:
                planned = chains.get(hot, (int(self.home[hot]),))
                nodes = {rank // self.ranks_per_node: at for at, rank in enumerate(planned)}
                late = [(nodes.get(rank // self.ranks_per_node, len(planned)), 1, rank)
                        for rank in np.flatnonzero((self.late == hot).any(1)).tolist()]  # fmt: skip
                chains[hot] = tuple(
                    rank for *_, rank in sorted([(at, 0, rank) for at, rank in enumerate(planned)] + late)
                )
            return dict(sorted(chains.items()))
        rank, slot = np.nonzero(self.slot_expert >= 0)
        expert = self.slot_expert[rank, slot]
        order = np.argsort(expert, kind="stable")
        home, per_node = self.home.tolist(), self.ranks_per_node
        members: dict[int, list[int]] = {}
        for hot, holder in zip(expert[order].tolist(), rank[order].tolist(), strict=True):
            members.setdefault(hot, [home[hot]]).append(holder)
        crossing = np.unique(expert[rank // per_node != self.home[expert] // per_node]).tolist()
        if crossing:
            nic = self._nics()
            leaving, entering = [0] * len(nic), [0] * len(nic)
            for hot in sorted(crossing, key=lambda hot: len(members[hot])):  # those with the fewest choices first
                members[hot] = _across(members[hot], per_node, nic, leaving, entering)
        return {hot: tuple(ranks) for hot, ranks in members.items()}

    def _nics(self) -> list[int]:
        """The number of each rank's NIC. Ranks share NICs as in `Cluster.nics`, but the numbers differ from it."""
        ranks = np.arange(self.num_ranks)
        if not 0 < self.nics_per_node < self.ranks_per_node:
            return ranks.tolist()
        node, local = ranks // self.ranks_per_node, ranks % self.ranks_per_node
        return (node * self.nics_per_node + local * self.nics_per_node // self.ranks_per_node).tolist()

    @cached_property
    def hops(self) -> np.ndarray:
        """The hops of all chains, int64 [replica, 3]: expert, sending rank, receiving rank."""
        chains = self.chains
        ranks = np.fromiter(chain.from_iterable(chains.values()), np.int64, len(chains) + self.replicas)
        expert = np.repeat(np.fromiter(chains, np.int64, len(chains)), [len(holders) for holders in chains.values()])
        within = expert[1:] == expert[:-1]
        return _frozen(np.stack([expert[1:], ranks[:-1], ranks[1:]], axis=1)[within], 2, "hops")

    def digest(self) -> str:
        """A hash of everything that the split depends on. Ranks compare it before they use a placement."""
        return self._digest

    @cached_property
    def by_expert(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """An order of physical numbers in which instances of an expert are side by side; in it the place of each
        expert's first instance, for each of its instances; and of each physical number, its place."""
        order = np.argsort(self.phys2log, kind="stable")
        experts = self.phys2log[order]
        return order, np.searchsorted(experts, experts), np.argsort(order)

    @cached_property
    def _digest(self) -> str:
        sizes = f"{self.split} {self.ranks_per_node} {self.nics_per_node} {self.late_slots} {self.slot_expert.shape}"
        content = hashlib.sha256(sizes.encode())
        content.update(self.home.tobytes())
        content.update(self.slot_expert.tobytes())
        return content.hexdigest()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ReplicaPlacement) and self.digest() == other.digest()

    def __hash__(self) -> int:
        return hash(self.digest())


def color_by_rank(placement: ReplicaPlacement) -> list[list[int]]:
    """The experts with replicas, in classes whose members share no rank, so that a class is balanced in one step.

    Greedy coloring (first fit, longest chains first) of a graph: vertices are experts, edges join experts with a common
    rank, and colors are the classes. Experts with late copies come after all others, each in a class of its own, so
    that a split with late copies needs no other tables than the split without them.
    """
    if placement.late_copies:
        late = placement.late_experts
        planned = ([hot for hot in members if hot not in late] for members in color_by_rank(placement.planned))
        return [*filter(None, planned), *([hot] for hot in late)]
    chains = placement.chains
    classes: list[list[int]] = []
    taken: list[int] = []  # the ranks in use in each class, one bit a rank
    for expert in sorted(chains, key=lambda expert: (-len(chains[expert]), expert)):
        ranks = 0
        for rank in chains[expert]:
            ranks |= 1 << rank
        color = 0
        while color < len(taken) and taken[color] & ranks:
            color += 1
        if color == len(taken):
            classes.append([])
            taken.append(0)
        classes[color].append(expert)
        taken[color] |= ranks
    return classes


def _across(ranks: list[int], per_node: int, nic: list[int], leaving: list[int], entering: list[int]) -> list[int]:
    """The chain of an expert with replicas in several nodes.

    ranks: the ranks that hold the expert, home first and the others ascending.
    per_node: ranks of a node.
    nic: NIC of each rank.
    leaving, entering: number of experts that each NIC sends and receives so far; updated.
    """
    if len(ranks) == 2:
        leaving[nic[ranks[0]]] += 1
        entering[nic[ranks[1]]] += 1
        return ranks
    nodes: dict[int, list[int]] = {ranks[0] // per_node: []}
    for rank in ranks[1:]:
        nodes.setdefault(rank // per_node, []).append(rank)
    chain, last = [ranks[0]], len(nodes) - 1
    for number, inside in enumerate(nodes.values()):
        if number:
            entry = min(inside, key=lambda rank: entering[nic[rank]])
            entering[nic[entry]] += 1
            inside.remove(entry)
            chain.append(entry)
        if number < last and inside:
            inside.append(inside.pop(inside.index(min(inside, key=lambda rank: leaving[nic[rank]]))))
        chain += inside
        if number < last:
            leaving[nic[chain[-1]]] += 1
    return chain


def _frozen(array: ArrayLike, dimensions: int, name: str) -> np.ndarray:
    """A read-only int64 copy. The byte order is fixed, so that equal contents have equal hashes on all machines."""
    given: Any = np.asarray(array)
    if given.ndim != dimensions or (given.dtype.kind not in "iu" and given.size):
        raise ValueError(
            f"{name} must be whole numbers with {dimensions} axes, not {given.dtype} of shape {given.shape}"
        )
    copy = np.array(given, dtype="<i8", order="C")
    copy.setflags(write=False)
    return copy


def _check_homes(home: np.ndarray, ranks: int) -> None:
    contiguous_homes(len(home), ranks)  # raises ValueError if experts are no multiple of ranks
    if home.min() < 0 or home.max() >= ranks:
        wrong = int(home.max() if home.max() >= ranks else home.min())
        raise ValueError(f"home names rank {wrong}, but the ranks are 0 to {ranks - 1}")
    count = np.bincount(home, minlength=ranks)
    if (count != len(home) // ranks).any():
        odd = int(np.flatnonzero(count != len(home) // ranks)[0])
        raise ValueError(
            f"rank {odd} is home to {count[odd]} experts, but every rank must be home to {len(home) // ranks}"
        )
