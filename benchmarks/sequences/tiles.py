"""Would it pay to send queries and partial outputs, too? A model of tiles for sequences that lie on several nodes.

    python -m benchmarks.sequences.tiles [--quick] [--lengths FILE] [--ranks N ...]

On a ring over N nodes every node receives all keys and values of a sequence. Instead each node may compute some tiles
of the triangle of queries x keys (`benchmarks.sequences.tile_placement`, which counts what the busiest node then sends
or receives): it receives the tiles' queries, keys and values, and sends partial outputs home. Inside the node keys go
round a ring of its ranks, in the backward pass with sums in float32. This model takes the plans of `zones` and gives
rings over three nodes or more, the longest sequences first, to tiles as long as that takes less time. It assumes that
every rank and network card of a node has an equal share. Two kinds of tiles are compared with one that is simpler:
queries stay at home, and keys enter each node that needs them once ("keys once").

Two fifths of a tile's exchange stay exposed at least, as with gathering. Launches: two calls and a merge a pass, and
those of the ring; latency: a message for each of about sqrt(2 N) nodes that queries, keys and outputs come from. The
machine and the model are the first of `benchmarks.sequences.plans`. Nothing is run, and no engine exists for it.
"""

import argparse
import math
import sys
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from balancing.cluster import Cluster
from balancing.sequences import AttentionShape, SequencePlan, limit_seconds, plan_sequences, step_cost
from balancing.sequences.cost import hidden_seconds, kv_bytes, tile_area
from balancing.sequences.traffic import TokenTraffic, layout_traffic, traffic_seconds
from benchmarks.sequences.lengths import draw_batch
from benchmarks.sequences.plans import sources
from benchmarks.sequences.tile_placement import Placement, place_tiles

__all__ = ["tiled_seconds"]

_TOKENS = 4096  # a rank
_SHAPE = AttentionShape(4096, 32, 32, 32, 11008)
_MACHINE = "a800-4x200g"
_INSIDE = 3.0  # tokens a token, backward: keys and values, and sums in float32
_NEVER_HIDDEN = 0.4  # share of a tile's exchange
_ATTENTION_BACKWARD = 2.5
_KINDS: dict[str, Callable[[int], Placement]] = {
    "tiles": place_tiles,
    "tiles, float32 outputs": partial(place_tiles, float32_outputs=True),
    "keys once": partial(place_tiles, steps=0),
}
_LAUNCHES, _MESSAGES = 3, 4  # of a tile: launches a pass, and kinds of messages


def tiled_seconds(
    plan: SequencePlan,
    cluster: Cluster,
    shape: AttentionShape,
    place: Callable[[int], Placement] = place_tiles,
) -> tuple[float, int, float]:
    """Modelled seconds of a step in which sequences over nodes are exchanged as tiles where that takes less, the number
    of these sequences, and the seconds without any exposed exchange.

    plan: of `zones`.
    cluster: of the plan's ranks.
    shape: the model, with multi-head attention.
    place: tiles of a sequence on a number of nodes.
    """
    per_node, width = cluster.ranks_per_node, kv_bytes(shape)
    compute = hidden_seconds(float(tile_area(plan).max()), cluster, shape)
    wide = []  # sequences on rings over three nodes or more, longest first
    for sequence, how in enumerate(plan.exchange):
        nodes = {rank // per_node for rank in plan.ring(sequence)}
        if how == "ring" and len(nodes) > 2:
            wide.append((sequence, len(nodes)))
    wide.sort(key=lambda each: -plan.lengths[each[0]])
    base = step_cost(plan, cluster, shape)
    rest = base.total - base.exposed
    best, number = base.total, 0
    for taken in range(1, len(wide) + 1):
        exposed, latency = _exposed(plan, wide[:taken], cluster, width, compute, place)
        total = rest + shape.layers * (exposed + latency)
        if total < best:
            best, number = total, taken
    return best, number, rest


def _exposed(
    plan: SequencePlan,
    tiled: list[tuple[int, int]],
    cluster: Cluster,
    width: int,
    compute: float,
    place: Callable[[int], Placement],
) -> tuple[float, float]:
    """Seconds of exposed exchange of one layer, and of launches and messages of tiles.

    plan, cluster, place: as in `tiled_seconds`.
    tiled: (sequence, nodes).
    width: bytes of a token's keys and values.
    compute: seconds of attention, forward.
    """
    per_node, apart = cluster.ranks_per_node, [sequence for sequence, _ in tiled]
    rows = plan.table[~np.isin(plan.table[:, 0], apart)]
    moved = layout_traffic(rows, plan.lengths, plan.exchange, in_step=True)
    crossing = moved.crossing(cluster)
    passes = []
    for at in (0, 1):
        tokens = moved.tokens * (np.where(crossing, 2.0, _INSIDE) if at else 1.0)
        source, target, amount = [moved.source], [moved.target], [tokens]
        for sequence, nodes in tiled:
            members = np.array(plan.ring(sequence))
            placed, length, here = place(nodes), plan.lengths[sequence], len(members) / nodes
            beside = members // per_node * per_node + (members + 1) % per_node
            across = (members + per_node) % cluster.world_size
            source += [members, members]
            target += [beside, across]
            near = placed.keys * length * (here - 1) / here * (1.0, _INSIDE)[at]
            far = length * (placed.forward, placed.backward)[at] / here
            amount += [np.full(len(members), near), np.full(len(members), far)]
        parts = (np.concatenate(each) for each in (source, target, amount))
        passes.append(traffic_seconds(TokenTraffic(*parts), width, cluster))
    forward, backward = passes
    beyond = max(0.0, forward - compute) + max(0.0, backward - _ATTENTION_BACKWARD * compute)
    messages = sum(_MESSAGES * math.ceil(math.sqrt(2 * nodes)) for _, nodes in tiled)
    extra = 3 * (messages * cluster.message_seconds + len(tiled) * _LAUNCHES * cluster.launch_seconds)
    return max(beyond, _NEVER_HIDDEN * (forward + backward)), extra


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.sequences.tiles")
    parser.add_argument("--quick", action="store_true", help="one batch of each distribution")
    parser.add_argument("--lengths", metavar="FILE", help="recorded lengths, as in benchmarks.sequences.plans")
    parser.add_argument("--ranks", type=int, nargs="+", metavar="N", default=[64, 128], help="multiples of 8")
    options = parser.parse_args(arguments)
    known = sources(options.lengths)
    print("modelled time / limit, A800, multi-head attention; mean over batches")
    print(f"{'case':30}  zones   auto  {'  '.join(_KINDS)}  auto or tiles  tiled sequences  no exchange")
    for ranks in options.ranks:
        cluster = Cluster.preset(_MACHINE, nodes=ranks // 8)
        every = []
        for name, source in known.items():
            found = []
            for batch in range(1 if options.quick else 4):
                lengths = draw_batch(source, _TOKENS * ranks, np.random.default_rng(batch))
                limit = limit_seconds(lengths, cluster, _SHAPE)
                zones = plan_sequences(lengths, cluster, shape=_SHAPE, method="zones")
                auto = step_cost(plan_sequences(lengths, cluster, shape=_SHAPE), cluster, _SHAPE).total
                kinds = [tiled_seconds(zones, cluster, _SHAPE, place) for place in _KINDS.values()]
                seconds, number, rest = kinds[0]
                own = [step_cost(zones, cluster, _SHAPE).total, auto, *(kind[0] for kind in kinds), min(auto, seconds)]
                found.append([*(each / limit for each in own), number, rest / limit])
            every.append(np.mean(found, axis=0))
            _line(f"{name}, {ranks} ranks", every[-1])
        _line(f"all of these, {ranks} ranks", np.mean(every, axis=0))
    return 0


def _line(case: str, figures: np.ndarray) -> None:
    zones, auto, *kinds, better, number, rest = figures.tolist()
    shown = "  ".join(f"{value:{len(kind)}.3f}" for kind, value in zip(_KINDS, kinds, strict=True))
    print(f"{case:30} {zones:6.3f} {auto:6.3f}  {shown}  {better:13.3f}  {number:15.1f}  {rest:11.3f}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
