"""Keys and values over network cards, sent to each rank and once a node, and modelled steps of planners and peers.

    python -m benchmarks.sequences.once_a_node [--quick] [--ranks N ...] [--lengths FILE]

Batches of documents as long as those of published training sets or recorded, 4k tokens a rank, nodes of 8 ranks; means
over distributions and batches.

- Traffic: tokens whose keys and values are sent over network cards in one layer, forward, over all tokens of the
  batch; in brackets those that the fullest node receives, times nodes. "each rank": the rank that holds a key sends it
  to every rank that needs it. "once": a key enters a node once, as the engine does it.
- Planners: modelled seconds of a step over the physical limit. "best": the quickest of chunks, zones and, for few
  documents, gather, batch by batch. "bound": no plan with equal tokens is faster (`benchmarks.sequences.bound`), if
  compute hides all transfers as long as it lasts; "as exposed": if it hides as much as the cost model says.
- Parts of a step with chunks, over the limit: what is computed in tiles, exposed, launched.
- Peers: ring (Transformer Engine), all-gather by NCCL's rings ("AG rings") and in two levels, and a2a+p2p
  (`benchmarks.sequences.peers`).
- ODC, with a step of 8 micro-batches of 32k tokens a rank. `data` is our domain, with equal micro-batches.

Nothing is trained here. Takes about five minutes on one core, with --quick three.
"""

import argparse
import sys
from collections.abc import Iterator, Sequence

import numpy as np

from balancing.cluster import Cluster
from balancing.sequences import (
    AttentionShape,
    SequencePlan,
    StepCost,
    kv_traffic,
    limit_seconds,
    plan_sequences,
    step_cost,
)
from balancing.sequences.sequence_plan import LatentShape
from balancing.sequences.traffic import plan_links
from benchmarks.sequences.bound import bound_seconds
from benchmarks.sequences.lengths import DISTRIBUTIONS, draw_batch
from benchmarks.sequences.peers import all_gather_seconds, heads_and_ring, odc_seconds
from benchmarks.sequences.plans import sources

__all__ = ["main"]

Sources = dict[str, str | np.ndarray]  # distributions by name

_TOKENS = 4096  # a rank
_MLA = AttentionShape(7168, 128, 128, 61, 18432, 192, 128, latent=LatentShape(512, 64))
_MACHINES = {
    "A800, MHA": ("a800-4x200g", AttentionShape(4096, 32, 32, 32, 11008)),
    "H200, MHA": ("h200-8x400g", AttentionShape(4096, 32, 32, 32, 11008)),
    "A800, GQA 8:1": ("a800-4x200g", AttentionShape(4096, 32, 4, 32, 14336)),
    "H200, GQA 8:1": ("h200-8x400g", AttentionShape(4096, 32, 4, 32, 14336)),
    "A800, MLA": ("a800-4x200g", _MLA),
    "H200, MLA": ("h200-8x400g", _MLA),
}
_COUNTED = ("A800, MHA", "H200, GQA 8:1")
_PLANNERS = ("chunks", "zones")
_MOST_SHARDS = 2048  # of gather
_ODC_SAMPLE, _ODC_MICRO_BATCHES = 32768, 8


def _batches(known: Sources, ranks: int, number: int) -> Iterator[tuple[str, Sequence[int]]]:
    for name, source in known.items():
        for batch in range(number):
            yield name, draw_batch(source, _TOKENS * ranks, np.random.default_rng(batch))


def _over_network(plan: SequencePlan, cluster: Cluster) -> tuple[float, ...]:
    """(all, fullest node x nodes) tokens over network cards, sent to each rank; then once a node."""
    moved = kv_traffic(plan)
    crossing = moved.crossing(cluster)
    each = np.bincount(moved.target[crossing] // cluster.ranks_per_node, moved.tokens[crossing], cluster.nodes)
    once = plan_links(plan, cluster).far[1].reshape(cluster.nodes, -1).sum(1)
    return tuple(
        float(what) / sum(plan.lengths) for found in (each, once) for what in (found.sum(), found.max() * cluster.nodes)
    )


def _traffic(known: Sources, sizes: Sequence[int], number: int) -> None:
    print("tokens over network cards / all tokens (fullest node x nodes)")
    print(f"{'':22}" + "".join(f"{f'{method}, {how}':>20}" for method in _PLANNERS for how in ("each rank", "once")))
    for machine in _COUNTED:
        preset, shape = _MACHINES[machine]
        for ranks in sizes:
            cluster = Cluster.sheet(preset, nodes=ranks // 8)
            cells = []
            for method in _PLANNERS:
                found = [
                    _over_network(plan_sequences(lengths, cluster, shape=shape, method=method), cluster)
                    for _, lengths in _batches(known, ranks, number)
                ]
                total, most, once, most_once = np.mean(found, 0)
                cells += [f"{total:.2f} ({most:.2f})", f"{once:.2f} ({most_once:.2f})"]
            print(f"{f'{machine}, {ranks}':22}" + "".join(f"{cell:>20}" for cell in cells), flush=True)


def _times(known: Sources, sizes: Sequence[int], number: int) -> None:
    rows = ("ring", "AG rings", "AG 2 levels", "a2a+p2p", "zones", "chunks", "best", "bound", "as exposed")
    print(f"\n{'modelled step / limit':32}" + "".join(f"{row:>12}" for row in rows))
    over_best, parts = [], []
    for machine, (preset, shape) in _MACHINES.items():
        for ranks in sizes:
            cluster = Cluster.sheet(preset, nodes=ranks // 8)
            found: dict[str, list[np.ndarray]] = {name: [] for name in known}
            spent: dict[str, list[np.ndarray]] = {name: [] for name in known}
            for name, lengths in _batches(known, ranks, number):
                limit = limit_seconds(lengths, cluster, shape)
                seconds, chunks = _seconds(lengths, cluster, shape)
                bounds = [bound_seconds(lengths, cluster, shape, exposes=exposes) for exposes in (False, True)]
                found[name].append(np.array([*seconds, *bounds]) / limit)
                of_step = chunks.attention + chunks.linear, chunks.exposed, chunks.launch
                spent[name].append(np.array(of_step) / limit)
            means = {name: np.mean(figures, 0) for name, figures in found.items()}
            shown = {**means, "all of these": np.mean(list(means.values()), 0)}
            case = f"{machine}, {ranks}"
            for name, figures in shown.items():
                print(f"{f'{case}, {name}':32}" + "".join(f"{figure:12.3f}" for figure in figures), flush=True)
            worst = max(batch[5] / batch[6] for batches in found.values() for batch in batches)
            cells = [figures[5] / figures[6] for figures in shown.values()]
            over_best.append(f"{case:20}" + "".join(f"{cell:10.3f}" for cell in (*cells, worst)))
            cells = [" + ".join(f"{part:.2f}" for part in np.mean(figures, 0)) for figures in spent.values()]
            parts.append(f"{case:20}" + "".join(f"{cell:>20}" for cell in cells))
    heads = [name.replace("recorded ", "rec. ")[:9] for name in known]
    print(f"\n{'chunks / best':20}" + "".join(f"{name:>10}" for name in (*heads, "all", "one batch")))
    print(*over_best, sep="\n")
    print(f"\n{'parts / limit':20}" + "".join(f"{name:>20}" for name in heads))
    print(*parts, sep="\n", flush=True)


def _seconds(lengths: Sequence[int], cluster: Cluster, shape: AttentionShape) -> tuple[list[float], StepCost]:
    """Modelled steps of peers and planners, the quickest of these last; and the parts of that of chunks."""
    ring = plan_sequences(lengths, cluster, shape=shape, method="ring")
    peers = [
        step_cost(ring, cluster, shape, routed=False, gradient_width=1.0).total,
        *(all_gather_seconds(lengths, cluster, shape, ring, two_level=two) for two in (False, True)),
        heads_and_ring(lengths, cluster, shape).seconds(shape),
    ]
    methods = ["zones", "chunks"]
    if 2 * len(lengths) * cluster.world_size <= _MOST_SHARDS:
        methods.append("gather")
    costs = [step_cost(plan_sequences(lengths, cluster, shape=shape, method=one), cluster, shape) for one in methods]
    totals = [cost.total for cost in costs]
    return [*peers, *totals[:2], min(totals)], costs[1]


def _odc(sizes: Sequence[int]) -> None:
    print("\nwhole documents on data-parallel ranks that meet once a step (ODC), and `data`: modelled step / limit")
    preset, shape = _MACHINES["H200, GQA 8:1"]
    for ranks in sizes:
        cluster = Cluster.sheet(preset, nodes=ranks // 8)
        for name in DISTRIBUTIONS:
            random = np.random.default_rng(0)
            step = [draw_batch(name, _ODC_SAMPLE * ranks, random) for _ in range(_ODC_MICRO_BATCHES)]
            limit = sum(limit_seconds(lengths, cluster, shape) for lengths in step)
            ours = sum(step_cost(plan_sequences(each, cluster, shape=shape), cluster, shape).total for each in step)
            odc = odc_seconds([length for lengths in step for length in lengths], cluster, shape)
            print(f"{ranks:4} ranks, {name:12} ODC {odc / limit:6.3f}  data {ours / limit:6.3f}", flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code, 2 for bad input."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.sequences.once_a_node", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--quick", action="store_true", help="one batch of each distribution instead of two")
    parser.add_argument("--ranks", type=int, nargs="+", metavar="N", default=[16, 64, 128], help="multiples of 8")
    parser.add_argument("--lengths", metavar="FILE", help="recorded lengths: .npz, or text with one per line")
    options = parser.parse_args(arguments)
    if wrong := [ranks for ranks in options.ranks if ranks < 8 or ranks % 8]:
        print(f"--ranks {wrong[0]} does not fill nodes of 8 ranks; give multiples of 8", file=sys.stderr)
        return 2
    number = 1 if options.quick else 2
    try:
        known = sources(options.lengths)
    except (ValueError, OSError) as error:
        print(f"once_a_node: {error}", file=sys.stderr)
        return 2
    _traffic(known, options.ranks, number)
    _times(known, options.ranks, number)
    _odc([ranks for ranks in options.ranks if ranks <= 64])
    return 0


if __name__ == "__main__":
    sys.exit(main())
