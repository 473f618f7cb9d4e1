"""Replicas of experts in frozen layers: they serve forward passes only, return no gradients, and change no number."""

import itertools
from typing import Any

import pytest

from tests.dynamics.test_moves import FREEZE, OVERLAPS, PP2
from tests.support.moving import Plans, move_at
from tests.support.sampled import sampled
from tests.support.settings import settings
from tests.support.training import EXACT, MOCK_DATA, MODEL, MOE, assert_close, assert_same, join, train_rank

BASE = [*MODEL, *MOCK_DATA, *EXACT, *MOE, *"--init-method-std 0.1 --global-batch-size 8".split()]
EXPERTS = f"--expert-model-parallel-size 2 --moe-token-dispatcher-type alltoall {OVERLAPS} --ddp-bucket-size 2000"
# The flags and moves of 4 ranks. Without stages there are two expert-parallel groups. One, two and three layers are
# frozen in iterations 2 to 4, then none. Layers that have just moved have no replicas, so moves leave iterations out.
CASES: dict[str, tuple[str, Plans]] = {
    "two groups": (f"{EXPERTS} {FREEZE}", {}),
    "moves": (f"{EXPERTS} {PP2} {FREEZE} --balance-layers", {1: ((3,), (1,)), 4: ((1,), (3,))}),
}


def _rank(argv: list[str], plans: Plans) -> tuple[Any, list[dict[int, tuple[bool, int, int]]]]:
    """Train. For each step and layer of this rank: whether it is frozen, its replicas, and its placement's hash."""
    from megatron.balanced.experts.balancer import ExpertBalancer

    begin, steps = ExpertBalancer.begin_schedule, []

    def begin_schedule(self: Any) -> None:
        begin(self)
        layers = {layer.index: layer for layer in self._layers()}
        steps.append(
            {at: (layer.frozen, layer.placement.replicas, hash(layer.placement)) for at, layer in layers.items()}
        )

    ExpertBalancer.begin_schedule = begin_schedule
    if plans:
        move_at(plans)
    return train_rank(argv, True), steps


@pytest.mark.parametrize(
    "case, mode",
    sampled(itertools.product(CASES, ("resident", "shared")), ("two groups", "resident"), ("moves", "shared")),
)
def test_replicas_of_frozen_layers_change_no_number(pool, case, mode):
    flags, plans = CASES[case]
    argv = [*BASE, *flags.split()]
    balanced = [*argv, "--balance-experts", *settings("experts", min_gain=0, replica_mode=mode).split()]
    reference = join([run for run, _ in pool.run(4, _rank, argv, {})])
    ranks, again = (pool.run(4, _rank, balanced, plans) for _ in range(2))
    run = join([run for run, _ in ranks])
    assert_close(run, reference)
    assert_same(join([run for run, _ in again]), run)
    steps = [rank for _, rank in ranks]
    frozen = {
        at for rank in steps for step in rank for at, (is_frozen, count, _) in step.items() if is_frozen and count
    }
    assert len(frozen) > 1, "frozen layers had no replicas, so nothing was tested"
    if case == "two groups":
        differ = [
            one[at] != other[at]
            for one, other in zip(steps[0], steps[2], strict=True)
            for at in one
            if one[at][0] and one[at][1]
        ]
        assert any(differ), "both groups had the same replicas"


def _frozen_with_gradients(argv: list[str]) -> str:
    from megatron.balanced.experts.balancer import ExpertBalancer

    begin = ExpertBalancer.begin_schedule

    def begin_schedule(self: Any) -> None:
        begin(self)
        for layer in self._layers():
            layer.frozen = layer.index == 1

    ExpertBalancer.begin_schedule = begin_schedule
    with pytest.raises(ValueError) as raised:
        train_rank(argv, False)
    return str(raised.value)


def test_a_frozen_layer_must_not_compute_gradients(pool):
    argv = [*BASE, "--moe-token-dispatcher-type", "alltoall", "--expert-model-parallel-size", "2", "--balance-experts"]
    said = "MoE layer 1 has `frozen` set, but computes gradients; run it in torch.no_grad()"
    assert pool.run(2, _frozen_with_gradients, argv) == [said] * 2
