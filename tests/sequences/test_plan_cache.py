"""Plans and programs made ahead of a step, shares of documents by zone, and the areas of upstream's layout."""

import pickle

import numpy as np
import pytest

from balancing.cluster import Cluster
from balancing.sequences import AttentionShape, Shard, causal_area, plan_sequences
from balancing.sequences.engine.compiler import compile_rank
from balancing.sequences.plan import PlanCache, zone_shares
from balancing.sequences.sequence_plan import SequencePlan, zigzag_area, zigzag_areas

CLUSTER = Cluster.preset("h200-8x400g").relabel(nodes=2, ranks_per_node=2)
SHAPE = AttentionShape(hidden=64, heads=4, kv_heads=2, layers=2, ffn_hidden=128)


def test_plans_are_made_once_and_for_all_ranks_alike():
    made: list[tuple[int, ...]] = []

    def make(lengths: tuple[int, ...]) -> SequencePlan:
        made.append(lengths)
        return plan_sequences(lengths, CLUSTER, shape=SHAPE, chunk=8)

    ranks = [PlanCache(make, lambda plan, rank=rank: compile_rank(plan, rank)) for rank in range(2)]
    first, again = ranks[0]([100, 7, 21]), ranks[0](np.array([100, 7, 21]))
    assert made == [(100, 7, 21)]
    assert again.plan is first.plan and first.milliseconds > again.milliseconds == 0
    other = ranks[1]([100, 7, 21])
    assert other.plan == first.plan and other.plan.digest == first.plan.digest
    assert (first.program.rank, other.program.rank) == (0, 1)
    for size in range(1, 80):
        ranks[0]([size, 40])
    assert len(made) == 81
    ranks[0]([100, 7, 21])
    assert len(made) == 82, "the oldest plans are forgotten"


def test_programs_travel_with_their_routes():
    """A worker sends plan and program; what arrives is what the step would have compiled itself."""
    plan = plan_sequences([100, 7, 21], CLUSTER, shape=SHAPE, method="ring")
    program = compile_rank(plan, 3, routing=2)
    assert program.routes, "four ranks on two nodes with several NICs"
    sent, own = pickle.loads(pickle.dumps((plan, program)))
    assert sent == plan and own == program == compile_rank(sent, 3, routing=2)


def test_zone_shares():
    def plan(*documents: tuple[int, ...]) -> SequencePlan:
        """Documents of one token on each of the given ranks."""
        shards = tuple(
            Shard(number, i, i + 1, rank) for number, ranks in enumerate(documents) for i, rank in enumerate(ranks)
        )
        return SequencePlan(tuple(map(len, documents)), 4, "by hand", shards, shards, ("gather",) * len(documents))

    shares = zone_shares([plan((0,), (0, 1), (1, 2, 3)), plan((2, 2, 2, 2))], CLUSTER)
    assert shares == pytest.approx({"local_share": 0.5, "intra_node_share": 0.2, "inter_node_share": 0.3})
    assert sum(zone_shares([], CLUSTER).values()) == 0


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_zigzag_areas(ranks):
    """Against counting each token's keys, for documents that begin and end inside, between and on the chunks."""
    random = np.random.default_rng(ranks)
    for total in 2 * ranks * random.integers(1, 20, 20):
        inner = random.integers(0, total, 5)
        lengths = np.diff(np.unique([0, *inner, total]))
        keys = np.concatenate([np.arange(1, length + 1) for length in lengths]).reshape(2 * ranks, -1).sum(1)
        expected = [int(keys[rank] + keys[2 * ranks - 1 - rank]) for rank in range(ranks)]
        assert zigzag_areas(lengths, ranks).tolist() == expected
        assert zigzag_area(lengths, ranks - 1, ranks) == expected[-1]
        assert sum(expected) == causal_area(lengths)


def test_a_batch_that_cannot_be_cut():
    with pytest.raises(ValueError, match=r"10 tokens .* 4 equal chunks; make it a multiple of 4"):
        zigzag_areas([3, 7], 2)
