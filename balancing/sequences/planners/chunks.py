"""One layout with equal tokens and equal causal area on each rank, so that linear layers and attention share it.

Zeppelin balances attention and tokens with two layouts and moves tokens between them. MagiAttention and DCP distribute
chunks of fixed size until both are roughly equal. Here pieces are sized to fit (`planners.dealing`), first over nodes,
then over the ranks of each node.

Traffic over network cards follows from the distribution over nodes. A node receives the tokens that its pieces see on
other nodes, and it sends each of its tokens to every node that needs it. In backward it sends and receives both, keys
and gradients. The time is that of the fullest node, so several distributions are tried, and the one with the least
exposed time is taken, up to 32 nodes:

- Longest sequences first: the nodes in turn take the ends of the longest sequences. Their beginnings end up on few
  nodes, which send them to all others.
- Whole sequences first: each goes to the node that lacks most area. Only sequences shorter than a limit are cut, or
  those that fit nowhere. Half a node's tokens are tried as the limit, then half of that, and so on.
- Spread beginnings, from the first of these distributions: the beginning of a sequence that lies on several nodes is
  distributed over all nodes so that they send and receive equally much. The sequence that the fullest node sends most
  of comes first.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from math import inf, sqrt
from operator import itemgetter

import numpy as np

from balancing.sequences.cost import exposed_seconds, extra_pairs, hidden_seconds, token_bytes
from balancing.sequences.planners.dealing import TOLERANCE, Piece, deal, joined, piece_area
from balancing.sequences.planners.problem import Problem, quickest
from balancing.sequences.sequence_plan import TILE, SequencePlan, Shard

__all__ = ["plan_chunks"]

_MOST_NODES = 32  # for which several distributions are tried; with more a plan would take longer than 100 ms
_MOST_SPREADS = 12  # sequences whose beginning is spread, counted again if one is spread anew
_BISECTIONS = 24  # of the tokens that every node sends and receives

# With measured rates. _TRIES: most times that tokens are distributed over the ranks of a node again; once with
# _EVENED_RANKS ranks and never with more, since each takes as long as half a plan. _EVEN: ranks may differ from the
# mean time by this share of it. _MOST_EXTRA: most area, over the mean, that a rank gives up for its rows and pieces.
_TRIES, _EVENED_RANKS, _EVEN, _MOST_EXTRA = 2, 64, 0.01, 0.25

_Nodes = list[list[Piece]]  # pieces of each node
_Heads = dict[int, dict[int, int]]  # sequence -> node -> tokens of the sequence's beginning; the earliest node first


def plan_chunks(problem: Problem) -> SequencePlan:
    """The quickest of the layouts with equal tokens and equal area; with measured rates, with more equal seconds."""
    plans = [problem.plan(_over_ranks(nodes, problem), "gather") for nodes in _distributions(problem)]
    plan = quickest(plans, problem.cluster, problem.shape)
    return plan if problem.cluster.rates is None else _evened_in_time(plan, problem)


def _evened_in_time(plan: SequencePlan, problem: Problem) -> SequencePlan:
    """A plan with as many tokens on each rank and more even seconds of attention, if one is found that is quicker."""
    cluster, shape = problem.cluster, problem.shape
    tried = [plan]
    for _ in range(min(_TRIES, _EVENED_RANKS // plan.ranks)):
        extra = extra_pairs(plan, cluster, shape)
        seconds = plan.area + extra  # in units of a pair
        if seconds.max() <= (1 + _EVEN) * seconds.mean():
            break
        most = _MOST_EXTRA * float(plan.area.mean())
        nodes: _Nodes = [[] for _ in _node_ranks(problem)]
        for sequence, start, stop, rank in plan.attention:
            nodes[rank // cluster.ranks_per_node].append((sequence, start, stop))
        again = _over_ranks(map(joined, nodes), problem, np.clip(extra - extra.mean(), -most, most).tolist())
        plan = problem.plan(again, "gather")
        tried.append(plan)
    return quickest(tried, cluster, shape)


def _node_ranks(problem: Problem) -> list[range]:
    """The ranks of each node."""
    size, ranks = problem.cluster.ranks_per_node, problem.cluster.world_size
    return [range(first, min(first + size, ranks)) for first in range(0, ranks, size)]


def _distributions(problem: Problem) -> list[_Nodes]:
    """Distributions over nodes with `Problem.quotas` tokens on the ranks of each, and areas in proportion to them.

    The first has the longest sequences first. The second, if there is one, exposes less of the transfers between nodes;
    its transfers inside nodes and its tiles may cost more.
    """
    quotas = [sum(problem.quotas[rank] for rank in node) for node in _node_ranks(problem)]
    first = deal([(sequence, 0, length) for sequence, length in enumerate(problem.lengths)], quotas, problem.chunk)
    several = 1 < len(quotas) <= _MOST_NODES
    by_node = _quickest(first, quotas, problem) if several else first
    return [first] if by_node is first else [first, by_node]


def _over_ranks(nodes: Iterable[list[Piece]], problem: Problem, extra: Sequence[float] | None = None) -> list[Shard]:
    """The layout with the pieces of each node distributed over its ranks, so that area and `extra` are equal.

    extra: extra work of each rank, query-key pairs that cost as much as what a rank computes besides its area.
    """
    quotas, shards = problem.quotas, []
    for ranks, pieces in zip(_node_ranks(problem), nodes, strict=True):
        more = None if extra is None else [extra[rank] for rank in ranks]
        dealt = deal(pieces, [quotas[rank] for rank in ranks], problem.chunk, extra=more)
        shards += [Shard(*piece, rank) for rank, own in zip(ranks, dealt, strict=True) for piece in own]
    return shards


def _quickest(first: _Nodes, quotas: Sequence[int], problem: Problem) -> _Nodes:
    """The distribution over nodes with the least exposed time; `first` if none has less."""
    lengths, cluster, shape, chunk = problem.lengths, problem.cluster, problem.shape, problem.chunk
    areas = [sum(map(piece_area, pieces)) for pieces in first]
    most = (1 + 2 * TOLERANCE) * sum(areas) / len(areas)
    token_seconds = token_bytes(shape) / (cluster.nic_bandwidth * cluster.nics_per_node)
    compute = hidden_seconds(sum(areas) / cluster.world_size, cluster, shape)

    def exposed(nodes: _Nodes) -> float:
        """Seconds in one layer that compute does not hide; infinite if areas are not even."""
        if max(sum(map(piece_area, pieces)) for pieces in nodes) > most:
            return inf
        moved = _Crossing(nodes)
        forward, backward = max(map(max, zip(moved.received, moved.sent, strict=True))), max(moved.both)
        return exposed_seconds((forward * token_seconds, backward * token_seconds), compute, gathers=True)

    whole = (_evened(nodes, most) for nodes in _whole_first(lengths, quotas, chunk))
    tried = [(exposed(nodes), nodes) for nodes in (first, *whole)]
    tried.append(_spread(*tried[0], lengths, quotas, chunk, exposed))
    return min(tried, key=itemgetter(0))[1]


def _whole_first(lengths: Sequence[int], quotas: Sequence[int], chunk: int) -> Iterator[_Nodes]:
    """Distributions with whole sequences first, with one limit after another."""
    order = sorted(range(len(lengths)), key=lambda sequence: (-lengths[sequence], sequence))
    area = sum(piece_area((0, 0, length)) for length in lengths) / sum(quotas)  # of a mean token
    limit, tried = max(quotas) // 2, 0
    while limit >= chunk:
        number = sum(length >= limit for length in lengths)  # of sequences that are not cut if they fit
        if tried < number < len(lengths):
            tried = number
            yield _with_whole(order[:number], order[number:], lengths, quotas, area, chunk)
        limit //= 2


def _with_whole(
    whole: Sequence[int],
    short: Sequence[int],
    lengths: Sequence[int],
    quotas: Sequence[int],
    area: float,
    chunk: int,
) -> _Nodes:
    """Sequences `whole`, longest first, each on the node that lacks most area; nodes are filled up with the others.

    A node's lack is the area that it would miss if it were filled up with `short` sequences of mean area.

    area: query-key pairs of a mean token.
    """
    rest = [(sequence, 0, lengths[sequence]) for sequence in short]
    short_area = sum(map(piece_area, rest)) / sum(stop for _, _, stop in rest)
    given: _Nodes = [[] for _ in quotas]
    room, lack = list(quotas), [quota * (area - short_area) for quota in quotas]
    for sequence in whole:
        piece = sequence, 0, lengths[sequence]
        adds = piece_area(piece) - lengths[sequence] * short_area
        fitting = [node for node in range(len(quotas)) if room[node] >= lengths[sequence] and lack[node] >= adds]
        if not fitting:
            rest.append(piece)
            continue
        node = max(fitting, key=lambda node: (lack[node], -node))
        given[node].append(piece)
        room[node] -= lengths[sequence]
        lack[node] -= adds
    # Nodes whose lack is farthest from none first, as long as there is a choice of sequences.
    order = sorted(range(len(quotas)), key=lambda node: -abs(lack[node]))
    dealt = deal(rest, [quotas[node] for node in order], chunk, [given[node] for node in order])
    return [pieces for _, pieces in sorted(zip(order, dealt, strict=True))]


def _evened(nodes: _Nodes, most: float) -> _Nodes:
    """The distribution with no node over an area of `most`, if a few exchanges of tokens bring that about.

    The fullest node gives the end of a piece for as many tokens from the beginning of a piece on the emptiest one. With
    pieces that end at e and begin at b, t tokens take t (e - b - t) from its area.
    """
    nodes, areas = nodes[:], [sum(map(piece_area, pieces)) for pieces in nodes]
    mean = sum(areas) / len(areas)
    for _ in nodes:
        full, empty = areas.index(max(areas)), areas.index(min(areas))
        if areas[full] <= most:
            break
        excess = min(areas[full] - mean, mean - areas[empty])
        early = min(nodes[empty], key=lambda piece: (piece[1], -piece[2], piece[0]))
        for late in sorted(nodes[full], key=lambda piece: piece[::-1]):
            reach = late[2] - early[1]
            if late[0] == early[0] or reach**2 < 4 * excess:
                continue
            tokens = round((reach - sqrt(reach**2 - 4 * excess)) / 2)
            if 0 < tokens < min(late[2] - late[1], early[2] - early[1]):
                break
        else:
            break
        (to_empty, start, stop), (to_full, first, last) = late, early
        kept = [piece for piece in nodes[full] if piece != late], [piece for piece in nodes[empty] if piece != early]
        nodes[full] = joined([*kept[0], (to_empty, start, stop - tokens), (to_full, first, first + tokens)])
        nodes[empty] = joined([*kept[1], (to_full, first + tokens, last), (to_empty, stop - tokens, stop)])
        areas[full] -= tokens * (reach - tokens)
        areas[empty] += tokens * (reach - tokens)
    return nodes


class _Crossing:
    """Tokens whose keys cross nodes in one layer, forward, each once to a node that needs it.

    received, sent: tokens of each node. both: their sum, of keys and gradients in backward.
    sent_of: [node], sequence -> tokens that the node sends.
    holders: the holders of each sequence on several nodes, (start, stop, node) by position.
    last: of these sequences, node -> its last piece.
    """

    def __init__(self, nodes: _Nodes) -> None:
        pieces: dict[int, list[tuple[int, int, int]]] = defaultdict(list)
        for node, own in enumerate(nodes):
            for sequence, start, stop in own:
                pieces[sequence].append((start, stop, node))
        self.received, self.sent = [0] * len(nodes), [0] * len(nodes)
        self.sent_of: list[dict[int, int]] = [defaultdict(int) for _ in nodes]
        self.holders = {
            sequence: sorted(held)
            for sequence, held in pieces.items()
            if len(held) > 1 and any(node != held[0][2] for _, _, node in held)
        }
        self.last = {
            sequence: {node: (start, stop) for start, stop, node in held} for sequence, held in self.holders.items()
        }
        for sequence, held in self.holders.items():
            for start, stop, node in held:
                for other in self.needers(sequence, start, node):
                    self.received[other] += stop - start
                    self.sent[node] += stop - start
                    self.sent_of[node][sequence] += stop - start
        self.both = [sum(ends) for ends in zip(self.received, self.sent, strict=True)]

    def needers(self, sequence: int, start: int, node: int) -> list[int]:
        """Nodes other than `node` with a later piece of the sequence than the one that begins at `start`."""
        return [other for other, (begin, _) in self.last[sequence].items() if other != node and begin > start]


def _spread(
    least: float,
    best: _Nodes,
    lengths: Sequence[int],
    quotas: Sequence[int],
    chunk: int,
    exposed: Callable[[_Nodes], float],
) -> tuple[float, _Nodes]:
    """The distribution with beginnings of sequences spread, as long as that exposes less, and the seconds exposed.

    least, best: of longest sequences first.
    exposed: seconds of a distribution.
    """
    heads, moved = _Heads(), _Crossing(best)
    tried: set[int] = set()
    for _ in range(_MOST_SPREADS):
        busy = [most + max(ends) for most, *ends in zip(moved.both, moved.received, moved.sent, strict=True)]
        fullest = busy.index(max(busy))
        sequences = [sequence for sequence, last in moved.last.items() if fullest in last and sequence not in tried]
        if not sequences:
            break
        # Ties are broken by where a sequence lies, not by its number, so that the order of the batch does not matter.
        sequence = max(sequences, key=lambda one: (moved.sent_of[fullest][one], moved.holders[one]))
        tried.add(sequence)
        now, even = _head(sequence, moved), _even_head(sequence, moved, best)
        half = {node: (tokens + now[node]) // (2 * TILE) * TILE for node, tokens in even.items()}
        for head in (even, half):
            spread = heads | {sequence: head}
            dealt = _with_heads(spread, lengths, quotas, chunk)
            if dealt is not None and (seconds := exposed(dealt)) < least:
                best, least, heads, moved = dealt, seconds, spread, _Crossing(dealt)
                tried.clear()
                break
    return least, best


def _head(sequence: int, moved: _Crossing) -> dict[int, int]:
    """Tokens of the sequence's beginning on each node but the keeper."""
    keeper, end = _keeper(sequence, moved)
    head: dict[int, int] = defaultdict(int)
    for start, stop, node in moved.holders[sequence]:
        if start < end and node != keeper:
            head[node] += min(stop, end) - start
    return head


def _keeper(sequence: int, moved: _Crossing) -> tuple[int, int]:
    """The node whose last token of the sequence is the earliest, and the end of the beginning, after this token."""
    keeper, (_, end) = min(moved.last[sequence].items(), key=lambda item: item[1])
    return keeper, end


def _even_head(sequence: int, moved: _Crossing, nodes: _Nodes) -> dict[int, int]:
    """Tokens of the sequence's beginning for each node but the keeper, so that all nodes send and receive equally much.

    Every node with a part of the sequence needs the beginning. With n such nodes a token of the beginning is sent n - 1
    times by one of them, which itself receives one token less, and n times by another node.
    """
    last, (keeper, end) = moved.last[sequence], _keeper(sequence, moved)
    number = len(last)
    # Tokens sent and received if the keeper had all of the beginning, but for what it sends of it; and the room of each
    # node: tokens of sequences that are not cut, and of the beginning.
    busy, room = [float(tokens) for tokens in moved.both], [0] * len(nodes)
    for node, pieces in enumerate(nodes):
        room[node] = sum(stop - start for own, start, stop in pieces if own not in moved.holders)
    for start, stop, node in moved.holders[sequence]:
        early = max(0, min(stop, end) - start)
        room[node] += early
        busy[node] += early * ((node in last and node != keeper) - len(moved.needers(sequence, start, node)))
        if node != keeper and start < last[keeper][0]:
            busy[keeper] -= early
    others = sorted((node for node in range(len(nodes)) if node != keeper), key=lambda node: (node not in last, node))
    if number == 2:  # the sum of both ends is the same; half of the beginning evens out forward
        head = {others[0]: min(end / 2, room[others[0]])}
    else:
        low, high = 0.0, busy[keeper] + (number - 1) * end
        for _ in range(_BISECTIONS):
            level = (low + high) / 2
            head = {
                node: min(max(0.0, level - busy[node]) / (number - 2 if node in last else number), room[node])
                for node in others
            }
            away = sum(head.values())
            if busy[keeper] + (number - 1) * (end - away) + away > level:
                low = level
            else:
                high = level
    left, tiles = end, {}
    for node in others:
        tiles[node] = min(int(head.get(node, 0)) // TILE * TILE, left)
        left -= tiles[node]
    return tiles


def _with_heads(heads: _Heads, lengths: Sequence[int], quotas: Sequence[int], chunk: int) -> _Nodes | None:
    """Longest sequences first, where nodes have the given beginnings already; None if these do not fit."""
    given: _Nodes = [[] for _ in quotas]
    starts = [0] * len(lengths)
    for sequence, head in heads.items():
        for node, tokens in head.items():
            if tokens:
                given[node].append((sequence, starts[sequence], starts[sequence] + tokens))
                starts[sequence] += tokens
    if any(sum(stop - start for _, start, stop in own) > quota for own, quota in zip(given, quotas, strict=True)):
        return None
    rest = [(sequence, start, length) for sequence, (start, length) in enumerate(zip(starts, lengths, strict=True))]
    return deal([piece for piece in rest if piece[1] < piece[2]], quotas, chunk, given)
