"""Replicas of experts in a model of Transformer Engine's layers, and its grouped linear with replicas in slots."""

import json

import numpy as np
import pytest

from tests.support.transformer_engine.model import EXPERTS, assert_close, cases

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
