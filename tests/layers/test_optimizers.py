"""Layers move with the state of optimizers that keep it elsewhere than Adam does, and no number changes."""

from typing import Any

import pytest

from tests.layers.test_move import (
    BASE,
    EP2,
    OVERLAPS,
    PP2,
    SHARDED,
    TO_THE_RIGHT,
    _assert_same_run,
    _assert_same_tensors,
)
from tests.support.moving import Plans, train_moving
from tests.support.training import train

SINGLE = "--bf16 --clip-grad 0 --attention-dropout 0 --hidden-dropout 0"
THERE_AND_BACK: Plans = {1: ((3,), (1,)), 3: ((1,), (3,))}

# Muon and others of NVIDIA's emerging optimizers.

LAYER_WISE = "layer-wise, bf16, DP 2, both overlaps"
# ranks, flags, plans
EMERGING = {
    LAYER_WISE: (4, f"{PP2} {SINGLE} {OVERLAPS} --optimizer muon --ddp-bucket-size 2000", TO_THE_RIGHT),
    "muon, nothing sharded": (2, f"{PP2} {SINGLE} --optimizer muon", THERE_AND_BACK),
    "dist_muon, PP 2, VPP 2, experts": (
        4,
        f"{PP2} {SINGLE} {EP2} --optimizer dist_muon --num-virtual-stages-per-pipeline-rank 2 --num-layers 8",
        {2: ((1, 3), (3, 1))},
    ),
    "lion": (2, f"{PP2} {SINGLE} --optimizer lion", TO_THE_RIGHT),
}


@pytest.mark.exhaustive
@pytest.mark.parametrize("case", EMERGING)
def test_a_move_of_emerging_optimizers_changes_no_number(muon, case):
    ranks, flags, plans = EMERGING[case]
    run, state = train_moving(muon, ranks, flags, plans, base=BASE)
    reference, expected = train_moving(muon, ranks, flags, {}, base=BASE)
    _assert_same_run(run, reference)
    _assert_same_tensors(state, expected)
    kinds = {name.rpartition(":")[2] for name in expected}
    assert {"main", "exp_avg"} <= kinds and (case == "lion" or "momentum_buffer" in kinds)


@pytest.mark.exhaustive
def test_what_muon_saved_after_a_move_goes_on(muon, tmp_path):
    flags = f"{PP2} {SINGLE} {SHARDED} --optimizer muon"
    save = f"{flags} --save {tmp_path} --save-interval 3"
    whole, _ = train_moving(muon, 4, save, TO_THE_RIGHT, base=BASE)
    load = f"{flags} --pipeline-model-parallel-layout Et|tttL --load {tmp_path} --ckpt-step 3 --no-load-rng"
    resumed = train(muon, 4, load, base=BASE, parameters=True)
    assert resumed.losses == whole.losses[3:]
    _assert_same_tensors(resumed.parameters, whole.parameters)


def _build_again() -> list[list[int]]:
    """Parameters in each group of three optimizers, of which the last two are built as by a move."""
    import torch

    from tests.support.small_moe import build

    model = build(torch.float32)
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer, get_standard_config_overrides

    from megatron.balanced.layers.balancer import _as_given

    config = OptimizerConfig(optimizer="muon", lr=1e-2)
    overrides = get_standard_config_overrides(config)
    optimizers = [
        get_megatron_optimizer(config, [model], config_overrides=given)
        for given in (overrides, _as_given(overrides), _as_given(overrides))
    ]
    return [[len(group["params"]) for group in optimizer.param_groups] for optimizer in optimizers]


@pytest.mark.exhaustive
def test_a_loop_may_give_the_overrides_that_it_built_muon_with(muon):
    """Megatron-LM has added to them what it refuses to be given."""
    ((first, *others),) = muon.run(1, _build_again)
    assert len(first) > 1 and others == [first, first]


# Settings of parameter groups.


def _with_settings(argv: list[str], plans: Plans) -> list[dict[str, Any]]:
    """The parameter groups of this rank at the end, whose betas a loop has set before the first move. The first stage
    counts no steps there, as if nothing of it trained."""
    from tests.support.moving import at_end_of_step, move_at
    from tests.support.training import train_rank

    seen: list[dict[str, Any]] = []

    def see(balancer: Any) -> None:
        from megatron.core import mpu

        groups = balancer.run.optimizer.param_groups
        for group in groups if balancer.iteration == 0 else ():
            group |= {"betas": (0.8, 0.9)} | ({} if mpu.is_pipeline_first_stage() else {"step": 7})
        seen[:] = [{name: group.get(name) for name in ("betas", "step", "wd_mult")} for group in groups]

    move_at(plans)
    at_end_of_step(see)
    train_rank(argv, True)
    return seen


@pytest.mark.parametrize("sharded", [False, True])
def test_a_move_keeps_the_settings_of_parameter_groups(pool, sharded):
    ranks = 4 if sharded else 2
    argv = [*BASE, *f"{PP2} {SHARDED if sharded else ''} --balance-layers".split()]
    for groups in pool.run(ranks, _with_settings, argv, THERE_AND_BACK):
        assert len(groups) == 2 and len({group["wd_mult"] for group in groups}) == 2
        assert all(group["betas"] == (0.8, 0.9) and group["step"] == 7 for group in groups)


# Offloading of activations.


def _planned(counts: Plans, offloads: bool) -> list[list[int]]:
    """Layers of each stage that planners choose, where the last layer costs as much as all others."""
    from types import SimpleNamespace

    import numpy as np

    from balancing.layers import LayerSeconds
    from balancing.pipeline import MEGATRON_DEFAULTS
    from balancing.pipeline.stage_plan import StagePlan
    from megatron.balanced.layers import planning

    seconds = np.array([1.0, 1, 1, 1, 1, 5])
    found = []
    for method in ("optimal", "diffusion"):
        planner = object.__new__(planning.LayerPlanner)
        planner._micro_batches = 4
        planner._model = SimpleNamespace(fine_grained_activation_offloading=offloads)
        planner._config = SimpleNamespace(planner=method)
        planner._schedule = MEGATRON_DEFAULTS
        planner._mover = SimpleNamespace(plan=StagePlan.from_counts(counts), gather=lambda own: [own])
        plan = planner._plan(LayerSeconds(seconds, 2 * seconds), np.zeros(2), np.inf)
        found.append([len(chunk) for chunk in plan.order])
    return found


def test_no_plan_leaves_one_layer_where_activations_are_offloaded(pool):
    """The first backward pass would look for activations of such a chunk in the wrong micro-batch."""
    assert pool.run(1, _planned, ((3,), (3,)), False) == [[[5, 1]] * 2]
    assert pool.run(1, _planned, ((3,), (3,)), True) == [[[4, 2]] * 2]


def _hooked_again(quantized: bool) -> tuple[int, int]:
    """Calls in a backward pass of a hook that Megatron-LM has registered three times, with two of them at moves; of a
    parameter that stays and of one that has arrived at the last move. quantized: of a class as Transformer Engine's."""
    import torch

    from megatron.balanced.layers.mover import _hooked

    class Quantized(torch.nn.Parameter):
        def expand_as(self, other: Any) -> Any:
            return other.view_as(other)

    stays, arrives = ((Quantized if quantized else torch.nn.Parameter)(torch.ones(2)) for _ in range(2))
    calls, nodes = [], {}

    def wrap(parameters: Any, known: Any) -> None:
        with _hooked(known):
            for parameter in parameters:
                node = parameter.expand_as(parameter).grad_fn.next_functions[0][0]
                node.register_hook(lambda *unused, own=parameter: calls.append(own))
                nodes.setdefault(parameter, node)

    wrap([stays], {})
    wrap([stays], dict(nodes))
    wrap([stays, arrives], dict(nodes))
    (stays * arrives).sum().backward()
    assert stays.expand_as(stays).shape == (2,)
    return sum(own is stays for own in calls), sum(own is arrives for own in calls)


def _steps_that_wait(interval: int) -> list[int]:
    """Measured steps that wait for `advise`, after each of 7."""
    from types import SimpleNamespace

    from megatron.balanced.layers.balancer import LayerBalancer
    from megatron.balanced.layers.planning import LayerPlanner

    balancer, planner = object.__new__(LayerBalancer), object.__new__(LayerPlanner)
    planner._seconds, planner._steps, planner._eager_steps = [], [], []
    planner.add = lambda step, record, micro_batches: planner._seconds.append(step)
    balancer._planner, balancer._moves, balancer._config = planner, False, SimpleNamespace(interval=interval)
    balancer._warm, balancer._settled, balancer._micro_batches, found = 0, False, (1,), []
    for step in range(1, 8):
        balancer.observer = SimpleNamespace(measured=(step, None))
        balancer.between_steps(step)
        found.append(len(planner._seconds))
    assert planner._seconds == list(range(8 - interval, 8))
    return found


def test_without_moves_the_steps_of_one_interval_wait_for_advise(pool):
    assert pool.run(1, _steps_that_wait, 3) == [[1, 2, 3, 3, 3, 3, 3]]


@pytest.mark.parametrize("quantized", [False, True])
def test_hooks_of_moves_do_not_add_up(pool, quantized):
    assert pool.run(1, _hooked_again, quantized) == [(1, 1)]
