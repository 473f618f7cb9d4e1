"""Where the copies of each expert are: the plan that every rank computes alike and the transfers carry out.

An expert lives at its home rank, always, with its optimizer state; replicas are copies of its weights in the slots of
other ranks, for one iteration (Pro-Prophet, arXiv 2411.10003, section IV: the lightweight expert placement). A rank
holds its home experts first and its slots after them, so that an instance of an expert has one physical number: the
numbers that a token dispatcher counts with when it believes in ranks x (homes + slots) experts.
"""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
from numpy.typing import ArrayLike

__all__ = ["Copy", "ReplicaPlacement", "SplitRule", "color_by_rank", "contiguous_homes"]

SplitRule = Literal["level", "own", "even"]
"""How tokens choose among the instances of their expert. "level": so that ranks have equal loads. "own": a rank with a
replica serves the tokens that start on it, the home serves all others. "even": instances get equal numbers."""


class Copy(NamedTuple):
    """One replica: `expert` goes from its home rank `source` into slot `slot` of rank `rank`."""

    expert: int
    source: int
    rank: int
    slot: int


def contiguous_homes(experts: int, ranks: int) -> np.ndarray:
    """The home rank of each expert, in equal contiguous blocks as Megatron-LM places them: int64 [expert].

    Raises ValueError where the experts do not divide by the ranks.
    """
    if ranks < 1 or experts < 1 or experts % ranks:
        raise ValueError(
            f"{experts} experts do not divide into equal blocks on {ranks} ranks; "
            "use a number of experts that is a multiple of the expert-parallel size"
        )
    return np.arange(experts) // (experts // ranks)


@dataclass(frozen=True, eq=False)
class ReplicaPlacement:
    """One layer's experts on the ranks of one expert-parallel group. Equal contents make equal placements.

    home: int [expert], the home rank of each; every rank is home to equally many.
    slot_expert: int [rank, slot], the expert whose replica is in each slot, -1 for an empty one.
    split: how tokens choose among instances, see `SplitRule`.
    ranks_per_node: ranks 0 to ranks_per_node - 1 are on the first node, and so on; all on one node if 0.
    nics_per_node: which neighbouring ranks share; each rank has its own if 0.

    Raises ValueError for homes that are uneven or outside the ranks, and for a slot with an expert that does not exist,
    that the rank is home to, or that is in another slot of the rank. The arrays are copied and cannot be written.
    """

    home: np.ndarray
    slot_expert: np.ndarray
    split: SplitRule = "level"
    ranks_per_node: int = 0
    nics_per_node: int = 0

    def __post_init__(self) -> None:
        home, slots = _frozen(self.home, 1, "home"), _frozen(self.slot_expert, 2, "slot_expert")
        ranks, experts = len(slots), len(home)
        if self.split not in get_args(SplitRule):
            raise ValueError(f"split={self.split!r} is not one of {', '.join(get_args(SplitRule))}")
        if not 0 <= self.ranks_per_node <= max(ranks, 1):
            raise ValueError(f"ranks_per_node={self.ranks_per_node} must lie between 0 and the {ranks} ranks")
        _check_homes(home, ranks)
        if slots.size and not -1 <= slots.min() <= slots.max() < experts:
            wrong = int(slots.max() if slots.max() >= experts else slots.min())
            raise ValueError(f"slot_expert names expert {wrong}, but experts are 0 to {experts - 1}, and -1 is empty")
        object.__setattr__(self, "home", home)
        object.__setattr__(self, "slot_expert", slots)
        object.__setattr__(self, "ranks_per_node", int(self.ranks_per_node) or ranks)
        held = self.phys2log.reshape(ranks, -1)
        held = np.sort(np.where(held < 0, -1 - np.arange(held.shape[1]), held), axis=1)  # empty slots are no repetition
        rank, column = np.nonzero(held[:, 1:] == held[:, :-1])
        if rank.size:
            twice = held[rank[0], column[0]]
            raise ValueError(f"expert {twice} is twice on rank {rank[0]}; a replica there has no use")

    @property
    def experts(self) -> int:
        """Number of experts of the layer."""
        return len(self.home)

    @property
    def num_ranks(self) -> int:
        """Number of ranks, the expert-parallel size."""
        return len(self.slot_expert)

    @property
    def slots(self) -> int:
        """Slots a rank has for replicas, full or empty."""
        return self.slot_expert.shape[1]

    @property
    def homes_per_rank(self) -> int:
        """Experts that a rank is home to."""
        return self.experts // self.num_ranks

    @property
    def replicas(self) -> int:
        """Slots in use over all ranks."""
        return int((self.slot_expert >= 0).sum())

    def ranks(self, expert: int) -> tuple[int, ...]:
        """The ranks that hold `expert`, home first and the others ascending."""
        if not 0 <= expert < self.experts:
            raise ValueError(f"expert {expert} is not among the {self.experts} experts (0 to {self.experts - 1})")
        home = int(self.home[expert])
        return (home, *(int(rank) for rank in np.nonzero(self.slot_expert == expert)[0]))

    def slots_of(self, rank: int) -> tuple[int, ...]:
        """The expert in each slot of `rank`, -1 for an empty one."""
        if not 0 <= rank < self.num_ranks:
            raise ValueError(f"rank {rank} is not among the {self.num_ranks} ranks (0 to {self.num_ranks - 1})")
        return tuple(int(expert) for expert in self.slot_expert[rank])

    @cached_property
    def phys2log(self) -> np.ndarray:
        """The expert of each physical number, int64 [rank * (homes_per_rank + slots) + local], -1 for an empty slot.

        `local` counts the home experts of the rank in ascending order, then its slots.
        """
        ranks, experts = len(self.slot_expert), len(self.home)
        homes = np.argsort(self.home, kind="stable").reshape(ranks, experts // ranks)
        return _frozen(np.concatenate([homes, self.slot_expert], axis=1).reshape(-1), 1, "phys2log")

    @cached_property
    def log2phys(self) -> np.ndarray:
        """The physical number of each instance, int64 [expert, rank], -1 where the rank does not hold the expert."""
        table = np.full((self.experts, self.num_ranks), -1)
        full = np.flatnonzero(self.phys2log >= 0)
        table[self.phys2log[full], full // (self.homes_per_rank + self.slots)] = full
        return _frozen(table, 2, "log2phys")

    def copies(self) -> Iterator[Copy]:
        """Every replica, by rank and slot."""
        for rank, slot in zip(*np.nonzero(self.slot_expert >= 0), strict=True):
            expert = int(self.slot_expert[rank, slot])
            yield Copy(expert, int(self.home[expert]), int(rank), int(slot))

    @cached_property
    def chains(self) -> dict[int, tuple[int, ...]]:
        """How weights reach replicas: for each expert that has some its ranks in the order in which they hand it on.

        Experts ascend. The home comes first, then the others in its node, then other nodes, so that every rank sends
        and receives the weights at most once and they enter each node once, which is what makes a broadcast cost no
        more than one copy when it is cut into pieces. Gradients come home the same way backwards, each rank adding its
        own, so the order of the sum is fixed. Where an expert leaves a node and enters the next one is chosen so that
        the NICs of a node have equally many to send and to receive; within a node ranks ascend otherwise.
        """
        rank, slot = np.nonzero(self.slot_expert >= 0)
        expert = self.slot_expert[rank, slot]
        order = np.argsort(expert, kind="stable")
        home, per_node = self.home.tolist(), self.ranks_per_node
        members: dict[int, list[int]] = {}
        for each, holder in zip(expert[order].tolist(), rank[order].tolist(), strict=True):
            members.setdefault(each, [home[each]]).append(holder)
        crossing = []
        for each, ranks in members.items():
            node = ranks[0] // per_node
            if min(ranks) // per_node != node or max(ranks) // per_node != node:
                crossing.append(each)
        if crossing:
            nic = self._nics()
            leaving, entering = [0] * len(nic), [0] * len(nic)
            for each in sorted(crossing, key=lambda each: len(members[each])):  # the fewest choices first
                members[each] = _across(members[each], per_node, nic, leaving, entering)
        return {each: tuple(ranks) for each, ranks in members.items()}

    def _nics(self) -> list[int]:
        """The NIC of each rank, numbered in any way; as in `Cluster.nics`."""
        ranks = np.arange(self.num_ranks)
        if not 0 < self.nics_per_node < self.ranks_per_node:
            return ranks.tolist()
        node, local = ranks // self.ranks_per_node, ranks % self.ranks_per_node
        return (node * self.nics_per_node + local * self.nics_per_node // self.ranks_per_node).tolist()

    @cached_property
    def hops(self) -> np.ndarray:
        """The steps of all chains, int64 [replica, 3]: the expert, the rank that hands it on, the one that gets it."""
        steps = [(expert, *step) for expert, ranks in self.chains.items() for step in pairwise(ranks)]
        return _frozen(np.array(steps, dtype=np.int64).reshape(-1, 3), 2, "hops")

    def digest(self) -> str:
        """A hash of everything that decides where tokens go; ranks compare it before they act on a plan."""
        sizes = f"{self.split} {self.ranks_per_node} {self.nics_per_node} {self.slot_expert.shape}"
        content = hashlib.sha256(sizes.encode())
        content.update(self.home.tobytes())
        content.update(self.slot_expert.tobytes())
        return content.hexdigest()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ReplicaPlacement) and self.digest() == other.digest()

    def __hash__(self) -> int:
        return hash(self.digest())


def color_by_rank(placement: ReplicaPlacement) -> list[list[int]]:
    """The experts with replicas in classes whose members share no rank, so that a class is balanced in one step.

    Greedy coloring (first fit, longest chains first) of the graph whose vertices are experts and whose edges join
    experts with a common rank; a class is a color.
    """
    chains = placement.chains
    classes: list[list[int]] = []
    taken: list[int] = []  # of each class the ranks in use, one bit a rank
    for expert in sorted(chains, key=lambda expert: (-len(chains[expert]), expert)):
        ranks = 0
        for rank in chains[expert]:
            ranks |= 1 << rank
        at = 0
        while at < len(taken) and taken[at] & ranks:
            at += 1
        if at == len(taken):
            classes.append([])
            taken.append(0)
        classes[at].append(expert)
        taken[at] |= ranks
    return classes


def _across(ranks: list[int], per_node: int, nic: list[int], leaving: list[int], entering: list[int]) -> list[int]:
    """`ranks`, home first and the others ascending, in the order in which they hand on what crosses nodes.

    nic: of each rank. leaving, entering: how much each sends and receives so far, brought up to date.
    """
    if len(ranks) == 2:
        leaving[nic[ranks[0]]] += 1
        entering[nic[ranks[1]]] += 1
        return ranks
    nodes: dict[int, list[int]] = {ranks[0] // per_node: []}
    for rank in ranks[1:]:
        nodes.setdefault(rank // per_node, []).append(rank)
    chain, last = [ranks[0]], len(nodes) - 1
    for at, own in enumerate(nodes.values()):
        if at:
            entry = min(own, key=lambda rank: entering[nic[rank]])
            entering[nic[entry]] += 1
            own.remove(entry)
            chain.append(entry)
        if at < last and own:
            own.append(own.pop(own.index(min(own, key=lambda rank: leaving[nic[rank]]))))
        chain += own
        if at < last:
            leaving[nic[chain[-1]]] += 1
    return chain


def _frozen(array: ArrayLike, dimensions: int, name: str) -> np.ndarray:
    """A read-only int64 copy. The byte order is fixed, so that a hash of the bytes means the same on every machine."""
    given: Any = np.asarray(array)
    if given.ndim != dimensions or (given.dtype.kind not in "iu" and given.size):
        raise ValueError(
            f"{name} must be whole numbers with {dimensions} axes, not {given.dtype} of shape {given.shape}"
        )
    copy = np.array(given, dtype="<i8", order="C")
    copy.setflags(write=False)
    return copy


def _check_homes(home: np.ndarray, ranks: int) -> None:
    contiguous_homes(len(home), ranks)  # refuses numbers that do not divide
    if home.min() < 0 or home.max() >= ranks:
        wrong = int(home.max() if home.max() >= ranks else home.min())
        raise ValueError(f"home names rank {wrong}, but the ranks are 0 to {ranks - 1}")
    count = np.bincount(home, minlength=ranks)
    if (count != len(home) // ranks).any():
        odd = int(np.flatnonzero(count != len(home) // ranks)[0])
        raise ValueError(
            f"rank {odd} is home to {count[odd]} experts, but every rank must be home to {len(home) // ranks}"
        )
