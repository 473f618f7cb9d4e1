"""One MoE layer with replicas against Megatron-LM's own: forward bit for bit in float32, gradients in float64."""

from dataclasses import replace

import numpy as np
import pytest

from tests.support.one_layer import Layer, Pass, assert_alike, run_layer, skewed
from tests.support.sampled import sampled

EXPERTS, TOKENS = 8, 96


# Experts 0 and 1, whose home is rank 0, are hot. One replica fits nowhere else, one slot stays empty.
TWO = [[5, -1], [0, 1]]
FOUR = [[2, -1], [0, 1], [0, 1], [1, 0]]


def _busiest(passes: list[Pass]) -> int:
    return max(sum(seen.rows) for seen in passes)


@pytest.mark.parametrize("ranks, slot_expert", sampled([(2, TWO), (4, FOUR)], (4, FOUR)))
@pytest.mark.parametrize("dispatcher, topk", [("alltoall", k) for k in (2, 3, 6)] + [("allgather", k) for k in (1, 2)])
def test_forward_is_bitwise_the_same(pool, ranks, slot_expert, dispatcher, topk):
    """With products that take one row at a time, so that rows do not depend on their number."""
    plain = Layer(EXPERTS, skewed(ranks, TOKENS, EXPERTS, topk), dispatcher=dispatcher, row_by_row=True)
    balanced = replace(plain, slot_expert=slot_expert)
    reference, ours, again = (run_layer(pool, layer) for layer in (plain, balanced, balanced))
    assert sum(count for seen in ours for count in seen.rows[EXPERTS // ranks :]) > TOKENS // 2, "replicas had no work"
    assert _busiest(ours) < 0.9 * _busiest(reference)
    for rank, (mine, theirs) in enumerate(zip(ours, reference, strict=True)):
        difference = np.abs(mine.output - theirs.output).max()
        assert np.array_equal(mine.output, theirs.output), f"output of rank {rank} differs by {difference}"
    assert_alike(again, ours, tolerance=None)


def _to(experts: list[int], tokens: int = TOKENS) -> np.ndarray:
    return np.tile(np.array(experts), (tokens, 1))


# The routing of each rank, where replicas are, and more of the layer. With a capacity factor a token may go nowhere.
DROPPED = {"moe_expert_capacity_factor": 8.0}
ADVERSARIAL = {
    "one expert takes all": ([_to([3])] * 2, [[-1, -1], [3, -1]], {}),
    "two experts of one rank take all": ([_to([0, 1])] * 2, TWO, {}),
    "a rank with no token to send": ([_to([0, 5]), _to([-1, -1])], TWO, DROPPED),
    "no token at all": ([_to([-1, -1])] * 2, TWO, DROPPED),
    "all tokens of one rank to its own replica": ([_to([6, 7], 7), _to([0, 1], 7)], TWO, {}),
    "every expert somewhere else": (skewed(2, TOKENS, EXPERTS, 3), [[4, 5, 6, 7], [0, 1, 2, 3]], {}),
    "four ranks, one sends nothing": ([*skewed(3, TOKENS, EXPERTS, 2), _to([-1, -1])], FOUR, DROPPED),
}


@pytest.mark.parametrize("dispatcher", ["alltoall", "allgather"])
@pytest.mark.parametrize("case", ADVERSARIAL)
def test_adversarial_loads_change_no_number(pool, case, dispatcher):
    """Forward and gradients in float64."""
    chosen, slot_expert, options = ADVERSARIAL[case]
    plain = Layer(EXPERTS, chosen, dispatcher=dispatcher, dtype="float64", options=options)
    reference = run_layer(pool, plain)
    balanced = run_layer(pool, replace(plain, slot_expert=slot_expert, shared=dispatcher == "allgather"))
    assert sum(sum(seen.rows) for seen in balanced) == sum(sum(seen.rows) for seen in reference)
    assert _busiest(balanced) <= _busiest(reference)
    assert_alike(balanced, reference, tolerance=1e-12)


def test_a_rank_without_a_single_token(pool):
    """Sequences of different length, down to none, which alltoall allows."""
    plain = Layer(EXPERTS, [skewed(2, TOKENS, EXPERTS, 2)[0], _to([0, 0], 0)], dtype="float64")
    reference, balanced = run_layer(pool, plain), run_layer(pool, replace(plain, slot_expert=TWO))
    assert sum(balanced[1].rows) > sum(reference[1].rows)
    assert_alike(balanced, reference, tolerance=1e-12)


def test_the_split_on_a_device_is_the_same(pool):
    """The code that runs on a GPU, without waiting for it, sends every token where the host's arithmetic sends it."""
    on_host = Layer(EXPERTS, skewed(4, TOKENS, EXPERTS, 3, seed=2), FOUR, dtype="float64")
    passes, expected = run_layer(pool, replace(on_host, split_on_device=True)), run_layer(pool, on_host)
    assert [seen.rows for seen in passes] == [seen.rows for seen in expected]
    assert_alike(passes, expected, tolerance=None)


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("topk", [1, 2, 6])
def test_gradients_are_the_same_in_float64(pool, topk, shared):
    plain = Layer(EXPERTS, skewed(4, TOKENS, EXPERTS, topk, seed=1), dtype="float64")
    balanced = replace(plain, slot_expert=FOUR, shared=shared)
    assert_alike(run_layer(pool, balanced), run_layer(pool, plain), tolerance=1e-12)


def test_layer_with_slots_that_are_all_empty(pool):
    """Nothing is replicated: then the layer is Megatron's, bit for bit, gradients too."""
    plain = Layer(EXPERTS, skewed(2, TOKENS, EXPERTS, 3))
    assert_alike(run_layer(pool, replace(plain, slot_expert=[[-1], [-1]])), run_layer(pool, plain), tolerance=None)


def _in_the_place_of_transformer_engines() -> list[str]:
    """Experts of a spec with Transformer Engine's linear layers, built as balancing builds them: their kind and their
    parameters."""
    from functools import partial

    from megatron.core.transformer.mlp import MLPSubmodules
    from megatron.core.transformer.moe.experts import SequentialMLP
    from megatron.core.transformer.moe.moe_layer import MoESubmodules

    from megatron.balanced.trainer import model
    from tests.support.one_layer import tiny_config

    theirs = MLPSubmodules(linear_fc1=None, linear_fc2=None)
    spec = MoESubmodules(experts=partial(SequentialMLP, submodules=theirs))
    filled = model._fill_in(spec, {SequentialMLP: model._on_own_linears})
    config, groups = tiny_config()
    built = filled.experts(2, config, pg_collection=groups)
    return [type(built).__name__, *(name for name, _ in built.named_parameters())]


def test_they_stand_in_for_transformer_engines(pool):
    (built,) = pool.run(1, _in_the_place_of_transformer_engines)
    linears = [f"local_experts.{n}.linear_fc{m}.weight" for n in range(2) for m in (1, 2)]
    assert built == ["SequentialMLP", *linears]
