"""Experts that have no rank in common, so that what one does with the load of its ranks is nothing to the others."""

from balancing.experts.placement import ReplicaPlacement

__all__ = ["disjoint_classes"]


def disjoint_classes(placement: ReplicaPlacement) -> list[list[int]]:
    """The experts with replicas, in classes within which no two share a rank: first fit, longest chains first."""
    chains = placement.chains
    members: list[list[int]] = []
    taken: list[int] = []  # a bit a rank
    for expert in sorted(chains, key=lambda expert: (-len(chains[expert]), expert)):
        ranks = 0
        for rank in chains[expert]:
            ranks |= 1 << rank
        at = 0
        while at < len(taken) and taken[at] & ranks:
            at += 1
        if at == len(taken):
            members.append([])
            taken.append(0)
        members[at].append(expert)
        taken[at] |= ranks
    return members
