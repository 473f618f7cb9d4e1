"""The split of tokens over the replicas of hot experts, in slow, plain Python. The first file to read of this folder,
and the oracle of its tests.

Pro-Prophet (section 4) copies the weights of hot experts to other ranks. A placement says who has which. Then the
tokens of each expert are divided over its instances, so that all ranks get the same load. This is done expert by
expert: take its tokens away from all ranks, look at the loads that are left as the bottom of a basin, and fill the
tokens in like water. The water stands equally high wherever it is. An expert that is divided changes the basin for the
others, so all of them take several turns. Each turn lowers the sum of squared loads, whose least value also has the
lowest busiest rank.

`split/split.py` computes the same with arrays, for experts without a common rank at once.
"""

from collections.abc import Sequence

from balancing.experts.placement import ReplicaPlacement, color_by_rank

__all__ = ["fill", "quotas"]

Quotas = dict[tuple[int, int], int]  # (expert, rank) -> tokens


def quotas(tokens: Sequence[int], placement: ReplicaPlacement, sweeps: int) -> Quotas:
    """How many tokens of each expert each of its instances serves.

    tokens: [expert], of all source ranks together.
    placement: the instances, by the rule "level".
    sweeps: how often each expert is divided.
    """
    quota: Quotas = {(expert, int(placement.home[expert])): tokens[expert] for expert in range(placement.experts)}
    for expert, ranks in placement.chains.items():  # the experts that have replicas: first equal parts
        parts = [tokens[expert] // len(ranks) + (number < tokens[expert] % len(ranks)) for number in range(len(ranks))]
        quota |= {(expert, rank): part for rank, part in zip(ranks, parts, strict=True)}
    # The order: experts without a common rank are neighbours, since they can be divided at once.
    order = [expert for members in color_by_rank(placement) for expert in members]
    for sweep in range(sweeps):
        for expert in order:
            ranks = placement.chains[expert]
            others = [sum(n for (e, r), n in quota.items() if r == rank and e != expert) for rank in ranks]
            parts = fill(others, tokens[expert], spread=sweep == sweeps - 1)
            quota |= {(expert, rank): part for rank, part in zip(ranks, parts, strict=True)}
    return quota


def fill(bottom: Sequence[int], water: int, spread: bool = True) -> list[int]:
    """Parts of `water`, one a rank, that bring ranks with loads `bottom` to one level. A full level leaves a few
    tokens: they go to the lowest ranks, one each, or all to the first rank if more turns follow (not `spread`)."""
    level = max(bottom) + water
    while sum(max(level - load, 0) for load in bottom) > water:
        level -= 1
    parts = [max(level - load, 0) for load in bottom]
    rest = water - sum(parts)
    if not spread:
        parts[0] += rest
        return parts
    for rank in [rank for rank, load in enumerate(bottom) if load <= level][:rest]:
        parts[rank] += 1
    return parts
