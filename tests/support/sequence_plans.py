"""Small random plans of sequences for tests of the engine: any cut, any rank, any exchange."""

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from balancing.cluster import Cluster
from balancing.sequences import AttentionShape, linear_layout
from balancing.sequences.sequence_plan import SequencePlan, Shard


def nodes_of(ranks: int, nodes: int, nics: int = 1) -> Cluster:
    """A cluster of `nodes` nodes with fast links inside."""
    return Cluster(nodes, ranks // nodes, nics, 100e9, 10e9, 1e12, 1e9)


def in_many_turns(cluster: Cluster) -> Cluster:
    """The cluster, on which a turn of gathering costs nothing, so that few keys come in several, too."""
    return replace(cluster, message_seconds=0.0, launch_seconds=0.0, host_seconds=0.0)


def made_for(plan: SequencePlan, cluster: Cluster | None = None, *, heads: int = 2, **sizes: Any) -> SequencePlan:
    """The plan with what its programs need. cluster: None is one node, where keys come in as many turns as may be.
    sizes: further ones of `AttentionShape`."""
    one = Cluster(1, plan.ranks, 1, 100e9, float("inf"), 1e12, 1e9)
    wanted = {"kv_heads": heads, "head_size": 4, "item_bytes": 8, "layers": 1, "ffn_hidden": 0} | sizes
    return replace(plan, cluster=cluster or in_many_turns(one), shape=AttentionShape(8, heads, **wanted))


def zigzag_plan(lengths: Sequence[int], ranks: int, *, exchange: str = "ring", linear: str = "same") -> SequencePlan:
    """Every sequence over all ranks in 2 chunks a rank; one that is too short for that stays on one rank."""
    shards: list[Shard] = []
    for sequence, length in enumerate(lengths):
        if length < 2 * ranks:
            shards.append(Shard(sequence, 0, length, sequence % ranks))
            continue
        cuts = [length * chunk // (2 * ranks) for chunk in range(2 * ranks + 1)]
        for chunk in range(2 * ranks):
            shards.append(Shard(sequence, cuts[chunk], cuts[chunk + 1], min(chunk, 2 * ranks - 1 - chunk)))
    return _plan(lengths, ranks, shards, exchange, linear, random.Random(0))


def random_plan(
    lengths: Sequence[int], ranks: int, seed: int, *, exchange: str = "mixed", linear: str = "equal", cuts: int = 6
) -> SequencePlan:
    """Every sequence cut at random places, each piece on a random rank, shards in random order.

    exchange: "ring", "gather" or "mixed". linear: "same" as attention, "equal" in tokens, or "random".
    """
    draw = random.Random(seed)
    shards = _random_layout(lengths, ranks, cuts, draw)
    return _plan(lengths, ranks, shards, exchange, linear, draw)


def _random_layout(lengths: Sequence[int], ranks: int, cuts: int, draw: random.Random) -> list[Shard]:
    shards = []
    for sequence, length in enumerate(lengths):
        inner = sorted(draw.sample(range(1, length), min(length - 1, draw.randint(0, cuts))))
        for start, stop in zip([0, *inner], [*inner, length], strict=True):
            shards.append(Shard(sequence, start, stop, draw.randrange(ranks)))
    draw.shuffle(shards)
    return shards


def _plan(
    lengths: Sequence[int], ranks: int, shards: list[Shard], exchange: str, linear: str, draw: random.Random
) -> SequencePlan:
    spread = [len({shard.rank for shard in shards if shard.sequence == s}) > 1 for s in range(len(lengths))]
    choices = ["ring", "gather"] if exchange == "mixed" else [exchange]
    layouts = {
        "same": lambda: tuple(shards),
        "equal": lambda: linear_layout(tuple(shards), nodes_of(ranks, 2 if ranks % 2 == 0 else 1)),
        "random": lambda: tuple(_random_layout(lengths, ranks, 3, draw)),
    }
    return SequencePlan(
        tuple(lengths),
        ranks,
        "test",
        tuple(shards),
        layouts[linear](),
        tuple(draw.choice(choices) if over else "local" for over in spread),
    )
