"""Distributes documents over micro-batches so that all cost the same and none has more tokens than its capacity.

A document's cost grows faster than its length, so micro-batches of long documents have few tokens and micro-batches of
short documents have many. The longest documents are placed first, each in the micro-batch that costs least so far and
has room (longest processing time, Graham 1969). Short documents then fill gaps. At last the most expensive micro-batch
gives a document to another micro-batch, or swaps it for a cheaper document or, where the other micro-batch is full, for
several short documents, as long as that makes the deal more even.

A deal is the micro-batch of each document. Costs are whole numbers and ties go to the lower number, so every rank makes
the same deal.
"""

import heapq
from collections.abc import Sequence

import numpy as np

__all__ = ["balanced_deal", "hill_order", "whole_costs"]

_GOOD_ENOUGH = 1.001  # cost max / mean at which exchanges end
_SMALLEST_RESOLUTION = 2.0**-40  # unit of costs over the most expensive document
_SMALLEST_PART = 2.0**-62  # the same over all documents together, whose sum must fit int64
_SPLIT = 16  # documents of the most expensive micro-batch that are tried against several documents of another
# (excess, given, taken). excess: cost of the more expensive of the two micro-batches after the exchange, less the cost
# of the cheaper one before it. given, taken: documents that the expensive micro-batch gives and takes.
_Exchange = tuple[int, list[int], list[int]]


def whole_costs(seconds: Sequence[float] | np.ndarray) -> np.ndarray:
    """int64 [document], costs in a unit so small that rounding does not matter: 2^-40 of the largest. Of four million
    documents or more it may be larger."""
    exact = np.asarray(seconds, dtype=np.float64)
    unit = max(exact.max() * _SMALLEST_RESOLUTION, exact.sum() * _SMALLEST_PART)
    return np.rint(exact / unit).astype(np.int64)


def balanced_deal(
    costs: np.ndarray,
    tokens: np.ndarray,
    micro_batches: int,
    capacity: int,
    drawn: np.ndarray | None = None,
    before: np.ndarray | None = None,
) -> np.ndarray:
    """int64 [document], the micro-batch of each.

    costs: int64 [document], not decreasing in tokens.
    tokens: int64 [document].
    micro_batches: number of micro-batches of the step; at most as many as documents.
    capacity: most tokens of a micro-batch.
    drawn: int64 [document], a deal within the capacity. It is returned if no other deal is found or costs less.
    before: int64 [micro-batch], cost of each micro-batch without documents; 0 by default. A micro-batch that costs more
        without documents gets documents of less cost.

    Raises ValueError if no deal within the capacity is found.
    """
    before = np.zeros(micro_batches, dtype=np.int64) if before is None else before
    found = _longest_first(costs, tokens, before, capacity, fullest=False)
    if found is None:
        found = _longest_first(costs, tokens, before, capacity, fullest=True)
    if found is None and drawn is None:
        raise ValueError(
            f"no distribution of {len(tokens)} documents with {int(tokens.sum())} tokens over {micro_batches} "
            f"micro-batches of at most {capacity} tokens is found; "
            f"raise the capacity (the longest document has {int(tokens.max())})"
        )
    start = drawn if found is None else found
    assert start is not None
    deal = _exchanged(costs, tokens, start, before, capacity)
    if (
        drawn is not None
        and (before + _sums(costs, drawn, micro_batches)).max() <= (before + _sums(costs, deal, micro_batches)).max()
    ):
        return drawn
    return deal


def hill_order(costs: np.ndarray) -> np.ndarray:
    """int64 [place]: the micro-batches in the order in which they run, cheap ones first and last.

    A pipeline fills with the first micro-batches and drains with the last ones, while other stages wait. In between,
    neighbours should cost about the same.

    costs: [micro-batch].
    """
    ascending = np.argsort(costs, kind="stable")
    return np.concatenate([ascending[::2], ascending[1::2][::-1]])


def _sums(values: np.ndarray, deal: np.ndarray, micro_batches: int) -> np.ndarray:
    total = np.zeros(micro_batches, dtype=np.int64)
    np.add.at(total, deal, values)
    return total


def _longest_first(
    costs: np.ndarray, tokens: np.ndarray, before: np.ndarray, capacity: int, *, fullest: bool
) -> np.ndarray | None:
    """A deal of documents, longest first, each to the micro-batch that costs least so far and has room.

    None if a document fits no micro-batch. fullest: prefer the micro-batch with least room instead, to pack tightest.
    """
    number = np.empty(len(costs), dtype=np.int64)
    # key, tokens, micro-batch
    heap = [(0 if fullest else cost, 0, micro_batch) for micro_batch, cost in enumerate(before.tolist())]
    heapq.heapify(heap)
    for document in np.lexsort((np.arange(len(costs)), -costs, -tokens)).tolist():
        length, cost = int(tokens[document]), int(costs[document])
        passed = []
        while heap and heap[0][1] + length > capacity:
            passed.append(heapq.heappop(heap))
        if not heap:
            return None
        key, filled, micro_batch = heapq.heappop(heap)
        number[document] = micro_batch
        filled += length
        for entry in ((-filled if fullest else key + cost, filled, micro_batch), *passed):
            heapq.heappush(heap, entry)
    _fill_empty(number, len(before))
    return number


def _fill_empty(number: np.ndarray, micro_batches: int) -> None:
    """Give a document to each micro-batch without one, from the micro-batch that has most documents."""
    documents = np.bincount(number, minlength=micro_batches)
    for empty in np.flatnonzero(documents == 0).tolist():
        source = int(documents.argmax())
        number[np.flatnonzero(number == source)[0]] = empty
        documents[source], documents[empty] = documents[source] - 1, 1


def _exchanged(
    costs: np.ndarray, tokens: np.ndarray, deal: np.ndarray, before: np.ndarray, capacity: int
) -> np.ndarray:
    """The deal after exchanges between the most expensive micro-batch and others, as long as exchanges help."""
    deal, micro_batches = deal.copy(), len(before)
    order = np.argsort(costs, kind="stable")
    # Of each micro-batch, cheapest first
    documents = [order[deal[order] == micro_batch] for micro_batch in range(micro_batches)]
    cost, filled = before + _sums(costs, deal, micro_batches), _sums(tokens, deal, micro_batches)
    enough = int(cost.sum() / micro_batches * _GOOD_ENOUGH)
    for _ in range(4 * micro_batches + 64):
        dear = int(cost.argmax())
        if cost[dear] <= enough:
            break
        best: tuple[int, int, list[int], list[int]] | None = None
        for other in np.argsort(cost, kind="stable").tolist():
            gap, room = int(cost[dear] - cost[other]), int(capacity - filled[other])
            if gap <= 0 or (best is not None and best[0] <= max(enough, cost[dear] - gap // 2)):
                break  # later ones cannot do better: an exchange reduces the cost by half of the gap at most
            spare = int(capacity - filled[dear])
            found = _swap(costs, tokens, documents[dear], documents[other], gap, room)
            found = found or _swap_several(costs, tokens, documents[dear], documents[other], gap, room, spare)
            if found is not None and (best is None or cost[dear] - gap + found[0] < best[0]):
                best = int(cost[dear] - gap + found[0]), other, found[1], found[2]
        if best is None:
            break
        _, other, given_away, given_back = best
        for given, source, target in ((given_away, dear, other), (given_back, other, dear)):
            deal[given] = target
            for values, total in ((costs, cost), (tokens, filled)):
                amount = int(values[given].sum())
                total[source] -= amount
                total[target] += amount
        for micro_batch in (dear, other):
            documents[micro_batch] = order[deal[order] == micro_batch]
    return deal


def _swap(
    costs: np.ndarray, tokens: np.ndarray, dear: np.ndarray, other: np.ndarray, gap: int, room: int
) -> _Exchange | None:
    """The best exchange of one document of `dear` for none or for a cheaper one of `other`; None if nothing helps.

    dear, other: documents of the two micro-batches, cheapest first.
    gap: how much more `dear` costs than `other`.
    room: tokens that `other` can still take.
    """
    back_cost = np.concatenate([[0], costs[other]])
    back_tokens = np.concatenate([[0], tokens[other]])
    cost_of_dear = costs[dear]
    least = np.searchsorted(back_tokens, tokens[dear] - room)  # a cheaper one would not free enough room
    near = np.searchsorted(back_cost, cost_of_dear - gap // 2)
    best: tuple[int, int, int] | None = None
    for returned in (near - 1, near):
        returned = np.maximum(returned, least)
        possible = returned < len(back_cost)
        moved = cost_of_dear - back_cost[np.minimum(returned, len(back_cost) - 1)]
        after = np.where(possible & (moved > 0) & (moved < gap), np.maximum(moved, gap - moved), gap)
        if len(dear) == 1:
            after = np.where(returned == 0, gap, after)  # a micro-batch keeps a document
        first = int(after.argmin())
        if after[first] < gap and (best is None or after[first] < best[0]):
            best = int(after[first]), first, int(returned[first])
    if best is None:
        return None
    most, given, taken = best
    return most, [int(dear[given])], [int(other[taken - 1])] if taken else []


def _swap_several(
    costs: np.ndarray, tokens: np.ndarray, dear: np.ndarray, other: np.ndarray, gap: int, room: int, spare: int
) -> _Exchange | None:
    """As `_swap`, for several documents of `other` that are neighbours in the order of costs: about as many tokens, at
    less cost.

    spare: tokens that `dear` can still take.
    """
    to_tokens = np.concatenate([[0], np.cumsum(tokens[other])])
    to_cost = np.concatenate([[0], np.cumsum(costs[other])])
    best: tuple[int, int, int, int] | None = None
    for first in range(len(dear) - 1, max(-1, len(dear) - 1 - _SPLIT), -1):
        length, cost = int(tokens[dear[first]]), int(costs[dear[first]])
        begin = np.arange(len(other))
        end = np.searchsorted(to_tokens, to_tokens[:-1] + max(length - room, 1))
        possible = end <= len(other)
        end = np.minimum(end, len(other))
        possible &= to_tokens[end] - to_tokens[begin] <= length + spare
        moved = cost - (to_cost[end] - to_cost[begin])
        after = np.where(possible & (moved > 0) & (moved < gap), np.maximum(moved, gap - moved), gap)
        place = int(after.argmin())
        if after[place] < gap and (best is None or after[place] < best[0]):
            best = int(after[place]), first, place, int(end[place])
    if best is None:
        return None
    most, given, start, until = best
    return most, [int(dear[given])], [int(document) for document in other[start:until]]
