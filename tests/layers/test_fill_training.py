"""Training with deferred weight gradients equals training without, bit for bit, in every schedule and layout."""

from functools import cache
from typing import NamedTuple

import pytest

from tests.support.leave_out import leave_out
from tests.support.moving import Plans, move_at
from tests.support.sampled import sampled
from tests.support.settings import scheme_flags, settings
from tests.support.training import EXACT, MOCK_DATA, MODEL, MOE, Run, assert_same, join, train_rank

PP2 = "--pipeline-model-parallel-size 2"
PP4 = "--pipeline-model-parallel-size 4"
VPP = "--num-virtual-stages-per-pipeline-rank 2"
SHARDED = "--use-distributed-optimizer"
OVERLAPS = f"{SHARDED} --overlap-grad-reduce --overlap-param-gather --ddp-bucket-size 2000"
TP2 = "--tensor-model-parallel-size 2 --make-vocab-size-divisible-by 64"
RECOMPUTE = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
EP2 = f"{' '.join(MOE)} --expert-model-parallel-size 2 --moe-token-dispatcher-type alltoall"
BASE = [*MODEL, *MOCK_DATA, *EXACT, *"--init-method-std 0.1 --train-iters 3 --global-batch-size 8".split()]
FILL = "--fill-with-weight-gradients"
PRUNED = scheme_flags(prune_sparsity=0.5, prune_start=0, prune_end=1, prune_interval=1)
FROZEN = "--freeze-layers 2 --freeze-layers-start 1 --untie-embeddings-and-output-weights"

# Whether stages have two chunks -> layers of each from an iteration on.
MOVES: dict[bool, Plans] = {True: {1: ((1, 3), (3, 1)), 2: ((2, 2), (1, 3))}, False: {1: ((1,), (3,))}}

# ranks, flags
CASES = {
    "PP 4": (4, PP4),
    "PP 2, DP 2, both overlaps, many buckets": (4, f"{PP2} {OVERLAPS}"),
    "PP 2, DP 2, gradient overlap, many buckets": (4, f"{PP2} --overlap-grad-reduce --ddp-bucket-size 2000"),
    "PP 2, VPP 2, DP 2, both overlaps, many buckets": (4, f"{PP2} {VPP} {OVERLAPS} --num-layers 8"),
    "PP 4, VPP 2, one layer a chunk": (4, f"{PP4} {VPP} --num-layers 8"),
    "PP 2, TP 2, sequence parallel, biases": (4, f"{PP2} {TP2} --sequence-parallel"),
    "PP 2, TP 2": (4, f"{PP2} {TP2}"),
    "PP 2, EP 2, both overlaps": (4, f"{PP2} {EP2} {OVERLAPS}"),
    "PP 2, recomputed": (2, f"{PP2} {RECOMPUTE}"),
    "PP 2, recomputed, layers that move": (2, f"{PP2} {RECOMPUTE} --balance-layers"),
    "PP 2, multi-token prediction": (
        2,
        f"{PP2} --mtp-num-layers 1 --pipeline-model-parallel-layout Et|tttmL --untie-embeddings-and-output-weights",
    ),
    "PP 2, VPP 2, DP 2, layers that move, both overlaps": (
        4,
        f"{PP2} {VPP} {OVERLAPS} --num-layers 8 --balance-layers",
    ),
    "PP 2, EP 2, replicas, both overlaps": (4, f"{PP2} {EP2} {OVERLAPS} --balance-experts"),
    "PP 2, VPP 2, EP 2, replicas in shared slots": (
        4,
        f"{PP2} {VPP} --num-layers 8 {EP2} --balance-experts {settings('experts', replica_mode='shared')}",
    ),
    "PP 2, validation between": (2, f"{PP2} --eval-interval 1 --eval-iters 1"),
    "PP 2, the first stage frozen": (2, f"{PP2} {FROZEN}"),
    "PP 2, pruned": (2, f"{PP2} {PRUNED}"),
    "PP 2, VPP 2, the first chunk frozen": (2, f"{PP2} {VPP} --num-layers 8 {FROZEN}"),
}
DEFAULT = (
    "PP 2, the first stage frozen",
    "PP 2, VPP 2, DP 2, both overlaps, many buckets",
    "PP 2, TP 2, sequence parallel, biases",
    "PP 2, EP 2, replicas, both overlaps",
    "PP 2, recomputed, layers that move",
)


class Counted(NamedTuple):
    """What one rank computed later.

    pieces: of weight gradients, at each moment.
    replicas: for each backward pass through replicas, whether their gradients were added up with a piece.
    """

    pieces: list[int]
    replicas: list[bool]


def _rank(argv: list[str]) -> tuple[Run, Counted]:
    """The run of one rank, and what it computed later."""
    from balancing.experts.engine.slots import ReplicaSlots
    from megatron.balanced.fill.weight_gradients import WeightGradients

    told, within = Counted([], []), []
    compute, accumulate = WeightGradients.compute, ReplicaSlots.accumulate_gradients

    def counted(self: WeightGradients, pieces: int) -> None:
        told.pieces.append(min(pieces, len(self._deferred)))
        within.append(pieces)
        compute(self, pieces)
        within.clear()

    def accumulated(self: ReplicaSlots, number: int) -> None:
        told.replicas.append(bool(within))
        accumulate(self, number)

    WeightGradients.compute = counted
    ReplicaSlots.accumulate_gradients = accumulated
    if "--balance-layers" in argv:
        move_at(MOVES[VPP.split()[0] in argv])
    leave_out([1])
    return train_rank(argv, True), told


@cache
def _run(pool, world_size: int, flags: str) -> tuple[Run, list[Counted]]:
    ranks = pool.run(world_size, _rank, [*BASE, *flags.split()])
    return join([run for run, _ in ranks]), [told for _, told in ranks]


@pytest.mark.parametrize("case", sampled(CASES, *DEFAULT))
def test_no_number_changes(pool, case):
    world_size, flags = CASES[case]
    run, told = _run(pool, world_size, f"{flags} {FILL}")
    assert_same(run, _run(pool, world_size, flags)[0])
    if "--balance-experts" in flags:
        added = [later for rank in told for later in rank.replicas]
        assert len(added) > 10, "hardly anything was replicated"
        # Slots that layers share have memory for the gradients of one micro-batch.
        assert set(added) == {"shared" not in flags}
    if "--balance-layers" in flags:  # and the pieces of a rank
        for rank in told:
            behind = rank.pieces[2 * len(rank.pieces) // 3 :]
            assert sum(1 for number in behind if number) > 3, "after a move all were left to the end of the step"
        return
    stages = 4 if PP4 in flags else 2
    layers = 8 if "--num-layers 8" in flags else 4
    # Three iterations of eight micro-batches, shared by the data-parallel replicas.
    replicas = world_size // stages // (2 if TP2 in flags else 1)
    for rank in range(world_size):
        if "--mtp-num-layers" not in flags and FROZEN not in flags:
            assert sum(told[rank].pieces) == 3 * 8 // replicas * layers // stages
        least = 1 if FROZEN in flags else 3  # the first iteration's
        assert sum(1 for number in told[rank].pieces if number) > least, "all were left to the end of the step"
