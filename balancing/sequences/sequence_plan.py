"""The plan of a batch of sequences: which rank holds which tokens, in attention and in linear layers.

A batch is a list of sequences (documents) of different length. A layout cuts it into shards, contiguous pieces of one
sequence, each on one rank. The cost of linear layers is tokens. The cost of attention is the area under the causal
mask: a document of l tokens has l (l + 1) / 2 query-key pairs, so one long document costs as much as short documents
with many more tokens together. So the two may have different layouts (Zeppelin, arXiv 2509.21841, sections 2 and 3). If
they differ, tokens are remapped in between.
"""

import hashlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from typing import Any, Literal, NamedTuple, get_args

import numpy as np

from balancing.cluster import Cluster
from balancing.kernels.pairs import area_between, area_of_first, causal_area, token_counts

__all__ = [
    "TILE",
    "AttentionShape",
    "KVExchange",
    "LatentShape",
    "Range",
    "Reach",
    "SequencePlan",
    "Shard",
    "by_sequence",
    "columns",
    "in_window",
    "join_adjacent",
    "keys_before_runs",
    "layer_kinds",
    "reaches",
    "runs_of",
    "same_exchange",
    "zigzag_area",
    "zigzag_areas",
]

KVExchange = Literal["local", "ring", "gather"]
Range = tuple[int, int]  # [start, stop)
TILE = 128  # queries, and keys, of a tile of flash attention


class Shard(NamedTuple):
    """Tokens [start, stop) of sequence number `sequence`, held by `rank`."""

    sequence: int
    start: int
    stop: int
    rank: int

    @property
    def tokens(self) -> int:
        """Number of tokens."""
        return self.stop - self.start

    @property
    def area(self) -> int:
        """Query-key pairs whose query is in the shard: each sees its sequence from the beginning to itself."""
        return area_between(self.start, self.stop)


class LatentShape(NamedTuple):
    """The latent from which multi-latent attention projects keys and values.

    size: elements of a token's latent.
    shared: elements of a key that all heads share; they are not projected and travel with the latent.
    """

    size: int
    shared: int


@dataclass(frozen=True)
class AttentionShape:
    """Sizes of one transformer model, for costs.

    hidden: model width.
    heads: query heads.
    kv_heads: key-value heads; fewer than heads in grouped-query attention.
    layers: transformer layers.
    ffn_hidden: width of the feed-forward layer; 0 for layers without one.
    head_size: elements of one head of queries and keys; hidden / heads by default.
    value_size: elements of one head of values; head_size by default. Multi-latent attention has smaller values.
    window: tokens before itself that a token sees in layers with a sliding window; None without such layers.
    windowed_layers: number of the layers that have the window.
    latent: the latent that is sent in place of keys and values; None if keys and values are sent.
    tensor_parallel: tensor-parallel ranks. Each has its own heads, but all of the latent.
    item_bytes: bytes of an element that is sent; 2 for bf16.

    Raises ValueError for sizes below 1, an ffn_hidden below 0, heads that kv_heads does not divide, hidden that heads
    does not divide (without head_size), windowed layers without a window or a window without them, and more windowed
    layers than layers.
    """

    hidden: int
    heads: int
    kv_heads: int
    layers: int
    ffn_hidden: int
    head_size: int = 0
    value_size: int = 0
    window: int | None = None
    windowed_layers: int = 0
    latent: LatentShape | None = None
    tensor_parallel: int = 1
    item_bytes: int = 2

    def __post_init__(self) -> None:
        for name in ("hidden", "heads", "kv_heads", "layers", "ffn_hidden", "tensor_parallel", "item_bytes"):
            if getattr(self, name) < (least := int(name != "ffn_hidden")):
                raise ValueError(f"{name}={getattr(self, name)} must be at least {least}")
        if self.heads % self.kv_heads:
            raise ValueError(f"heads={self.heads} must be a multiple of kv_heads={self.kv_heads}")
        if not self.head_size:
            if self.hidden % self.heads:
                raise ValueError(f"hidden={self.hidden} must be a multiple of heads={self.heads}; or give head_size")
            object.__setattr__(self, "head_size", self.hidden // self.heads)
        if not self.value_size:
            object.__setattr__(self, "value_size", self.head_size)
        if not 0 <= self.windowed_layers <= self.layers or (self.window is None) != (self.windowed_layers == 0):
            raise ValueError(
                f"windowed_layers={self.windowed_layers} of layers={self.layers} does not go with window={self.window}"
            )

    @property
    def heads_of_rank(self) -> tuple[int, int]:
        """Query heads and key-value heads of one tensor-parallel rank."""
        return max(self.heads // self.tensor_parallel, 1), max(self.kv_heads // self.tensor_parallel, 1)

    def mean_area(self, lengths: Sequence[int]) -> float:
        """Query-key pairs of documents of `lengths` tokens in the mean layer."""
        pairs: float = causal_area(lengths)
        if self.window is not None:
            pairs += (causal_area(lengths, self.window) - pairs) * self.windowed_layers / self.layers
        return pairs

    def unseen_pairs(self, rows: np.ndarray) -> np.ndarray | float:
        """Query-key pairs under the causal mask, in whole tiles, that the mean layer does not compute of uncut
        documents. rows: [document], rows of tiles."""
        if self.window is None:
            return 0.0
        return unseen_tiles(0, rows, self.window) * float(TILE**2) * (self.windowed_layers / self.layers)


@dataclass(frozen=True)
class SequencePlan:
    """The ranks of all tokens of a batch, and the exchange that brings keys and values to the queries that see them.

    lengths: tokens of each sequence.
    ranks: number of ranks.
    method: the planner that made the plan.
    attention: the layout of attention. A rank's tokens are in the order of its shards in the tuple.
    linear: the layout of linear layers, in the same form. If it equals the layout of attention, nothing is remapped.
    exchange: of each sequence. "local": one rank holds all of it. "ring": the ranks that hold it pass its keys and
        values round in the order of `ring(sequence)`. "gather": each rank receives the keys that its queries see.
    capacity: most tokens of a rank in attention; None for no limit.
    window: tokens before itself that a token sees, in layers with a sliding window; None for all.
    cluster, shape: for which the plan was made. Its programs depend on them (`compile_rank`), so a plan that is made by
        hand needs them once it is compiled.

    Raises ValueError if a layout does not hold every token exactly once, a rank is out of range, a "local" sequence is
    on several ranks, a sequence with a window is on a ring, a rank exceeds the capacity, or there are more
    than `MOST_TOKENS` tokens.
    """

    lengths: tuple[int, ...]
    ranks: int
    method: str
    attention: tuple[Shard, ...]
    linear: tuple[Shard, ...]
    exchange: tuple[KVExchange, ...]
    capacity: int | None = None
    window: int | None = None
    cluster: Cluster | None = None
    shape: AttentionShape | None = None

    def __post_init__(self) -> None:
        area = causal_area(self.lengths, self.window)
        if len(self.exchange) != len(self.lengths):
            raise ValueError(f"{len(self.exchange)} exchanges are given for {len(self.lengths)} sequences")
        unknown = set(self.exchange) - set(get_args(KVExchange))
        if unknown:
            raise ValueError(f"exchange {sorted(unknown)[0]!r} is none of {', '.join(get_args(KVExchange))}")
        _check_layout("attention", self.table, self.lengths, self.ranks)
        if self.linear is not self.attention:
            _check_layout("linear", columns(self.linear), self.lengths, self.ranks)
        for sequence, exchange in enumerate(self.exchange):
            if exchange == "local" and len(self.ring(sequence)) > 1:
                raise ValueError(f"sequence {sequence} is local, but lies on ranks {self.ring(sequence)}")
        if self.window is not None and (self.window < 0 or "ring" in self.exchange):
            raise ValueError(f"window={self.window} must be at least 0, and its keys are gathered, not sent on rings")
        assert int(self.area.sum()) == area, "areas of the shards do not add up"
        if self.capacity is not None and len(self.tokens) and int(self.tokens.max()) > self.capacity:
            rank = int(self.tokens.argmax())
            raise ValueError(f"rank {rank} holds {self.tokens[rank]} tokens, over its capacity of {self.capacity}")

    @property
    def sees_all(self) -> bool:
        """Whether each query sees all tokens before it: there is no sliding window."""
        return self.window is None

    def first_seen(self, token: int) -> int:
        """The first token of a sequence that `token` sees."""
        return 0 if self.window is None else max(0, token - self.window)

    def end_of_reach(self, start: int, stop: int) -> int:
        """The end of those of tokens [start, stop) that see tokens before `start`."""
        return stop if self.window is None else min(stop, start + self.window)

    def before_shards(self) -> tuple[np.ndarray, np.ndarray]:
        """int64 [shard]: tokens before the shard that its queries see, and queries that see any of them."""
        _, start, stop, _ = self.table.T
        if self.window is None:
            return start, stop - start
        return np.minimum(start, self.window), np.minimum(stop - start, self.window)

    def unseen_tiles(self, rows: np.ndarray) -> np.ndarray | int:
        """Tiles that no query of a shard sees, of those under the causal mask. rows: [shard], rows of tiles."""
        return 0 if self.window is None else unseen_tiles(self.table[:, 1], rows, self.window)

    @property
    def remapped(self) -> bool:
        """Whether attention and linear layers have different layouts."""
        return self.attention != self.linear

    def shards(self, rank: int, *, linear: bool = False) -> tuple[Shard, ...]:
        """The shards of `rank`, in the order of its tokens."""
        return self._by_rank[linear][rank]

    def ring(self, sequence: int) -> tuple[int, ...]:
        """Ranks that hold `sequence` in attention, ascending, so that a ring enters each node once."""
        return self._rings[sequence]

    @cached_property
    def table(self) -> np.ndarray:
        """int64 [shard, (sequence, start, stop, rank)], the layout of attention."""
        return columns(self.attention)

    @cached_property
    def tokens(self) -> np.ndarray:
        """int64 [rank], tokens in attention."""
        return self._sum(self.table, lambda start, stop: stop - start)

    @cached_property
    def linear_tokens(self) -> np.ndarray:
        """int64 [rank], tokens in linear layers."""
        table = self.table if self.linear is self.attention else columns(self.linear)
        return self._sum(table, lambda start, stop: stop - start)

    @cached_property
    def area(self) -> np.ndarray:
        """int64 [rank], query-key pairs whose query is on the rank."""
        window = self.window
        return self._sum(self.table, lambda start, stop: area_of_first(stop, window) - area_of_first(start, window))

    @cached_property
    def digest(self) -> str:
        """Hash of the plan. Ranks compare it to check that all have the same plan."""
        content: tuple[object, ...] = (self.lengths, self.ranks, self.attention, self.linear, self.exchange)
        if self.window is not None:
            content += (self.window,)
        return hashlib.sha256(repr(content).encode()).hexdigest()

    def _sum(self, table: np.ndarray, what: Callable[[np.ndarray, np.ndarray], np.ndarray]) -> np.ndarray:
        _, start, stop, rank = table.T
        total = np.zeros(self.ranks, dtype=np.int64)
        np.add.at(total, rank, what(start, stop))
        return total

    @cached_property
    def _by_rank(self) -> tuple[tuple[tuple[Shard, ...], ...], ...]:
        layouts: list[list[list[Shard]]] = [[[] for _ in range(self.ranks)] for _ in range(2)]
        for kind, shards in enumerate((self.attention, self.linear)):
            for shard in shards:
                layouts[kind][shard.rank].append(shard)
        return tuple(tuple(tuple(own) for own in kind) for kind in layouts)

    @cached_property
    def _rings(self) -> tuple[tuple[int, ...], ...]:
        holders: list[set[int]] = [set() for _ in self.lengths]
        for shard in self.attention:
            holders[shard.sequence].add(shard.rank)
        return tuple(tuple(sorted(ranks)) for ranks in holders)


def columns(shards: Sequence[Shard]) -> np.ndarray:
    """int64 [shard, (sequence, start, stop, rank)]."""
    return np.fromiter(chain.from_iterable(shards), np.int64, 4 * len(shards)).reshape(-1, 4)


def by_sequence(shards: Iterable[Shard]) -> Mapping[int, list[Shard]]:
    """The shards of each sequence, sorted by position."""
    sorted_shards: dict[int, list[Shard]] = defaultdict(list)
    for shard in sorted(shards):
        sorted_shards[shard.sequence].append(shard)
    return sorted_shards


def same_exchange(shards: Sequence[Shard], lengths: Sequence[int], shared: KVExchange) -> tuple[KVExchange, ...]:
    """`shared` for every sequence that lies on several ranks, "local" for the others."""
    holder: dict[int, int] = {}
    exchange: list[KVExchange] = ["local"] * len(lengths)
    for shard in shards:
        if holder.setdefault(shard.sequence, shard.rank) != shard.rank:
            exchange[shard.sequence] = shared
    return tuple(exchange)


def runs_of(shards: Iterable[Shard]) -> list[Range]:
    """Token ranges of shards of one sequence on one rank, sorted by position; adjacent shards become one range."""
    return join_adjacent((shard.start, shard.stop) for shard in shards)


def join_adjacent(ranges: Iterable[Range]) -> list[Range]:
    """The ranges in their order; a range that starts where the one before it ends is merged with it."""
    joined: list[Range] = []
    for start, stop in ranges:
        if joined and joined[-1][1] == start:
            joined[-1] = (joined[-1][0], stop)
        else:
            joined.append((start, stop))
    return joined


def _check_layout(name: str, table: np.ndarray, lengths: Sequence[int], ranks: int) -> None:
    """Raise ValueError unless the layout holds each token of each sequence exactly once, on a rank below `ranks`."""
    sequence, start, stop, rank = table[np.lexsort((table[:, 1], table[:, 0]))].T
    if (wrong := np.flatnonzero((sequence < 0) | (sequence >= len(lengths)))).size:
        raise ValueError(f"the {name} layout has a shard of sequence {sequence[wrong[0]]}; there are {len(lengths)}")
    if (wrong := np.flatnonzero((rank < 0) | (rank >= ranks))).size:
        first = wrong[0]
        raise ValueError(f"the {name} layout puts sequence {sequence[first]} on rank {rank[first]} of {ranks}")
    follows = np.append(False, sequence[1:] == sequence[:-1])[: len(sequence)]
    expected = np.where(follows, np.roll(stop, 1), 0)
    if (wrong := np.flatnonzero((start != expected) | (stop <= start))).size:
        first = wrong[0]
        raise ValueError(
            f"the {name} layout of sequence {sequence[first]} has a shard of tokens {start[first]} to {stop[first]}, "
            f"where token {expected[first]} comes next"
        )
    held = np.zeros(len(lengths), dtype=np.int64)
    np.maximum.at(held, sequence, stop)
    if (wrong := np.flatnonzero(held != lengths)).size:
        first = wrong[0]
        raise ValueError(f"the {name} layout holds {held[first]} of the {lengths[first]} tokens of sequence {first}")


# Layers with a sliding window.


def layer_kinds(plan: SequencePlan, shape: AttentionShape) -> list[tuple[SequencePlan, int]]:
    """The plans of a batch for each kind of layers, with the number of layers: first those that see all tokens, then
    those with a sliding window, if the model has any. plan: of layers that see all tokens."""
    kinds = [(plan, shape.layers - shape.windowed_layers)]
    if shape.window is not None:
        kinds.append((in_window(plan, shape.window), shape.windowed_layers))
    return kinds


def in_window(plan: SequencePlan, window: int) -> SequencePlan:
    """The plan of the same batch for layers with a sliding window; `plan` itself if no sequence exceeds the window.

    With a window of w a token sees itself and the w tokens before it in its sequence, as with Megatron-LM's
    `--window-size w,0` and flash attention's `window_size_left`.

    With a window, attention costs about the same for each token, so these layers use the linear layout, with equal
    tokens on each rank. Nothing is remapped. A rank receives the keys in the windows of its first queries.
    """
    if max(plan.lengths) <= window + 1:
        return plan
    exchange = same_exchange(plan.linear, plan.lengths, "gather")
    return replace(plan, attention=plan.linear, exchange=exchange, capacity=None, window=window)


def unseen_tiles(start: Any, rows: Any, window: int) -> Any:
    """Tiles before the windows of `rows` rows of tiles, which begin at token `start` of a sequence."""
    before = (start - window) // TILE
    out = np.maximum(rows - np.maximum(-before, 0), 0)  # rows with such tiles
    return out * np.maximum(before, 0) + out * (out - 1) // 2


class Reach(NamedTuple):
    """Tokens [begin, stop) of `sequence` that later queries of `rank` see.

    Some of the tokens may be the rank's own. holders: shards of other ranks that hold the other tokens.
    """

    sequence: int
    begin: int
    stop: int
    rank: int
    holders: tuple[Shard, ...]


def reaches(plan: SequencePlan) -> list[Reach]:
    """The tokens that ranks need from other ranks in a plan with a sliding window, by sequence and position.

    No token occurs twice for the same rank.
    """
    assert plan.window is not None
    spread = {number for number in range(len(plan.lengths)) if len(plan.ring(number)) > 1}
    reached = []
    for sequence, shards in by_sequence(shard for shard in plan.attention if shard.sequence in spread).items():
        for begin, stop, rank in sorted(_reach_of_ranks(shards, plan.window)):
            holders = tuple(s for s in shards if s.start < stop and s.stop > begin and s.rank != rank)
            reached.append(Reach(sequence, begin, stop, rank, holders))
    return reached


def keys_before_runs(runs: Sequence[tuple[int, int]], window: int) -> Iterator[tuple[int, int]]:
    """Tokens [begin, stop) before runs of adjacent tokens that the runs' queries see; overlapping ranges are merged.

    runs: [start, stop) of one sequence on one rank, sorted.
    """
    last: tuple[int, int] | None = None
    for start, _ in runs:
        begin = max(0, start - window)
        if begin == start:
            continue
        if last is not None and begin <= last[1]:
            last = last[0], start
            continue
        if last is not None:
            yield last
        last = begin, start
    if last is not None:
        yield last


def _reach_of_ranks(shards: Sequence[Shard], window: int) -> Iterator[tuple[int, int, int]]:
    for rank in sorted({shard.rank for shard in shards}):
        runs = runs_of(shard for shard in shards if shard.rank == rank)
        yield from ((begin, stop, rank) for begin, stop in keys_before_runs(runs, window))


def zigzag_areas(lengths: Sequence[int] | np.ndarray, ranks: int, window: int | None = None) -> np.ndarray:
    """int64 [rank]: query-key pairs whose queries are on each of `ranks` context-parallel ranks.

    The packed sequence of documents of `lengths` tokens [document] is cut into 2 x ranks equal chunks. As in
    Megatron-LM, a rank holds chunks `rank` and `2 x ranks - 1 - rank`. window: as in `causal_area`.

    Raises ValueError if the tokens do not divide into equal chunks, and for more than MOST_TOKENS tokens.
    """
    tokens = token_counts(lengths)
    if ranks == 1:
        return np.array([causal_area(tokens, window)])
    total, chunks = int(tokens.sum()), 2 * ranks
    if total % chunks:
        raise ValueError(f"{total} tokens do not cut into {chunks} equal chunks; make it a multiple of {chunks}")
    begin = np.concatenate([[0], np.cumsum(tokens)])
    whole = np.concatenate([[0], np.cumsum(area_of_first(tokens, window))])  # pairs of the documents before
    cuts = np.arange(chunks + 1) * (total // chunks)
    document = np.searchsorted(begin, cuts, side="right") - 1
    inside = cuts - begin[document]
    pairs = np.diff(whole[document] + area_of_first(inside, window))
    return pairs[:ranks] + pairs[: ranks - 1 : -1]


def zigzag_area(lengths: Sequence[int] | np.ndarray, rank: int, ranks: int) -> int:
    """The area of `rank` in `zigzag_areas`. Raises ValueError as `zigzag_areas` does."""
    return int(zigzag_areas(lengths, ranks)[rank])
