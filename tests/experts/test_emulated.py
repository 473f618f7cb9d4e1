"""The benchmark of emulated experts: it runs, checks its results, and takes no less time than its work."""

import numpy as np
import pytest

from balancing_tools.load_trace import LoadTrace
from benchmarks.experts.emulated import CEILING, VARIANTS, measure
from benchmarks.experts.emulated_rank import routing_map
from benchmarks.experts.emulated_workload import HIDDEN, SHAPE, TOP_K, Scale, made_up_loads, recorded_loads, scaled_load
from tests.support.patience import PATIENCE


def test_a_routing_map_has_its_counts_and_different_experts_for_a_token():
    counts = np.array([8, 0, 5, 1, 2])
    routing = routing_map(counts, 2)
    assert routing.shape == (8, 5) and (routing.sum(1) == 2).all() and routing.sum(0).tolist() == counts.tolist()


def test_the_scaled_machine_keeps_its_proportions():
    scale = Scale(8, 32, 0.04)
    assert scale.cluster.nics_per_node < scale.cluster.ranks_per_node
    # A token's seconds on a NIC against its seconds in an expert, as modelled and as emulated.
    modelled = SHAPE.hidden * 2 / scale.cluster.nic_bandwidth / SHAPE.forward_seconds(scale.cluster)
    assert (HIDDEN * 4 / scale.nic) / (scale.expert_seconds / scale.assignments) == pytest.approx(modelled)
    with pytest.raises(ValueError, match="12 experts cannot be emulated on 8 ranks"):
        Scale(8, 12, 0.04)


def test_loads_are_those_of_the_trace():
    rng = np.random.default_rng(0)
    counts = rng.multinomial(4096, rng.dirichlet(np.ones(8)), size=(5, 4, 6, 2))
    trace = LoadTrace(counts, np.array([1, 11, 400, 410, 420]), np.arange(6))
    scale = Scale(4, 8, 0.01)
    loads = recorded_loads(trace, scale, layers=3, micro_batches=2, steps=3)
    assert loads.now.shape == loads.before.shape == (3, 4, 3, 2, 8)
    assert (loads.now.sum(-1) == scale.assignments).all() and loads.now.max() <= scale.assignments / TOP_K
    expected = scaled_load(counts[[0, 2, 3]][:, :, [1, 3, 5]], scale.assignments, scale.assignments // TOP_K)
    np.testing.assert_array_equal(loads.before, expected)  # the record that follows after 389 iterations is left out
    even = loads.even
    assert (even.now == even.now.flat[0]).all() and even.now.sum() == loads.now.sum()
    with pytest.raises(ValueError, match="it must have more than 9"):
        recorded_loads(trace, scale, layers=3, micro_batches=2, steps=9)


@pytest.mark.exhaustive
def test_a_run_is_right_and_takes_no_less_than_its_work():
    names = (CEILING, "none", "shadow", "quota", "quota, whole transfers", "quota, transfers in parts")
    scale, layers, micro_batches = Scale(4, 8, 0.01), 2, 2
    loads = made_up_loads(scale, layers, micro_batches, steps=1)
    rows, reason = measure(loads, scale, [VARIANTS[name] for name in names], limited=False, timeout=PATIENCE)
    assert reason is not None and [row.method for row in rows] == list(names)
    found = {row.method: row for row in rows}
    # Forward and twice that backward, for tokens spread evenly: nothing can take less.
    limit = layers * micro_batches * 3 * (scale.expert_seconds + scale.attention_seconds * scale.time)
    for row in rows:
        assert row.seconds >= 0.999 * limit, f"{row.method} took {row.seconds} s for {limit} s of work"
        assert row.steps == 1 and (row.sent_bytes > 0) == (row.method not in (CEILING, "none"))
    assert found[CEILING].imbalance == 1
    assert found["quota"].imbalance < 1.1 < found["shadow"].imbalance < found["none"].imbalance
    assert found["none"].seconds >= 0.999 * limit * _least_share(loads, scale)


def _rank_tokens(loads, scale):
    """Tokens of each rank without replicas in the first step: [layer, micro_batch, rank]."""
    total = loads.now[0].sum(0)
    return total.reshape(*total.shape[:2], scale.ranks, -1).sum(-1)


def _least_share(loads, scale):
    """Lower bound of the time without replicas over the limit: the busiest rank's experts, the mean's attention."""
    ranks = _rank_tokens(loads, scale)
    work = float((ranks.max(-1) / ranks.mean(-1)).mean()) * scale.expert_seconds
    attention = scale.attention_seconds * scale.time
    return (work + attention) / (scale.expert_seconds + attention)
