"""Counters that 16-bit runs keep: tokens of experts, micro-batches of a step, and what follows from them."""

import functools
import inspect
from typing import Any

import numpy as np
import pytest

from benchmarks.replaced import replace_name
from tests.support.moving import Plans, move_at
from tests.support.sampled import sampled
from tests.support.training import MOCK_DATA, MODEL, MOE, RankRun, join, train_rank

# 3,072 tokens a step: some 1,500 for each expert, in micro-batches of some 60.
STEP = (
    f"{' '.join(MOE)} --seq-length 128 --max-position-embeddings 128 --global-batch-size 24 --train-iters 3 "
    "--moe-router-score-function sigmoid --moe-router-enable-expert-bias --moe-token-dispatcher-type alltoall "
    "--moe-router-load-balancing-type global_aux_loss --moe-aux-loss-coeff 1e-2 --init-method-std 0.1 "
    "--attention-dropout 0 --hidden-dropout 0 --ckpt-format torch_dist"
)
PP2 = "--pipeline-model-parallel-size 2 --balance-layers"
PRECISIONS = {"bf16": "--bf16", "fp16": "--fp16 --initial-loss-scale 1024"}
MOVES: Plans = {1: ((3,), (1,))}


def _counted_rank(argv: list[str], plans: Plans) -> tuple[RankRun, list[dict[int, Any]]]:
    """Train, and note for each step, for each layer, what Megatron-LM's counters say, what this test counts from
    routing, the same over all ranks, and expert bias before and after. Numbers are the tokens of each expert for the
    bias; the same for the global aux loss, which has a top-k without bias; and passes."""
    import importlib

    from megatron.core.transformer.moe.router import TopKRouter

    # A function of the package has the module's name.
    finalize = importlib.import_module("megatron.core.distributed.finalize_model_grads")
    counts: dict[Any, list[Any]] = {}
    steps: list[dict[int, Any]] = []
    update = finalize._update_router_expert_bias

    def counting(number: int, name: str, at: str) -> None:
        method = getattr(TopKRouter, name)

        @functools.wraps(method)
        def counted(self: Any, *args: Any, **kwargs: Any) -> Any:
            bound = inspect.signature(method).bind(self, *args, **kwargs).arguments
            of_router = counts.setdefault(self, [0, 0, 0])
            of_router[number] = of_router[number] + bound[at].sum(0).long()
            of_router[2] += number
            return method(self, *args, **kwargs)

        replace_name(TopKRouter, name, counted)

    def updated(model: Any, *args: Any, **kwargs: Any) -> None:
        import torch
        import torch.distributed as dist
        from megatron.core import mpu

        before = {router: router.expert_bias.tolist() for router in counts}
        update(model, *args, **kwargs)
        step = {}
        for router, (for_bias, for_loss, passes) in counts.items():
            summed = torch.stack([for_bias, for_loss])
            dist.all_reduce(summed, group=mpu.get_tensor_and_data_parallel_group(with_context_parallel=True))
            told = router.local_tokens_per_expert, router.global_tokens_per_expert, router.ga_steps
            step[router.layer_number] = (
                [counter.tolist() for counter in told],
                [for_bias.tolist(), summed[1].tolist(), passes],
                summed[0].numpy(),
                (before[router], router.expert_bias.numpy().copy()),
            )
        steps.append(step)
        counts.clear()

    counting(0, "_apply_expert_bias", "routing_map")
    counting(1, "_apply_global_aux_loss", "routing_map")
    finalize._update_router_expert_bias = updated
    if plans:
        move_at(plans)
    return train_rank(argv, True), steps


@pytest.mark.parametrize("precision", sampled(PRECISIONS, "bf16"))
def test_tokens_of_experts_are_counted_exactly(pool, tmp_path, precision):
    """Also by layers that have moved, and from a checkpoint."""
    base = [*MODEL, *MOCK_DATA, *f"{STEP} {PRECISIONS[precision]}".split()]
    moving = [*base, *f"{PP2} --save {tmp_path} --save-interval 2".split()]
    found = pool.run(4, _counted_rank, moving, MOVES)
    signs = 0
    for _, steps in found:
        for step in steps:
            for told, counted, tokens, (before, after) in step.values():
                assert min(counted[0]) > 256 and counted[2] == 12, "the test needs numbers that 16 bits do not have"
                assert told == counted
                expected = before + 1e-3 * np.sign(tokens.sum() - len(tokens) * tokens)
                np.testing.assert_allclose(after, expected, atol=1e-7)
                signs += np.count_nonzero(after - before)
    assert signs
    whole = join([run for run, _ in found])
    again = pool.run(4, _counted_rank, [*moving, "--load", str(tmp_path), "--ckpt-step", "2"], {})
    resumed = join([run for run, _ in again])
    assert resumed.losses == whole.losses[2:]
    biases = [name for name in whole.parameters if name.endswith("expert_bias")]
    assert biases
    for name in biases:
        assert np.array_equal(resumed.parameters[name], whole.parameters[name]), name
