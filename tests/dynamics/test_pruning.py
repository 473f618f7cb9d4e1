"""Pruning: the schedule, the global threshold, exact masks, and sparse products."""

import functools
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch

from examples.dynamic_models.schemes import (
    SparsePattern,
    cubic_sparsity,
    global_threshold,
    is_pruning_iteration,
    sparse_linear,
)
from tests.support.events import events_in
from tests.support.program import parse
from tests.support.sampled import sampled
from tests.support.settings import scheme_flags
from tests.support.training import EXACT, MODEL, MOE, RankRun, assert_same, join, watch

SCHEDULE = {"start": 2, "end": 8, "interval": 2}


def test_schedule_is_the_cubic_of_zhu_and_gupta():
    sparsity = [cubic_sparsity(i, final=0.9, **SCHEDULE) for i in range(10)]
    third, two = 0.9 * (1 - (2 / 3) ** 3), 0.9 * (1 - (1 / 3) ** 3)
    assert sparsity == pytest.approx([0, 0, 0, 0, third, third, two, two, 0.9, 0.9])
    assert [i for i in range(12) if is_pruning_iteration(i, **SCHEDULE)] == [2, 4, 6, 8]
    assert [i for i in range(12) if is_pruning_iteration(i, start=2, end=7, interval=3)] == [2, 5, 7]
    assert cubic_sparsity(3, final=0.5, start=3, end=3, interval=1) == 0.5


def _next(sums: Iterator[torch.Tensor], counts: torch.Tensor) -> torch.Tensor:
    return next(sums)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_threshold_is_that_of_all_ranks_together(dtype):
    """Against sorting; what another rank counts comes through `add_up`."""
    torch.manual_seed(0)
    mine = [torch.randn(30, 20, dtype=dtype), torch.zeros(5)]
    theirs = [10 * torch.randn(400, dtype=dtype)]
    every = torch.cat([w.abs().float().flatten() for w in mine + theirs]).sort().values
    for count in (0, 1, 5, 6, 300, 1004, 1005):
        sums: list[torch.Tensor] = []

        def keep(counts: torch.Tensor, sums: list = sums) -> torch.Tensor:
            sums.append(counts)
            return counts

        together = global_threshold(lambda: mine + theirs, count, keep)
        alone = global_threshold(lambda: mine, count, partial(_next, iter(sums)))
        assert alone == together == (every[count - 1] if count else -1)


def test_sparse_linear_is_the_dense_one():
    torch.manual_seed(0)
    mask = torch.rand(7, 5) < 0.4
    mask[3] = False  # an output without a weight
    pattern = SparsePattern(mask)
    assert pattern.density == mask.double().mean()
    hidden = torch.randn(3, 2, 5, dtype=torch.float64, requires_grad=True)
    weight = (torch.randn(7, 5, dtype=torch.float64) * mask).requires_grad_()
    free = torch.randn(7, 5, dtype=torch.float64, requires_grad=True)
    torch.testing.assert_close(sparse_linear(hidden, weight, pattern), hidden @ weight.T, rtol=1e-14, atol=1e-14)
    assert torch.autograd.gradcheck(lambda h, w: sparse_linear(h, w * mask, pattern), (hidden, free))


def _rank(argv: list[str]) -> tuple[RankRun, dict[int, tuple[int, int, int]], int]:
    """Train. Also gives, for each iteration, how many weights there are and how many are zero, those of replicas on one
    rank only, and how many of those that were zero before are not any more; and how many modules multiply sparse at the
    end."""
    args, config, start = parse(argv)

    from megatron.core import mpu
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
    from megatron.core.utils import unwrap_model
    from megatron.training import training

    finish = watch(True)
    step, counts = training.train_step, {}
    zero: dict[str, torch.Tensor] = {}
    sparse = [0]

    @functools.wraps(step)
    def train_step(*args, **kwargs):
        result = step(*args, **kwargs)
        left, gone, back = 0, 0, 0
        sparse[0] = 0
        for at, chunk in enumerate(unwrap_model(args[2])):
            for name, module in chunk.decoder.layers.named_modules():
                if isinstance(module, ColumnParallelLinear | RowParallelLinear):
                    key, now = f"{at}.{name}", module.weight == 0
                    back += int((zero.get(key, now) & ~now).sum())
                    zero[key] = now.clone()
                    if mpu.get_data_parallel_rank() == 0 or not getattr(module.weight, "allreduce", True):
                        left, gone = left + now.numel(), gone + int(now.sum())
                    sparse[0] += "_forward_impl" in vars(module)
        counts[kwargs["iteration"]] = (left, gone, back)
        return result

    training.train_step = train_step
    start(args, config)
    return finish(), counts, sparse[0]


PRUNE = f"{scheme_flags(prune_sparsity=0.8, prune_start=1, prune_end=4, prune_interval=1)} --train-iters 7"
# ranks, flags
LAYOUTS = {
    "PP 2": (2, f"{' '.join(EXACT)} --pipeline-model-parallel-size 2 {scheme_flags(prune_sparse_density=0.6)}"),
    "EP 2, sharded, bf16": (
        2,
        f"--bf16 {' '.join(MOE)} --expert-model-parallel-size 2 --moe-token-dispatcher-type alltoall "
        f"--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather "
        f"{scheme_flags(prune_sparse_density=0.6)}",
    ),
}


@pytest.mark.parametrize("name", sampled(["PP 2", "EP 2, sharded, bf16"], "PP 2"))
def test_masks_are_exact_through_training_and_resume(pool, corpus, tmp_path, name):
    world_size, flags = LAYOUTS[name]
    base = [*MODEL, *corpus, *f"{PRUNE} {flags} --ckpt-format torch_dist".split()]
    report = tmp_path / "report"

    def run(more: str):
        results = pool.run(world_size, _rank, [*base, *more.split()])
        counts = {i: np.array([c[i] for _, c, _ in results]) for i in results[0][1]}
        return join([rank for rank, _, _ in results]), counts, sum(sparse for _, _, sparse in results)

    whole, counts, sparse = run(f"--save {tmp_path} --save-interval 3 --balance-report {report}")
    for iteration, counted in counts.items():
        wanted = cubic_sparsity(iteration, final=0.8, start=1, end=4, interval=1)
        # Few values lie close together in bfloat16, and weights of one magnitude go together.
        slack = 0.005 * counted[:, 0].sum() if "bf16" in name else 2
        assert counted[:, 1].sum() == pytest.approx(wanted * counted[:, 0].sum(), abs=slack)
    assert sum(counted[:, 2].sum() for counted in counts.values()) == 0, "a pruned weight moved"
    assert sparse == (0 if "bf16" in name else 16), "4 layers with 4 matrices; there are no sparse products in bfloat16"
    events = events_in(report)
    densities = [event["density"] for event in events if event.get("scheme") == "pruning"]
    assert np.mean(densities[-1]) == pytest.approx(0.2, abs=0.01)
    assert np.ptp(densities[-1]) > 0, "one threshold for all layers leaves them uneven"
    resumed, later, _ = run(f"--load {tmp_path} --ckpt-step 3")
    assert all(np.array_equal(later[i], counts[i]) for i in range(4, 7))
    assert resumed.losses == whole.losses[3:]
    assert_same(replace(resumed, losses=whole.losses, grad_norms=whole.grad_norms), whole)
    assert whole.losses[-1] < whole.losses[0]
    if sparse:  # sparse products change no number
        dense, _, none = run(scheme_flags(prune_sparse_density=0))
        assert none == 0
        np.testing.assert_allclose(dense.losses, whole.losses, rtol=1e-12)
