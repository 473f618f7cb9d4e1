"""Groups of a large domain: plans of thousands of data-parallel ranks in two levels.

One plan over all ranks of a domain grows with them, and so does what each rank works out from it. Here the ranks are
divided into equal groups of neighbours, and each micro-batch of a data-parallel rank goes to one group as a whole,
where a plan of its own spreads it over the group's ranks. All these micro-batches have the same number of tokens, so
groups have the same tokens if they get equally many, and areas of attention are balanced by which ones they get. A rank
then plans its own group alone. Keys and values never leave a group. The smaller groups are, the sooner they are planned
and the nearer keys stay, but each needs so many micro-batches that their areas can be levelled.

The largest micro-batches come first, one for each group, the largest of them to the group with the least area so far;
then the next largest. Then groups with much area exchange micro-batches with groups with little, until all are level.
"""

import numpy as np

__all__ = ["deal_areas", "number_of_groups"]

_MEMBERS = 32  # micro-batches of a group, at least: with 16 the fullest group may have 1.5 times the mean area
# Groups are level when the fullest exceeds the mean by so little; most rounds of exchanges, and pairs of micro-batches
# that are looked at in a round.
_LEVEL, _ROUNDS, _LOOKS = 0.001, 64, 1 << 16


def number_of_groups(members: int) -> int:
    """Groups of a domain, as many as have 32 micro-batches or more.

    members: micro-batches that the domain shares, one of each data-parallel rank; groups have equally many.
    """
    return next((number for number in range(members // _MEMBERS, 1, -1) if members % number == 0), 1)


def deal_areas(area: np.ndarray, groups: int) -> np.ndarray:
    """int64 [micro-batch], the group of each: equally many in every group, with areas as equal as that allows.

    area: [micro-batch], query-key pairs.
    groups: their number; it divides the micro-batches.

    Raises ValueError if it does not.
    """
    if groups < 1 or len(area) % groups:
        raise ValueError(f"{len(area)} micro-batches do not divide into {groups} equal groups")
    order = np.argsort(-area, kind="stable").reshape(-1, groups)
    total, members = np.zeros(groups, dtype=np.int64), np.empty((groups, len(order)), dtype=np.int64)
    for at, number in enumerate(order):
        least = np.argsort(total, kind="stable")
        members[least, at] = number
        total[least] += area[number]
    _exchange(members, area, total)
    group = np.empty(len(area), dtype=np.int64)
    group[members] = np.arange(groups)[:, None]
    return group


def _exchange(members: np.ndarray, area: np.ndarray, total: np.ndarray) -> None:
    """Level groups by exchanges of one micro-batch for one, between the fullest and the emptiest, the next, and so on.

    members: int64 [group, place], micro-batches; altered.
    area: [micro-batch].
    total: [group], area of each group; altered.
    """
    groups, places = members.shape
    pairs = min(groups // 2, max(1, _LOOKS // places**2))
    for _ in range(_ROUNDS if pairs else 0):
        if total.max() * groups <= (1 + _LEVEL) * total.sum():
            break
        order = np.argsort(total, kind="stable")
        low, high = order[:pairs], order[::-1][:pairs]
        gap = total[high] - total[low]
        moved = (area[members[high]][:, :, None] - area[members[low]][:, None, :]).reshape(pairs, -1)
        best = np.abs(gap[:, None] - 2 * moved).argmin(1)
        more = moved[np.arange(pairs), best]
        helps = (more > 0) & (more < gap)
        if not helps[0]:  # the fullest group cannot be helped
            break
        low, high, best, more = low[helps], high[helps], best[helps], more[helps]
        given, taken = best // places, best % places
        members[high, given], members[low, taken] = members[low, taken], members[high, given]
        total[high] -= more
        total[low] += more
