"""Groups of a large domain: plans of thousands of data-parallel ranks in two levels.

The time of a plan over all ranks of a domain grows with the ranks. Here the ranks are divided into equal groups of
neighbours, and each group has a plan of its own, which only its ranks make. Each micro-batch of a data-parallel rank
goes to one group as a whole, and the group's plan spreads it over the group's ranks. Keys and values never leave a
group. All these micro-batches have the same number of tokens, so with equally many micro-batches all groups have the
same tokens; which micro-batches a group gets balances the area of attention. Small groups are planned sooner and keep
keys nearer, but a group needs enough micro-batches to balance its area.

Micro-batches are assigned from the largest area to the smallest, one to each group at a time, the largest to the group
with the least area so far. Then groups of large area exchange micro-batches with groups of small area until all are
balanced.
"""

import numpy as np

__all__ = ["deal_areas", "number_of_groups"]

_MEMBERS = 32  # least micro-batches of a group: with 16 the group of most area may have 1.5 times the mean area
# Groups are balanced if the largest area is at most 1 + _LEVEL of the mean. _ROUNDS: most rounds of exchanges.
# _LOOKS: most pairs of micro-batches that are compared in a round.
_LEVEL, _ROUNDS, _LOOKS = 0.001, 64, 1 << 16


def number_of_groups(members: int) -> int:
    """The largest number of equal groups with at least 32 micro-batches each.

    members: micro-batches that the domain shares, one of each data-parallel rank.
    """
    return next((number for number in range(members // _MEMBERS, 1, -1) if members % number == 0), 1)


def deal_areas(area: np.ndarray, groups: int) -> np.ndarray:
    """int64 [micro-batch], the group of each: equally many in every group, with areas as equal as that allows.

    area: [micro-batch], query-key pairs.
    groups: number of groups.

    Raises ValueError if the number of micro-batches is not a multiple of `groups`.
    """
    if groups < 1 or len(area) % groups:
        raise ValueError(f"{len(area)} micro-batches do not divide into {groups} equal groups")
    order = np.argsort(-area, kind="stable").reshape(-1, groups)
    area = np.asarray(area, dtype=np.float64)  # sums of areas may exceed int64
    total, members = np.zeros(groups), np.empty((groups, len(order)), dtype=np.int64)
    for place, number in enumerate(order):
        least = np.argsort(total, kind="stable")
        members[least, place] = number
        total[least] += area[number]
    _exchange(members, area, total)
    group = np.empty(len(area), dtype=np.int64)
    group[members] = np.arange(groups)[:, None]
    return group


def _exchange(members: np.ndarray, area: np.ndarray, total: np.ndarray) -> None:
    """Balance groups: swap single micro-batches between the groups of most and least area, the next two, and so on.

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
        if not helps[0]:  # no swap helps the group of most area
            break
        low, high, best, more = low[helps], high[helps], best[helps], more[helps]
        given, taken = best // places, best % places
        members[high, given], members[low, taken] = members[low, taken], members[high, given]
        total[high] -= more
        total[low] += more
