"""Replicas of experts in a model of Transformer Engine's layers, and its grouped linear with replicas in slots."""

import os
from functools import wraps
from typing import Any

import numpy as np
import pytest

from tests.support.checkers.checked_runs import noted_rank
from tests.support.checkers.collective_order import replay
from tests.support.events import events_in
from tests.support.sampled import sampled
from tests.support.settings import settings, without_settings
from tests.support.training import MOCK_DATA, MODEL, RankRun, join
from tests.support.transformer_engine.model import EXPERTS, SINGLE, TE, assert_close

EP2 = "--expert-model-parallel-size 2"
EIGHT = EXPERTS.replace("--num-experts 4", "--num-experts 8")
OP_FUSER = "--use-transformer-engine-op-fuser"
OVERLAPS = "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather --ddp-bucket-size 2000"
# ranks, flags
CASES = {
    "linear layers, slots shared": (2, f"{EP2} {settings('experts', replica_mode='shared')}"),
    "grouped": (2, f"{EP2} --moe-grouped-gemm"),
    "grouped, expert tensor parallel, full recompute": (
        4,
        f"{EP2} --moe-grouped-gemm --tensor-model-parallel-size 2 --sequence-parallel --expert-tensor-parallel-size 2 "
        "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
    ),
    "grouped, late copies": (
        4,
        f"{EP2} --pipeline-model-parallel-size 2 --moe-grouped-gemm {OVERLAPS} "
        f"{settings('experts', late_slots=1, plan_interval=3)}",
    ),
    "PyTorch's products, late copies": (
        4,
        f"{EP2} --pipeline-model-parallel-size 2 --moe-grouped-gemm {OVERLAPS} --recompute-granularity selective "
        f"--recompute-modules moe_act {settings('experts', late_slots=1, plan_interval=3, gemm='torch')}",
    ),
    "grouped, PP 2, overlap": (4, f"{EP2} --pipeline-model-parallel-size 2 --moe-grouped-gemm {OVERLAPS}"),
}


@pytest.mark.parametrize(
    "case", sampled(CASES, "grouped, PP 2, overlap", "grouped, late copies", "PyTorch's products, late copies")
)
def test_replicas_beside_transformer_engine_change_no_number(model_of, tmp_path, case):
    ranks, flags = CASES[case]
    model = model_of(EIGHT)
    run = model.train(
        ranks,
        f"{flags} --balance-experts {settings('experts', min_gain=0)} --train-iters 6 --balance-report {tmp_path}",
    )
    assert len(events_in(tmp_path, action="replicate")) > 10, "hardly anything was replicated"
    # Transformer Engine's own grouped linear layers run the experts of the reference.
    assert_close(run, model.alone("--moe-grouped-gemm --train-iters 6"), 1e-5, 1e-4)


def _choice_beside_torch() -> tuple[str, set[str]]:
    import torch

    from balancing.kernels.expert_choice import GEMMS, ExpertSizes, choose_among_gemms

    sizes = ExpertSizes(torch.float32, 32, 16, True, 4, 64)
    choice = choose_among_gemms({name: GEMMS[name] for name in ("torch", "te")}, torch.device("cpu"), sizes)
    return choice.line, set(choice.rates)


def test_grouped_products_are_right_on_their_own(engine):
    """The trial compares those that are not the model's own, and times both."""
    ((line, timed),) = engine.run(1, _choice_beside_torch)
    assert "left out" not in line and timed == {"torch", "te"}


DELAYED = "--moe-token-dispatcher-type alltoall --overlap-moe-expert-parallel-comm --delay-wgrad-compute"
# ranks, flags
DELAYED_CASES = {
    "grouped, DP 2, overlap": (4, f"{EP2} --moe-grouped-gemm {OVERLAPS}"),
    "linear layers": (2, EP2),
    "interleaved": (
        4,
        f"{EP2} --pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1 --moe-grouped-gemm "
        f"{OVERLAPS} --moe-shared-expert-intermediate-size 32",
    ),
}


@pytest.mark.parametrize("case", sampled(DELAYED_CASES, "grouped, DP 2, overlap"))
def test_gradients_of_replicas_are_sent_after_delayed_ones(model_of, tmp_path, case):
    """Weight gradients come after those of inputs, in a part of the schedule of their own."""
    ranks, flags = DELAYED_CASES[case]
    shared = "--moe-shared-expert-intermediate-size 32"
    model = model_of(f"{EIGHT} --global-batch-size 8 {shared if shared in flags else ''}")
    run = model.train(
        ranks, f"{flags} {DELAYED} --balance-experts {settings('experts', min_gain=0)} --balance-report {tmp_path}"
    )
    assert len(events_in(tmp_path, action="replicate")) > 5, "hardly anything was replicated"
    assert_close(run, model.alone("--moe-grouped-gemm"), 1e-5, 1e-4)


@pytest.mark.exhaustive
def test_delayed_gradients_are_sent_in_order(engine):
    flags = f"{TE} {SINGLE} {EXPERTS} {EP2} --moe-grouped-gemm {OVERLAPS} {DELAYED} --balance-experts"
    argv = [*MODEL, *MOCK_DATA, *f"{flags} --init-method-std 0.1 --global-batch-size 8 --train-iters 3".split()]
    ranks = engine.run(4, noted_rank, argv, {}, 0)
    assert replay([rank.operations for rank in ranks]) is None
    assert not {race for rank in ranks for race in rank.races}


def _train_watched(argv: list[str]) -> tuple[RankRun, list[int], list[str]]:
    """Train with fused accumulation. Returns the run, the number of weights of each grouped product in order, and what
    was wrong with a product: a weight that is neither a parameter's nor a slot's memory, or a gradient outside buffers.
    """
    import torch
    import transformer_engine_torch as tex
    from megatron.training import training

    from balancing.experts.engine.slots import ReplicaSlots
    from tests.experts.test_fusion import _train_fused

    if OP_FUSER in argv:
        os.environ["NVTE_CUTEDSL_FUSED_GROUPED_MLP"] = "1"  # without which Megatron-LM does not try
    groups: list[int] = []
    wrong: list[str] = []
    buffers: set[int] = set()  # addresses of memory
    product, make_slots, build = tex.te_general_grouped_gemm, ReplicaSlots.__init__, training.setup_model_and_optimizer
    accumulator = ReplicaSlots._accumulator

    def memory(tensor: torch.Tensor) -> int:
        return tensor.untyped_storage().data_ptr()

    def watched_product(a: Any, transa: bool, b: Any, transb: bool, d: Any, *rest: Any, **more: Any) -> Any:
        groups.append(len(a))
        if not (buffers >= {memory(each) for each in (d if transb else a)}):
            wrong.append(f"product {len(groups)}: {'gradients' if transb else 'weights'} are copies")
        return product(a, transa, b, transb, d, *rest, **more)

    def watched_slots(self: ReplicaSlots, *args: Any, **kwargs: Any) -> None:
        make_slots(self, *args, **kwargs)
        buffers.update(map(memory, self._weights))

    def watched_accumulator(self: ReplicaSlots, number: int) -> torch.Tensor:
        gradients = accumulator(self, number)
        buffers.add(memory(gradients))
        return gradients

    @wraps(build)
    def setup_model_and_optimizer(*args: Any, **kwargs: Any) -> Any:
        built = build(*args, **kwargs)
        for parameter in (each for chunk in built[0] for each in chunk.parameters()):
            buffers.update((memory(parameter), memory(parameter.main_grad)))
        return built

    tex.te_general_grouped_gemm = watched_product
    ReplicaSlots.__init__, ReplicaSlots._accumulator = watched_slots, watched_accumulator
    training.setup_model_and_optimizer = setup_model_and_optimizer
    run, _, _ = _train_fused(argv)
    return run, groups, wrong


ONE_PRODUCT = {
    "activation computed again": "--recompute-granularity selective --recompute-modules moe_act",
    "slots shared": settings("experts", replica_mode="shared"),
    "fused operations": OP_FUSER,
}


@pytest.mark.parametrize("case", sampled(ONE_PRODUCT, "activation computed again"))
def test_homes_and_replicas_are_one_product(model_of, tmp_path, case):
    """No weight is copied for a product, none more is started, and gradients are added to buffers by the products."""
    model = model_of(EIGHT)
    flags = f"{EP2} --moe-grouped-gemm --train-iters 3 {ONE_PRODUCT[case]}"
    balance = f"--balance-experts {settings('experts', min_gain=0)} --balance-report {tmp_path}"
    balanced = model.pool.run(2, _train_watched, model.argv(f"{flags} {balance}"))
    unbalanced = model.pool.run(2, _train_watched, model.argv(without_settings(flags)))
    assert len(events_in(tmp_path, action="replicate")) > 3, "hardly anything was replicated"
    for (_, groups, wrong), (_, groups_before, _) in zip(balanced, unbalanced, strict=True):
        assert not wrong
        assert set(groups_before) == {4} and set(groups) == {4, 4 + 2}  # homes, slots
        assert len(groups) == len(groups_before) == 3 * 2 * 4 * 6  # iterations, micro-batches, layers, products
    assert_close(join([run for run, *_ in balanced]), join([run for run, *_ in unbalanced]), 1e-5, 1e-4)


# Of Transformer Engine's experts, model and flags
FURTHER = {
    "latent, interleaved halves": ("--moe-latent-size 16 --moe-mlp-glu-interleave-size 8", ""),
    "probabilities on the input": ("", "--moe-router-topk 1 --moe-router-pre-softmax --moe-apply-probs-on-input"),
}


@pytest.mark.parametrize("case", sampled(FURTHER))
def test_what_transformer_engines_experts_do_replicas_do(model_of, tmp_path, case):
    more, flags = FURTHER[case]
    model = model_of(f"{EIGHT} --moe-grouped-gemm {more}")
    balance = f"--balance-experts {settings('experts', min_gain=0)} --balance-report {tmp_path}"
    run = model.train(2, f"{EP2} {flags} {balance}")
    assert len(events_in(tmp_path, action="replicate")) > 3, "hardly anything was replicated"
    assert_close(run, model.train(2, f"{EP2} {flags}"), 1e-5, 1e-4)


def _with_a_slot(rows: np.ndarray, counts: list[int], gradient: np.ndarray) -> list[np.ndarray]:
    """Outputs, and gradients of rows and of each weight, of three experts of which the last is a replica of the first.

    As Transformer Engine's grouped linear computes them, with the replica's weight in a slot that is no parameter, and
    as torch does.
    """
    import torch
    import transformer_engine.pytorch as te

    grouped = te.GroupedLinear(3, 32, 48, bias=False, device="cpu")
    del grouped._parameters["weight2"]
    slot = grouped.weight0.detach().clone().view(-1).view(48, 32).requires_grad_()
    grouped.weight2 = slot
    assert [name for name, _ in grouped.named_parameters()] == ["weight0", "weight1"]
    assert "weight2" not in grouped.state_dict()
    weights = [grouped.weight0, grouped.weight1, slot]
    results = []
    for compute in (
        lambda given: grouped(given, counts),
        lambda given: torch.cat([part @ w.t() for part, w in zip(given.split(counts), weights, strict=True)]),
    ):
        given = torch.from_numpy(rows).requires_grad_()
        out = compute(given)
        found = torch.autograd.grad(out, [given, *weights], torch.from_numpy(gradient))
        results += [part.detach().numpy() for part in (out, *found)]
    return results


@pytest.mark.parametrize("counts", [[5, 4, 3], [8, 4, 0], [0, 0, 12]])
def test_a_grouped_linear_runs_home_experts_and_slots_as_one(engine, counts):
    random = np.random.default_rng(0)
    rows, gradient = (random.normal(size=(12, width)).astype(np.float32) for width in (32, 48))
    (results,) = engine.run(1, _with_a_slot, rows, counts, gradient)
    for theirs, expected in zip(results[:5], results[5:], strict=True):
        np.testing.assert_allclose(theirs, expected, rtol=1e-5, atol=1e-6)
