"""Exact split of a micro-batch's load over the instances of a placement that was planned from an older load.

Pro-Prophet and similar systems use an old load both to place replicas and to divide tokens, and accept the error. Here
only the placement depends on an old load. The token counts of the current micro-batch are gathered before tokens are
sent, and the split is computed from them.

The split is block coordinate descent on the sum of squared rank loads. The minimum of this sum also minimizes the
largest load. One step divides the tokens of one expert over its instances by water-filling, while the tokens of all
other experts stay as they are. Experts without a common rank are divided in the same step (`color_by_rank`). A few
sweeps over all experts reach the optimum.

All arithmetic is on integers with a fixed number of steps, so all ranks compute the same split on any hardware. On a
GPU, `split_kernel` computes the same split in one kernel.
"""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from balancing.experts.placement import ReplicaPlacement, color_by_rank

__all__ = [
    "LATE_ROUNDS",
    "LATE_SWEEPS",
    "MOST_RANKS",
    "MOST_TOKENS",
    "RankSplit",
    "Splitter",
    "check_counts",
    "split_tokens",
    "sweeps_of",
    "traffic",
]

MOST_RANKS = 128  # limit of the kernels: pairs of more ranks do not fit the registers of one program

_TURNS = 40  # steps of all classes together; the result is well within 1 % of the optimum (benchmarks/experts/plans.py)
# Late copies are chosen from the last split, at most so often; each further split begins from that without copies.
LATE_ROUNDS, LATE_SWEEPS = 2, 8
MOST_TOKENS = 1 << 31  # of an expert; their square must stay below 2^63
_FULL = 1 << 50  # load of a rank that must get no tokens; sums of a few thousand such loads stay below 2^63


class RankSplit(NamedTuple):
    """A split, as some source ranks need it: NumPy arrays, or tensors on the device of the loads.

    served: int64 [source_rank, physical], tokens of each source rank that each instance serves.
    first, last: int64 [source, physical], of these source ranks. An instance serves those tokens of its expert,
        numbered from 1 on their source rank, for which first < number <= last. Lower-numbered ones serve the first.
    tokens: int64 [rank], tokens of each rank.
    expert: int64 tensor [physical], the expert of each physical number; 0 for an empty slot.
    late: int64 [rank, late slot], the expert in each late slot, -1 in empty ones; None without late slots.
    """

    served: Any
    first: Any
    last: Any
    tokens: Any
    expert: Any
    late: Any = None


def split_tokens(load: ArrayLike, placement: ReplicaPlacement, *, sweeps: int | None = None) -> np.ndarray:
    """Tokens of each expert by source and serving rank: int64 [source_rank, expert, rank].

    The loads of ranks are as equal as the placement allows. Tokens stay on their rank or in their node if an instance
    there has quota left. Sums over the last axis give `load`. To split many loads, use a `Splitter`.

    load: int [source_rank, expert], tokens on each rank that chose each expert.
    placement: the instances.
    sweeps: how often each class of experts is divided; by default once if there is one class, else 4 to 16 times, less
        often if there are more classes.

    Raises ValueError for a load of another shape, one that is not integer, or has negative counts.
    """
    counts = check_counts(load, placement)
    served = Splitter(placement, sweeps=sweeps)(counts)
    full = np.flatnonzero(placement.phys2log >= 0)
    tokens = np.zeros((placement.num_ranks, placement.experts, placement.num_ranks), dtype=np.int64)
    tokens[:, placement.phys2log[full], full // (placement.homes_per_rank + placement.slots)] = served[:, full]
    return tokens


def traffic(load: ArrayLike, placement: ReplicaPlacement) -> np.ndarray:
    """Tokens sent from rank to rank: int64 [source_rank, rank]. Sums over sources are the loads of ranks."""
    served = Splitter(placement)(check_counts(load, placement))
    # Summed in memory order.
    return served.T.reshape(placement.num_ranks, -1, placement.num_ranks).sum(1).T


def check_counts(load: ArrayLike, placement: ReplicaPlacement) -> np.ndarray:
    """`load` as int64 [source_rank, expert]. Raises ValueError if it does not fit the placement."""
    counts = np.asarray(load)
    if counts.shape != (placement.num_ranks, placement.experts):
        raise ValueError(
            f"load of shape {counts.shape} does not belong to a placement of {placement.experts} experts on "
            f"{placement.num_ranks} ranks; it must be [source_rank, expert]"
        )
    if counts.dtype.kind not in "iu" or (counts.size and counts.min() < 0):
        raise ValueError("load must be token counts: whole numbers that are not negative")
    # First each count, so that no sum exceeds int64.
    if counts.size and (counts.max() > MOST_TOKENS or counts.sum(0, dtype=np.int64).max() > MOST_TOKENS):
        raise ValueError(f"load has an expert with more than {MOST_TOKENS} tokens, too many for exact 64-bit integers")
    return counts.astype(np.int64)


def sweeps_of(placement: ReplicaPlacement, classes: int) -> int:
    """How often each class of experts is divided by default, so that the total time hardly depends on `classes`.

    placement: the instances. 0 for split rules other than "level".
    classes: number of classes of experts without a common rank.
    """
    if placement.split != "level":
        return 0
    return min(16, max(4, _TURNS // classes)) if classes > 1 else 1


class Splitter:
    """Splits loads over one placement. Construction takes about a millisecond, a call less.

    placement: the instances and the `SplitRule`.
    sweeps: as in `split_tokens`.
    start: with late copies the split begins from that of `start`, over the same placement with empty late slots; None
        builds it.
    """

    def __init__(
        self, placement: ReplicaPlacement, *, sweeps: int | None = None, start: "Splitter | None" = None
    ) -> None:
        if sweeps is not None and sweeps < 1:
            raise ValueError(f"sweeps={sweeps} must be at least 1")
        if placement.late_copies:
            start = start or Splitter(placement.with_late(np.full_like(placement.late, -1)), sweeps=sweeps)
            sweeps = LATE_SWEEPS
        self.placement, self._start = placement, start
        classes = color_by_rank(placement)
        self._sweeps = sweeps or sweeps_of(placement, len(classes))
        self._build(classes)

    def with_late(self, late: np.ndarray) -> "Splitter":
        """The splitter with these late copies instead of empty late slots. late: int [rank, late slot]."""
        return Splitter(self.placement.with_late(late), start=self)

    def __call__(self, load: np.ndarray, quota: np.ndarray | None = None) -> np.ndarray:
        """Tokens of each source rank that each instance serves: int64 [source_rank, physical].

        load: int [source_rank, expert], not checked.
        quota: `quotas` of the load, if they are known.
        """
        starting = np.ascontiguousarray(load.T, dtype=np.int64)  # [expert, source], so that lookups read whole rows
        served = np.zeros((len(self.placement.phys2log), self.placement.num_ranks), dtype=np.int64)
        served[self._home_only] = starting[self._expert_home_only]
        if not self._classes:
            return served.T
        if self.placement.split == "own":
            return self._serve_own(starting, served).T
        quota = self.quotas(starting.sum(1)) if quota is None else quota
        served[self._physical] = self._by_source(starting, quota[self._physical])
        return served.T

    def quotas(self, totals: np.ndarray) -> np.ndarray:
        """Tokens that each instance serves, over all source ranks, by the rules "level" and "even": int64 [physical].

        totals: int64 [expert], tokens of each expert.
        """
        place = self.placement
        quota = np.zeros(len(place.phys2log), dtype=np.int64)
        quota[self._home_only] = totals[self._expert_home_only]
        if not self._classes:
            return quota
        total = totals[self._cell_expert]
        if self._start is None:
            cells = self._even(total)
        else:
            cells = np.zeros_like(total)
            cells[self._cell] = self._start.quotas(totals)[self._physical]
        share = self._by_class(cells)
        if place.split == "level":
            self._balance(totals, self._by_class(total), share)
        quota[self._physical] = np.concatenate([x.reshape(-1) for x in share])[self._cell]
        return quota

    def _build(self, classes: list[list[int]]) -> None:
        """Build the index tables. A row is an expert with replicas, in order of classes. Ranks are in chain order."""
        place = self.placement
        chains = place.chains
        home_only = np.flatnonzero((place.phys2log >= 0) & ~np.isin(place.phys2log, list(chains)))
        self._home_only, self._expert_home_only = home_only, place.phys2log[home_only]
        # For each class: the ranks of its chains, and their positions in the chain, counted from 1.
        self._classes: list[tuple[np.ndarray, np.ndarray]] = []
        if not classes:
            return
        self._rows = rows = np.array([expert for experts in classes for expert in experts], dtype=np.int64)
        count = np.array([len(chains[expert]) for expert in rows.tolist()], dtype=np.int64)
        row = np.repeat(np.arange(len(rows)), count)
        rank = np.array([rank for expert in rows.tolist() for rank in chains[expert]], dtype=np.int64)
        self._cell = self._build_cells(np.array([len(experts) for experts in classes]), rows, count, row)
        ranks = np.full(len(self._cell_expert), place.num_ranks)  # this number marks cells behind the end of a chain
        ranks[self._cell] = rank
        self._classes = list(zip(self._by_class(ranks), self._by_class(self._cell_position + 1), strict=True))
        self._row, self._rank, self._expert = row, rank, rows[row]
        self._instance = np.arange(len(row))
        self._physical = place.log2phys[rows[row], rank]
        self._home = place.log2phys[rows, place.home[rows]]
        self._replica = (place.home[rows[row]] != rank).astype(np.int64)
        self._nodes = -(-place.num_ranks // place.ranks_per_node)
        self._padding = self._nodes * place.ranks_per_node - place.num_ranks
        self._node = rank // place.ranks_per_node
        self._row_start, self._row_end = _run_starts(row), np.flatnonzero(np.append(row[1:] != row[:-1], True))
        in_node = row * self._nodes + self._node
        self._node_start, self._node_end = _run_starts(in_node), _ends(in_node)

    def _build_cells(self, sizes: np.ndarray, rows: np.ndarray, count: np.ndarray, row: np.ndarray) -> np.ndarray:
        """Lay out the tables of all classes, one after another. A class's table is [position in the chain, row].

        sizes: number of rows of each class.
        rows: expert of each row.
        count: length of each row's chain; a table has as many positions as the longest chain of its class.
        row: row of each instance.

        Returns the cell of each instance.
        """
        first = np.cumsum(sizes) - sizes
        most = count[first]  # the longest chain of a class comes first
        cuts = np.append(0, np.cumsum(sizes * most))
        class_index = np.repeat(np.arange(len(sizes)), sizes * most)
        inside = np.arange(cuts[-1]) - cuts[class_index]
        position = inside // sizes[class_index]
        cell_row = first[class_index] + inside % sizes[class_index]
        self._cell_expert, self._cell_count, self._cell_position = rows[cell_row], count[cell_row], position
        self._cuts = list(zip(cuts.tolist(), cuts[1:].tolist(), sizes.tolist(), strict=False))
        class_index = np.repeat(np.arange(len(sizes)), sizes)[row]
        place = np.arange(len(row)) - (np.cumsum(count) - count)[row]
        return cuts[class_index] + place * sizes[class_index] + row - first[class_index]

    def _by_class(self, cells: np.ndarray) -> list[np.ndarray]:
        """Views of the values of all cells: [instance, row] for each class."""
        return [cells[first:last].reshape(-1, size) for first, last, size in self._cuts]

    def _even(self, total: np.ndarray) -> np.ndarray:
        """Equal shares of the instances, [cell]; the first instances get the remainder.

        total: [cell], tokens of the cell's expert.
        """
        position, count = self._cell_position, self._cell_count
        return total // count * (position < count) + (position < total % count)

    def _balance(self, totals: np.ndarray, total: list[np.ndarray], share: list[np.ndarray]) -> None:
        """Balance the loads of ranks by water-filling, in place.

        totals: [expert], tokens of each expert.
        total: [instance, row] for each class, tokens of each instance's expert.
        share: [instance, row] for each class, tokens of each instance; updated.
        """
        place = self.placement
        load = np.zeros(place.num_ranks + 1, dtype=np.int64)
        load[-1] = _FULL
        alone = np.zeros(len(place.phys2log), dtype=np.int64)
        alone[self._home_only] = totals[self._expert_home_only]
        load[:-1] = alone.reshape(place.num_ranks, -1).sum(1)
        for x, (ranks, _) in zip(share, self._classes, strict=True):
            load[ranks] = load[ranks] + x
        # For speed: in place, along the outer dimension, on equal shapes.
        for sweep in range(1, self._sweeps + 1):
            for index, (ranks, numbers) in enumerate(self._classes):
                others = load[ranks]
                others -= share[index]
                # Cumulative sums in ascending order: the smallest load, the sum of the two smallest, ...
                water = others.copy()
                water.sort(0)
                np.add.accumulate(water, 0, out=water)
                water += total[index]
                water //= numbers
                height = np.minimum.reduce(water)  # water.min(0) takes twice as long
                poured = np.maximum(others, height)
                poured -= others
                rest = total[index][0] - np.add.reduce(poured)  # fewer tokens than instances below the water level
                if sweep < self._sweeps:
                    first = poured[0]
                    first += rest
                else:
                    reached = others <= height
                    poured = poured + reached * (np.cumsum(reached, 0) <= rest)
                share[index] = poured
                others += poured
                load[ranks] = others

    def _serve_own(self, starting: np.ndarray, served: np.ndarray) -> np.ndarray:
        """Each replica serves the tokens of its own rank, the home serves the others."""
        stays = starting[self._expert, self._rank] * self._replica
        kept = np.zeros_like(starting)
        kept[self._expert, self._rank] = stays
        served[self._physical, self._rank] = stays
        served[self._home] = (starting - kept)[self._rows]
        return served

    def _by_source(self, starting: np.ndarray, quota: np.ndarray) -> np.ndarray:
        """Divide quotas over source ranks, first the same rank, then the same node: int64 [instance, source_rank].

        starting: [expert, source_rank], tokens. quota: [instance], tokens.
        """
        kept = np.minimum(starting[self._expert, self._rank], quota)
        supply = starting[self._rows]
        supply[self._row, self._rank] -= kept
        quota = quota - kept
        served = np.zeros((len(kept), supply.shape[1]), dtype=np.int64)
        if self._nodes > 1:
            # As many tokens as possible are served within their node.
            inside = supply
            if self._padding:
                inside = np.concatenate([supply, np.zeros((len(supply), self._padding), dtype=np.int64)], 1)
            inside = inside.reshape(-1, self.placement.ranks_per_node)
            local = self._in_node(inside, self._row * self._nodes + self._node, quota)
            given = np.zeros((len(kept), self._nodes, self.placement.ranks_per_node), dtype=np.int64)
            given[self._instance, self._node] = local
            served = given.reshape(len(kept), -1)[:, : supply.shape[1]]
            quota = quota - local.sum(1)
            supply = supply - self._per_row(served)
        served = served + self._overlap(supply, self._row, quota, self._row_start)
        served[self._instance, self._rank] += kept
        return served

    def _in_node(self, supply: np.ndarray, section: np.ndarray, quota: np.ndarray) -> np.ndarray:
        """Match tokens and quotas of an expert within a node, in proportion: int64 [instance, source in node].

        The tokens left to cross nodes are then in proportion, too, and are spread over the NICs.

        supply: [section, source in node], tokens; a section is an expert in a node.
        section: of each instance.
        quota: tokens that each instance may still serve.
        """
        end = np.cumsum(quota, 0)
        before = (end - quota)[self._node_start]
        wanted = end[self._node_end] - before  # quota of all instances of the expert in the node
        offered = supply.sum(1)
        wanted_in = np.zeros(len(supply), dtype=np.int64)
        wanted_in[section] = wanted
        matched = np.minimum(offered, wanted_in)
        upto = np.cumsum(supply, 1)
        share, whole = matched[:, None], np.maximum(offered, 1)[:, None]
        given = upto * share // whole - (upto - supply) * share // whole
        share, whole = matched[section], np.maximum(wanted, 1)
        taken = (end - before) * share // whole - (end - quota - before) * share // whole
        return self._overlap(given, section, taken, self._node_start)

    def _overlap(self, supply: np.ndarray, section: np.ndarray, quota: np.ndarray, start: np.ndarray) -> np.ndarray:
        """Match supply and demand of each section in order: int64 [instance, source].

        Supplies are laid end to end as intervals, and so are demands. A match is the overlap of two intervals.

        supply: [section, source], tokens; a section is an expert, or an expert in a node.
        section: of each instance.
        quota: demand of each instance.
        start: first instance of each instance's section.
        """
        upper = np.cumsum(supply, 1)
        end = np.cumsum(quota, 0)
        begin = end - quota
        offset = begin[start]
        low, high = (begin - offset)[:, None], (end - offset)[:, None]
        return np.maximum(np.minimum(upper[section], high) - np.maximum((upper - supply)[section], low), 0)

    def _per_row(self, given: np.ndarray) -> np.ndarray:
        """Sum [instance, source] over the instances of each row."""
        upto = np.cumsum(given, 0)[self._row_end]
        upto[1:] = upto[1:] - upto[:-1]
        return upto


def _run_starts(keys: np.ndarray) -> np.ndarray:
    """For each position, the first position of its run of equal values."""
    first = np.concatenate([[True], keys[1:] != keys[:-1]])
    return np.maximum.accumulate(np.where(first, np.arange(len(keys)), 0))


def _ends(keys: np.ndarray) -> np.ndarray:
    """For each position, the last position of its run of equal values."""
    return len(keys) - 1 - _run_starts(keys[::-1])[::-1]
