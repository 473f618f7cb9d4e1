"""The fewest transfers that balance a known load, transfers by link, and loads that benchmarks draw."""

import numpy as np
import pytest

from balancing.cluster import Cluster
from benchmarks.experts.fewest import by_link, fewest_replicas, weight
from benchmarks.experts.lookahead import EXPERTS, RANKS, TOP_K, evaluate, with_drift
from benchmarks.experts.synthetic import lognormal_popularity


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


def test_looking_ahead_is_as_good_as_its_predictions():
    """Predicted logits that are the router's own leave what a known load leaves, whatever the drift; noise does not."""
    random = np.random.default_rng(0)
    own = random.standard_normal((3, 2, 1, 1, RANKS, 64, EXPERTS)) + 2 * random.standard_normal(EXPERTS)
    other = random.standard_normal(own.shape) * 3
    loads, apart = with_drift(np.concatenate([own, own, other], 3).astype(np.float32), 0.3)
    assert loads.shape == (3, 2, 1, 3, RANKS, EXPERTS) and loads.sum() == 18 * RANKS * 64 * TOP_K
    assert apart == pytest.approx(0.3, abs=0.02)
    found = evaluate(loads)
    assert found["layer's input"] == found["known"] and found["known"][0] < 1.02
    assert found["last iteration"][0] > 1.02 and found["layer's output"][2] > 0.2 > found["layer's input"][2]
