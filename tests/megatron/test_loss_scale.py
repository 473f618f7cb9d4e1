"""All parts of an optimizer in fp16 have the loss scale that one optimizer would have, whichever part overflows."""

from typing import Any

import pytest

from tests.support.moving import Plans, move_at
from tests.support.sampled import sampled
from tests.support.training import MOCK_DATA, MODEL, MOE, train, train_rank

EP = "--expert-model-parallel-size 2 --moe-token-dispatcher-type alltoall"
PP = "--pipeline-model-parallel-size 2"
SHARDS = "--use-distributed-optimizer --overlap-grad-reduce --ddp-bucket-size 4096"
BASE = [*MODEL, *MOCK_DATA, *MOE, *"--fp16 --attention-dropout 0 --hidden-dropout 0".split()]
# Ranks and flags. The first stage of some has no experts, and must learn of their overflows.
LAYOUTS: dict[str, tuple[int, str]] = {
    "EP 2": (2, EP),
    "EP 2, several buckets": (2, f"{EP} {SHARDS}"),
    "EP 2, DP 2": (4, f"{EP} {SHARDS}"),
    "EP 2, PP 2, dense layers first": (4, f"{EP} {PP} --moe-layer-freq [0]*2+[1]*2"),
    "EP 2, PP 2, layers that move": (4, f"{EP} {PP} --moe-layer-freq [0]*2+[1]*2 --balance-layers"),
    "EP 2, replicas": (2, f"{EP} --balance-experts"),
    "PP 2, an optimizer for the first chunk": (
        2,
        f"{PP} --num-virtual-stages-per-pipeline-rank 2 {SHARDS} --overlap-param-gather "
        "--overlap-param-gather-with-optimizer-step --ckpt-format torch",
    ),
}
MOVE: Plans = {4: ((3,), (1,))}
# What overflows in each step.
OVERFLOWS = ["", "experts", "", "", "others", "both", "", "", "", "experts", ""]


def _scales(argv: list[str], plans: Plans) -> tuple[list[list[dict[str, float]]], list[dict[str, float]], list[Any]]:
    """Train with gradients that overflow. Returns the states of all scalers of this rank after each step, what a single
    one would be, and the norms of gradients."""
    import torch
    from megatron.core.optimizer.grad_scaler import DynamicGradScaler

    from megatron.balanced.shared.callbacks import StepCallback

    found: list[list[dict[str, float]]] = []

    class Overflow(StepCallback):
        def attach(self, chunks: list[Any]) -> None:
            self.chunks = chunks

        def end_schedule(self) -> None:
            """Of experts on the rank that has the last ones, as gradients of experts differ by rank. Of several chunks
            the first one stands for experts."""
            what, last = OVERFLOWS[len(found)], torch.distributed.get_rank() == torch.distributed.get_world_size() - 1
            kinds: dict[bool, list[torch.nn.Parameter]] = {True: [], False: []}
            for number, chunk in enumerate(self.chunks):
                for parameter in chunk.parameters():
                    of_first = len(self.chunks) > 1 and not number
                    kinds[getattr(parameter, "allreduce", True) and not of_first].append(parameter)
            if what in ("others", "both"):
                kinds[True][-1].main_grad.view(-1)[:].fill_(torch.inf)
            if what in ("experts", "both") and kinds[False] and (last or torch.distributed.get_world_size() > 2):
                kinds[False][0].main_grad.fill_(torch.inf)

        def end_step(self) -> None:
            parts = self.run.optimizer.chained_optimizers
            assert len(parts) == 2
            found.append([{k: float(v) for k, v in part.grad_scaler.state_dict().items()} for part in parts])

    if plans:
        move_at(plans)
    norms = train_rank(argv, False, callbacks=[Overflow()]).grad_norms
    alone, expected = DynamicGradScaler(1024.0, 1.0, 2.0, 0.5, 3, 2), []
    for what in OVERFLOWS:
        alone.update(bool(what))
        expected.append({name: float(value) for name, value in alone.state_dict().items()})
    return found, expected, norms


@pytest.mark.parametrize(
    "layout",
    sampled(LAYOUTS, "EP 2, several buckets", "EP 2, PP 2, layers that move", "PP 2, an optimizer for the first chunk"),
)
def test_every_part_has_the_scale_of_one(pool, layout):
    ranks, flags = LAYOUTS[layout]
    argv = [*BASE, *f"--train-iters {len(OVERFLOWS)} --initial-loss-scale 1024 --loss-scale-window 3 {flags}".split()]
    for found, expected, _ in pool.run(ranks, _scales, argv, MOVE if "move" in layout else {}):
        assert len({state["scale"] for state in expected}) > 2
        for step, (parts, alone) in enumerate(zip(found, expected, strict=True)):
            assert parts == [alone] * len(parts), f"step {step}"


def test_gradients_are_divided_by_the_scale_that_the_loss_had(pool):
    """After overflows of one part they are those of a run without: fp16 rounds, but by no factor of two."""
    flags = f"{EP} --train-iters {len(OVERFLOWS)} --initial-loss-scale 1024 --hysteresis 1 --lr 1e-9"
    whole = train(pool, 2, flags, base=BASE).grad_norms
    for _, _, norms in pool.run(2, _scales, [*BASE, *flags.split()], {}):
        assert [not norm for norm in norms] == [bool(what) for what in OVERFLOWS]
        assert norms == [
            pytest.approx(norm, rel=1e-3) if kept else kept for kept, norm in zip(norms, whole, strict=True)
        ]


def _in_a_loop(balanced: bool) -> list[list[float]]:
    """A loop of megatron.core whose experts overflow in the first of three steps. Returns the scales after each."""
    import torch

    from tests.support.small_moe import build, call, forward_steps

    model = build(torch.float16, overlap=False, fp16=True)
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.pipeline_parallel.schedules import get_forward_backward_func

    from megatron.balanced.loop import Balancers, ExpertBalancer

    model.config.grad_scale_func = None
    run = get_forward_backward_func()
    if balanced:
        run = Balancers(ExpertBalancer([model])).schedule(run)
    fields = {"initial_loss_scale": 64.0, "min_loss_scale": 1.0, "hysteresis": 1, "lr": 1e-4}
    optimizer = get_megatron_optimizer(OptimizerConfig(fp16=True, params_dtype=torch.float16, **fields), [model])
    model.config.grad_scale_func, forward_step, scales = optimizer.scale_loss, forward_steps(), []
    for step in range(3):
        model.zero_grad_buffer()
        optimizer.zero_grad()
        call(run, model, forward_step, 2)
        if not step:
            next(each for each in model.parameters() if not getattr(each, "allreduce", True)).main_grad.fill_(torch.inf)
        optimizer.step()
        scales.append([float(part.get_loss_scale()) for part in optimizer.chained_optimizers])
    return scales


def test_the_optimizer_of_a_loop(pool):
    assert pool.run(2, _in_a_loop, True) == [[[32.0, 32.0]] * 3] * 2
    assert pool.run(2, _in_a_loop, False) == [[[64.0, 32.0]] * 3] * 2, "Megatron-LM has mended it"
