"""One engine each at work on a few ranks, without a model, as small as it shows every wait that the engine needs.

Each job is the body of one rank. It returns what it computed, which a fault that gloo forgives does not change.
"""

import datetime
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from tests.support.patience import PATIENCE
from tests.support.settings import scheme_flags

__all__ = ["RANKS", "attention", "buckets", "exits", "layers", "release", "slots"]

RANKS = {"slots": 3, "attention": 3, "layers": 3, "buckets": 2, "exits": 2, "release": 2}


def slots(shared: bool) -> list[np.ndarray]:
    """Two experts of the first rank have replicas on both others, in three layers, for two iterations."""
    from balancing.experts.engine.slots import HomeExperts, ReplicaSlots
    from balancing.experts.placement import ReplicaPlacement

    dist.init_process_group("gloo")
    dist.all_reduce(torch.zeros(1))
    rank = dist.get_rank()
    homes = [[[torch.full((6,), 1.0 + n + 2 * rank + layer)] for n in range(2)] for layer in range(3)]
    sums = {id(weight): torch.zeros(6) for layer in homes for expert in layer for weight in expert}
    placement = ReplicaPlacement(np.repeat(np.arange(3), 2), [[-1, -1], [0, 1], [0, 1]])
    held = ReplicaSlots(
        HomeExperts(homes, gradient=lambda weight: sums[id(weight)]),
        2,
        dist.group.WORLD,
        shared=shared,
    )
    outputs = []
    for _ in range(2):
        held.begin_step([placement] * 3, 1)
        for layer in range(3):
            held.acquire(layer, forward=True)
            held.advance()
            outputs += [(leaf * leaf).sum() for leaves in held.leaves(layer) for leaf in leaves]
        for layer in reversed(range(3)):
            held.acquire(layer, forward=False)
            for leaves in held.leaves(layer):
                for leaf in leaves:
                    leaf.grad = 2 * leaf.detach()
            held.accumulate_gradients(layer)
            held.advance()
            held.end_pass(layer)
        held.end_step()
        for layer in homes:
            for (weight,) in layer:
                weight.sub_(sums[id(weight)], alpha=0.1)
                sums[id(weight)].zero_()
    return [torch.stack(outputs).detach().numpy(), *(w.numpy() for layer in homes for (w,) in layer)]


def attention(exchange: str, linear: str, per_node: int = 0) -> list[np.ndarray]:
    """A layer of attention, forward and backward. exchange, linear: as `random_plan` takes them. per_node: ranks of a
    node, of which the last one may have fewer; 0 for all."""
    from balancing.sequences.engine import gather
    from balancing.sequences.engine.attention import SequenceAttention
    from balancing.sequences.engine.compiler import compile_rank
    from tests.support.sequence_plans import in_many_turns, made_for, nodes_of, random_plan, zigzag_plan

    gather.TILE = 8  # or short sequences would come in one turn
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    make = random_plan if linear == "equal" else zigzag_plan
    plan = make([60, 40], 3, exchange=exchange, linear=linear, **({"seed": 3} if linear == "equal" else {}))
    draw = torch.Generator().manual_seed(rank)
    shape = (int(plan.linear_tokens[rank]), 2, 4)
    qkv = [torch.randn(shape, generator=draw, dtype=torch.float64).requires_grad_() for _ in range(3)]
    plan = made_for(plan, in_many_turns(nodes_of(2 * per_node, 2)) if per_node else None)
    out = SequenceAttention(plan, program=compile_rank(plan, rank, routing="off"))(*qkv)
    gradients = torch.autograd.grad((out * out).sum(), qkv)
    return [part.detach().numpy() for part in (out, *gradients)]


def layers() -> list[np.ndarray]:
    """What the first rank has, the second takes; the third looks on."""
    from balancing.layers.transfer import Piece, plan_transfers, run_transfers
    from balancing.messages import connect

    dist.init_process_group("gloo")
    connect(dist.group.WORLD)
    group = dist.new_group(timeout=datetime.timedelta(seconds=PATIENCE))
    connect(group)
    rank = dist.get_rank()
    transfers = plan_transfers(
        [Piece(name, 0, 0, 8) for name in "ab"], [Piece(name, target, 0, 8) for name, target in (("a", 1), ("b", 1))]
    )
    have = {name: torch.arange(8.0) + ord(name) if rank == 0 else torch.zeros(8) for name in "ab"}
    run_transfers(
        [transfer for transfer in transfers if rank in (transfer.source, transfer.target)],
        lambda transfer: have[transfer.tensor][transfer.start : transfer.stop],
        lambda transfer: have[transfer.tensor][transfer.start : transfer.stop],
        group,
        datetime.timedelta(seconds=PATIENCE),
    )
    return [(have[name] * 2).numpy() for name in "ab"]


def _losses(flags: str) -> list[Any]:
    from tests.support.training import EXACT, MOCK_DATA, MODEL, train_rank

    steps = "--num-layers 2 --train-iters 2 --global-batch-size 2".split()
    run = train_rank([*MODEL, *MOCK_DATA, *steps, *EXACT, *flags.split()], False)
    return [np.array(run.losses), np.array(run.grad_norms)]


def buckets() -> list[np.ndarray]:
    """Two data-parallel ranks whose gradients are reduced under the backward pass."""
    return _losses("--overlap-grad-reduce --ddp-bucket-size 5000 --use-distributed-optimizer")


def exits() -> list[np.ndarray]:
    """Two stages, of which the first lets tokens exit."""
    exits = scheme_flags(
        early_exit_layers=[1], early_exit_threshold=0.9, early_exit_start=0, early_exit_loss_weight=0.5
    )
    return _losses(f"--pipeline-model-parallel-size 2 {exits}")


def release() -> list[np.ndarray]:
    """Two stages, of which the last leaves the job."""
    from tests.support.moving import move_at

    move_at({1: ((2,),)})
    try:
        return _losses("--pipeline-model-parallel-size 2 --balance-layers --repack-throughput-floor 0.5")
    except SystemExit as left:
        assert left.code == 0
        return []
