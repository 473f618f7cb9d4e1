"""The fewest transfers that balance a known load, transfers by link, and loads that benchmarks draw."""

import numpy as np
import pytest

from balancing.cluster import Cluster
from balancing.experts import plan_replicas, traffic
from benchmarks.experts.fewest import by_link, fewest_replicas, weight
from benchmarks.experts.synthetic import DISTRIBUTIONS, lognormal_popularity, sampled_load
from benchmarks.experts.taot import PUBLISHED, compare


def machine(nodes: int, per_node: int) -> Cluster:
    return Cluster.sheet("h100-8x400g").relabel(nodes, per_node)


def load_of(ranks: list[int], experts_of_rank: int = 2) -> np.ndarray:
    """Tokens of each expert from one source; the first expert of a rank has all but one of its tokens."""
    rows = np.zeros((len(ranks), len(ranks) * experts_of_rank), dtype=np.int64)
    rows[0, ::experts_of_rank] = np.array(ranks) - 1
    rows[0, 1::experts_of_rank] = 1
    return rows


@pytest.mark.parametrize(
    "tokens, inside, between",
    [
        ([2000, 2000, 2000, 2000], 0, 0),
        ([3000, 1000, 2000, 2000], 1, 0),  # one piece levels two ranks of a node
        ([3000, 2000, 1000, 2000], 0, 1),  # nodes differ
        ([3500, 500, 2800, 1200], 2, 0),
        ([4000, 2000, 1500, 500], 0, 2),  # the surplus of one node has two takers, none inside
        ([4000, 1000, 1000, 2000], 1, 1),
    ],
)
def test_no_more_than_are_needed(tokens, inside, between):
    found = fewest_replicas(load_of(tokens), machine(2, 2), slots=2)
    assert found is not None and by_link(found) == (inside, between) and weight(found) == inside + 3 * between


@pytest.mark.parametrize("draw", DISTRIBUTIONS.values(), ids=DISTRIBUTIONS)
@pytest.mark.parametrize("ranks, imbalance", [(8, 2.5), (16, 1.3), (32, 1.7)])
def test_found_placements_reach_the_imbalance_with_far_fewer_than_all_slots(draw, ranks, imbalance):
    random, cluster = np.random.default_rng(3), machine(ranks // 8, 8)
    load = sampled_load(draw(128, ranks, imbalance, random), ranks, 65536, random)
    found, all_slots = fewest_replicas(load, cluster, slots=2), plan_replicas(load, cluster, slots=2)
    tokens = traffic(load, found).sum(0)
    assert tokens.max() <= 1.01 * tokens.mean() + 1 and tokens.sum() == load.sum()
    assert weight(found) < 0.6 * weight(all_slots)
    looser = fewest_replicas(load, cluster, slots=2, imbalance=1.1)
    assert weight(looser) < weight(found)


def test_too_few_slots_are_said():
    assert fewest_replicas(load_of([9000, 10, 10, 10]), machine(2, 2), slots=0) is None


def test_ahead_of_the_published_table_with_as_many_transfers():
    for (ranks, percent), (transfers, left) in PUBLISHED.items():
        if ranks == 16:
            inside, between, points = compare(ranks, percent, DISTRIBUTIONS["Zipf"], 2)["as TAOT"]
            assert inside + 3 * between <= transfers[-1] and points < left[-1]


def test_lognormal_loads_have_the_imbalance_and_shape_that_was_asked_for():
    random = np.random.default_rng(0)
    popularity = lognormal_popularity(256, 64, 2.0, random)
    assert popularity.sum() == pytest.approx(1) and popularity.reshape(64, -1).sum(1).max() * 64 == pytest.approx(2.0)
    logarithm = np.log(popularity)
    centred = (logarithm - logarithm.mean()) / logarithm.std()
    assert abs((centred**3).mean()) < 0.5 and abs((centred**4).mean() - 3) < 0.8  # a normal's third and fourth moments
    assert lognormal_popularity(8, 4, 1.0, random) == pytest.approx(1 / 8)
    with pytest.raises(ValueError, match="rank_imbalance=4"):
        lognormal_popularity(8, 4, 4.0, random)
