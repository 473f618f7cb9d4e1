"""Replicas of experts in a model of Transformer Engine's layers, and its grouped linear with replicas in slots."""

import json

import numpy as np
import pytest

from tests.support.checkers.checked_runs import noted_rank
from tests.support.checkers.collective_order import replay
from tests.support.training import MOCK_DATA, MODEL
from tests.support.transformer_engine.model import EXPERTS, SINGLE, TE, assert_close, cases

EP2 = "--expert-model-parallel-size 2"
EIGHT = EXPERTS.replace("--num-experts 4", "--num-experts 8")
OVERLAPS = "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather --ddp-bucket-size 2000"
# ranks, flags
CASES = {
    "linear layers, slots shared": (2, f"{EP2} --expert-replica-mode shared"),
    "grouped": (2, f"{EP2} --moe-grouped-gemm"),
    "grouped, PP 2, overlap": (4, f"{EP2} --pipeline-model-parallel-size 2 --moe-grouped-gemm {OVERLAPS}"),
}


@pytest.mark.parametrize("case", cases(CASES, "grouped"))
def test_replicas_beside_transformer_engine_change_no_number(model_of, tmp_path, case):
    ranks, flags = CASES[case]
    model = model_of(EIGHT)
    run = model.train(
        ranks, f"{flags} --balance-experts --expert-min-gain 0 --train-iters 6 --balance-report {tmp_path}"
    )
    lines = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    assert sum(line["action"] == "replicate" for line in lines) > 10, "hardly anything was replicated"
    # Transformer Engine's own grouped linear layers run the experts of the reference.
    assert_close(run, model.alone("--moe-grouped-gemm --train-iters 6"), 1e-5, 1e-4)


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


@pytest.mark.parametrize("case", cases(DELAYED_CASES, "linear layers", "interleaved"))
def test_gradients_of_replicas_are_sent_after_delayed_ones(model_of, tmp_path, case):
    """Weight gradients come after those of inputs, in a part of the schedule of their own."""
    ranks, flags = DELAYED_CASES[case]
    shared = "--moe-shared-expert-intermediate-size 32"
    model = model_of(f"{EIGHT} --global-batch-size 8 {shared if shared in flags else ''}")
    run = model.train(ranks, f"{flags} {DELAYED} --balance-experts --expert-min-gain 0 --balance-report {tmp_path}")
    lines = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    assert sum(line["action"] == "replicate" for line in lines) > 5, "hardly anything was replicated"
    assert_close(run, model.alone("--moe-grouped-gemm"), 1e-5, 1e-4)


@pytest.mark.exhaustive
def test_delayed_gradients_are_sent_in_order(engine):
    flags = f"{TE} {SINGLE} {EXPERTS} {EP2} --moe-grouped-gemm {OVERLAPS} {DELAYED} --balance-experts"
    argv = [*MODEL, *MOCK_DATA, *f"{flags} --init-method-std 0.1 --global-batch-size 8 --train-iters 3".split()]
    ranks = engine.run(4, noted_rank, argv, {}, 0)
    assert replay([rank.operations for rank in ranks]) is None
    assert not {race for rank in ranks for race in rank.races}


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
