"""Balanced expert parallelism trains the same model: losses and parameters against the run without replicas."""

import itertools
import sys
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.events import events_in
from tests.support.sampled import sampled
from tests.support.settings import settings
from tests.support.training import EXACT, MOCK_DATA, MODEL, Run, assert_close, train, train_rank

EXPERTS = (
    "--swiglu --disable-bias-linear --num-experts 8 --moe-router-topk 2 --moe-ffn-hidden-size 32 "
    "--moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 1e-2 --moe-z-loss-coeff 1e-3"
)
BASE = [*MODEL, *MOCK_DATA, *EXACT, *EXPERTS.split(), *"--train-iters 10 --num-layers 2 --global-batch-size 4".split()]

# ranks, layout flags; two micro-batches for every data-parallel rank
LAYOUTS = {
    "EP 2": (2, "--expert-model-parallel-size 2"),
    "EP 4": (4, "--expert-model-parallel-size 4 --global-batch-size 8"),
    "EP 2, PP 2": (4, "--expert-model-parallel-size 2 --pipeline-model-parallel-size 2"),
    "EP 4, PP 2": (8, "--expert-model-parallel-size 4 --pipeline-model-parallel-size 2 --global-batch-size 8"),
}
OVERLAP = "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"
# Tied to the embedding on another stage, the head of such a model is saved by no Megatron-LM.
MORE_TOKENS = "--mtp-num-layers 2 --untie-embeddings-and-output-weights"
OTHERS = {
    "top-3": (2, "--expert-model-parallel-size 2 --moe-router-topk 3"),
    "one home expert": (4, "--expert-model-parallel-size 4 --num-experts 4 --global-batch-size 8"),
    "ETP 2": (
        4,
        "--expert-model-parallel-size 2 --tensor-model-parallel-size 2 --expert-tensor-parallel-size 2 "
        "--sequence-parallel --make-vocab-size-divisible-by 64",
    ),
    "VPP 2": (
        4,
        "--expert-model-parallel-size 2 --pipeline-model-parallel-size 2 --num-layers 4 "
        "--num-layers-per-virtual-pipeline-stage 1",
    ),
    "MoE recompute": (2, "--expert-model-parallel-size 2 --recompute-granularity selective --recompute-modules moe"),
    "full recompute": (
        2,
        "--expert-model-parallel-size 2 --recompute-granularity full --recompute-method uniform "
        "--recompute-num-layers 1",
    ),
    "overlap": (4, f"--expert-model-parallel-size 2 --global-batch-size 8 {OVERLAP}"),
    "overlap of gradients": (4, "--expert-model-parallel-size 2 --global-batch-size 8 --overlap-grad-reduce"),
    "PP 2, overlap": (4, f"--expert-model-parallel-size 2 --pipeline-model-parallel-size 2 {OVERLAP}"),
    "VPP 2, overlap": (
        4,
        "--expert-model-parallel-size 2 --pipeline-model-parallel-size 2 --num-layers 4 "
        f"--num-layers-per-virtual-pipeline-stage 1 {OVERLAP}",
    ),
    "shared expert": (2, "--expert-model-parallel-size 2 --moe-shared-expert-intermediate-size 32"),
    "expert bias": (
        2,
        "--expert-model-parallel-size 2 --moe-router-score-function sigmoid --moe-router-enable-expert-bias",
    ),
    "capacity": (2, "--expert-model-parallel-size 2 --moe-expert-capacity-factor 1.0"),
    "more tokens, PP 2": (4, f"--expert-model-parallel-size 2 --pipeline-model-parallel-size 2 {MORE_TOKENS}"),
    "more tokens, full recompute": (
        2,
        f"--expert-model-parallel-size 2 {MORE_TOKENS} --recompute-granularity full --recompute-method uniform "
        "--recompute-num-layers 1",
    ),
}


def _balanced(pool, tmp_path: Path, ranks: int, flags: str, balance: str) -> Run:
    balance = f"--balance-experts --balance-report {tmp_path} {balance}"
    run = train(pool, ranks, f"{flags} {balance}", base=BASE, parameters=True)
    moves = events_in(tmp_path, action="replicate")
    assert len(moves) > 3, "hardly anything was replicated, so nothing was tested"
    assert all(line["moved_bytes"] > 0 for line in moves)
    expert_ranks = int(flags.split("--expert-model-parallel-size ")[1].split()[0])
    assert all(len(line["tokens_per_rank"]) == expert_ranks for line in moves)
    decoder_layers = 4 if "--num-layers 4" in flags else 2
    layers = decoder_layers + (2 if MORE_TOKENS in flags else 0)
    assert {line["layer"] for line in moves} == set(range(layers)), "not every layer had replicas"
    if "prophet" not in balance:  # which splits by an old load, and on one as flat as this gains nothing
        assert np.mean([line["imbalance_after"] - line["imbalance_before"] for line in moves]) < -0.01
    return run


@cache
def _reference(pool, ranks: int, flags: str) -> Run:
    return train(pool, ranks, flags, base=BASE, parameters=True)


DISPATCHERS, MODES, PLANNERS = ("alltoall", "allgather"), ("resident", "shared"), ("quota", "prophet")


@pytest.mark.parametrize(
    "layout, dispatcher, mode, planner",
    sampled(
        itertools.product(LAYOUTS, DISPATCHERS, MODES, PLANNERS),
        ("EP 2", "alltoall", "resident", "quota"),
        ("EP 2, PP 2", "allgather", "shared", "quota"),
    ),
)
def test_replicas_change_no_number(pool, tmp_path, layout, dispatcher, mode, planner):
    ranks, flags = LAYOUTS[layout]
    flags += f" --moe-token-dispatcher-type {dispatcher}"
    balanced = _balanced(pool, tmp_path, ranks, flags, settings("experts", replica_mode=mode, planner=planner))
    assert_close(balanced, _reference(pool, ranks, flags))


@pytest.mark.parametrize("case, mode", sampled(itertools.product(OTHERS, MODES), ("overlap", "shared")))
def test_replicas_with_everything_else(pool, tmp_path, case, mode):
    ranks, flags = OTHERS[case]
    flags += " --moe-token-dispatcher-type alltoall"
    assert_close(
        _balanced(pool, tmp_path, ranks, flags, settings("experts", replica_mode=mode)), _reference(pool, ranks, flags)
    )


LATE = {**LAYOUTS, **{case: flags for case, flags in OTHERS.items() if case != "capacity"}}


@pytest.mark.parametrize(
    "case, dispatcher, mode, slots",
    sampled(
        itertools.product(LATE, DISPATCHERS, MODES, (0, 1)),
        ("EP 2, PP 2", "alltoall", "resident", 0),
        ("full recompute", "allgather", "shared", 1),
    ),
)
def test_late_copies_change_no_number(pool, tmp_path, case, dispatcher, mode, slots):
    """Beside old placements, and beside none."""
    ranks, flags = LATE[case]
    flags += f" --moe-token-dispatcher-type {dispatcher}"
    late = settings("experts", replica_mode=mode, replica_slots=slots, late_slots=1, plan_interval=5)
    balance = f"--balance-experts --balance-report {tmp_path} {late}"
    run = train(pool, ranks, f"{flags} {balance}", base=BASE, parameters=True)
    lines = events_in(tmp_path, action="replicate")
    assert sum(line["late_copies"] for line in lines) > 3, "hardly any late copies, so nothing was tested"
    assert max(line["imbalance_after"] for line in lines) < 1.2
    assert_close(run, _reference(pool, ranks, flags))


def test_how_often_replicas_are_placed(pool, tmp_path):
    """Every fifth iteration. No number depends on it."""
    ranks, flags = LAYOUTS["EP 2"]
    flags += " --moe-token-dispatcher-type alltoall"
    balanced = _balanced(pool, tmp_path, ranks, flags, settings("experts", plan_interval=5))
    assert_close(balanced, _reference(pool, ranks, flags))
    lines = events_in(tmp_path)
    ages = [line["plan_age"] for line in lines if line.get("layer") == 0 and line["unit"] == "layer"]
    assert all(0 < line["drift"] < 1 for line in lines if line.get("plan_age") and line["iteration"] > 3)
    assert ages == [0, 1, 2, 3, 4, 1, 2, 3, 4, 5]


def _begins_of_compute(argv: list[str]) -> dict[str, int]:
    """Train this rank. Returns how often parts of transfers may be posted: by the function that says so."""
    from balancing.experts.engine.slots import ReplicaSlots
    from megatron.balanced.experts.moe_layer import BalancedMoELayer

    begin, begins = ReplicaSlots.begin_compute, Counter[str]()

    def begin_compute(slots: ReplicaSlots) -> None:
        first, _ = slots._postings.shares(begins_with_experts=True)
        assert 0.1 < first < 0.9
        frame = sys._getframe(1)
        if frame.f_code is BalancedMoELayer._begin_compute.__code__:
            frame = frame.f_back
        if frame.f_code.co_name == "act":  # of `replicated.later`
            frame = frame.f_back
        begins[frame.f_code.co_name] += 1
        begin(slots)

    ReplicaSlots.begin_compute = begin_compute
    train_rank(argv, False)
    return dict(begins)


def test_parts_of_transfers_are_posted_when_compute_begins(pool):
    """In the passes of each layer and micro-batch: after both exchanges of tokens of a forward pass, and of a backward
    pass."""
    argv = [*BASE, "--expert-model-parallel-size", "2", "--balance-experts"]
    passes = 10 * 2 * 2  # iterations, layers, micro-batches
    for begins in pool.run(2, _begins_of_compute, argv):
        assert begins["postprocess"] == begins["hook"] == passes
        assert begins["acquire"] > passes / 2, "hardly anything was replicated, so nothing was tested"


def _backward_order(argv: list[str]) -> list[list[str]]:
    """Train this rank. Returns what happens in each backward pass through experts, in order: "return" when gradients of
    replicas set out, "home" when a home expert has a gradient."""
    from balancing.experts.engine.slots import ReplicaSlots
    from megatron.balanced.experts.replicated import ReplicatedSequentialMLP

    prepare, accumulate, end = ReplicatedSequentialMLP.prepare, ReplicaSlots.accumulate_gradients, ReplicaSlots.end_pass
    passes: list[list[str]] = [[]]

    def watch(experts: ReplicatedSequentialMLP) -> None:
        prepare(experts)
        for weight in experts.local_experts.parameters():
            weight.register_hook(lambda gradient: passes[-1].append("home"))

    def accumulate_gradients(slots: ReplicaSlots, number: int) -> None:
        passes[-1].append("return")
        accumulate(slots, number)

    def end_pass(slots: ReplicaSlots, number: int) -> None:
        end(slots, number)
        passes.append([])

    ReplicatedSequentialMLP.prepare = watch
    ReplicaSlots.accumulate_gradients, ReplicaSlots.end_pass = accumulate_gradients, end_pass
    train_rank(argv, False)
    return passes[:-1]


@pytest.mark.parametrize("slots", [1, 2])
def test_gradients_of_replicas_return_while_home_experts_compute_theirs(pool, slots):
    """Also on ranks that hold no replica of a layer: they receive at the point where others send."""
    argv = [*BASE, *"--expert-model-parallel-size 4 --global-batch-size 8 --balance-experts".split()]
    argv += settings("experts", replica_slots=slots).split()
    for passes in pool.run(4, _backward_order, argv):
        replicated = [events for events in passes if "return" in events]
        assert len(replicated) > len(passes) / 2, "hardly anything was replicated, so nothing was tested"
        assert all(events[0] == "return" and events.count("return") == 1 for events in replicated)
        assert all("home" in events for events in passes)


def _first_gathers(argv: list[str]) -> list[list[bool]]:
    """Train this rank. For each step: whether the parameters of each gather that starts before the forward pass are of
    experts, in the order of starts."""
    from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBucketGroup as BucketGroup

    from megatron.balanced.experts.gradients import ExpertChunk

    start, begin = BucketGroup.start_param_sync, ExpertChunk.begin_step
    steps: list[list[bool]] = []
    noted = False

    def start_param_sync(self: Any, force_sync: bool = False) -> None:
        if noted:
            parameters = [parameter for bucket in self.buckets for parameter in bucket.params_list]
            steps[-1].append(all(not getattr(parameter, "allreduce", True) for parameter in parameters))
        start(self, force_sync=force_sync)

    def begin_step(self: ExpertChunk, micro_batches: int) -> None:
        nonlocal noted
        steps.append([])
        noted = True
        begin(self, micro_batches)
        noted = False

    BucketGroup.start_param_sync, ExpertChunk.begin_step = start_param_sync, begin_step
    train_rank(argv, False)
    return steps


def test_parameters_of_the_first_layers_are_gathered_before_those_of_experts(pool):
    overlaps = "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather --ddp-bucket-size 2000"
    argv = [*BASE, *f"--expert-model-parallel-size 2 --balance-experts {overlaps}".split()]
    for steps in pool.run(4, _first_gathers, argv):
        gathers = [step for step in steps if step]
        assert len(gathers) > 4 and all(len(step) > 2 for step in gathers)
        assert all(step[0] is False and all(step[1:]) for step in gathers)
