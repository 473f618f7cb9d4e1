"""Weight gradients that Transformer Engine's layers leave for waits (`--fill-with-weight-gradients`): the same numbers,
bit for bit, as in the backward passes."""

import pytest

from tests.support.events import events_in
from tests.support.leave_out import leave_out
from tests.support.moving import Plans, move_at
from tests.support.sampled import sampled
from tests.support.settings import settings
from tests.support.training import MOCK_DATA, MODEL, Run, assert_same, join, train_rank
from tests.support.transformer_engine.model import EXPERTS, SINGLE, TE

BASE = [
    *MODEL,
    *MOCK_DATA,
    *f"{TE} {SINGLE} --init-method-std 0.1 --train-iters 4 --global-batch-size 8 "
    "--make-vocab-size-divisible-by 64".split(),
]
FILL = "--fill-with-weight-gradients"
PP2 = "--pipeline-model-parallel-size 2"
MTP = "--mtp-num-layers 1 --pipeline-model-parallel-layout Et|tttmL --untie-embeddings-and-output-weights"
VPP = "--num-virtual-stages-per-pipeline-rank 2 --num-layers 8"
OVERLAPS = "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather --ddp-bucket-size 2000"
EP2 = f"{EXPERTS} --expert-model-parallel-size 2 --moe-token-dispatcher-type alltoall"
MOVES: Plans = {1: ((1, 3), (3, 1)), 2: ((2, 2), (1, 3))}

# ranks, flags
CASES = {
    "PP 2, DP 2, both overlaps, many buckets": (4, f"{PP2} {OVERLAPS}"),
    "PP 2, VPP 2, DP 2, both overlaps, layers that move": (4, f"{PP2} {VPP} {OVERLAPS} --balance-layers"),
    "PP 2, TP 2, sequence parallel": (4, f"{PP2} --tensor-model-parallel-size 2 --sequence-parallel"),
    "PP 2, gradients not fused": (2, f"{PP2} --no-gradient-accumulation-fusion"),
    "PP 2, EP 2, grouped, both overlaps": (4, f"{PP2} {EP2} --moe-grouped-gemm {OVERLAPS}"),
    "PP 2, EP 2, grouped, replicas, both overlaps": (4, f"{PP2} {EP2} --moe-grouped-gemm {OVERLAPS} --balance-experts"),
    "PP 2, EP 2, sequential, replicas in shared slots": (
        4,
        f"{PP2} {EP2} --balance-experts {settings('experts', replica_mode='shared')}",
    ),
    "PP 2, the first stage frozen": (
        2,
        f"{PP2} --freeze-layers 2 --freeze-layers-start 2 --untie-embeddings-and-output-weights",
    ),
    "PP 2, multi-token prediction": (2, f"{PP2} {MTP}"),
    "PP 2, EP 2, grouped, replicas, multi-token prediction, both overlaps": (
        4,
        f"{PP2} {EP2} {MTP} --moe-grouped-gemm {OVERLAPS} --balance-experts {settings('experts', min_gain=0)}",
    ),
    "PP 2, EP 2, sequential, replicas, multi-token prediction, both overlaps": (
        4,
        f"{PP2} {EP2} {MTP} {OVERLAPS} --balance-experts {settings('experts', min_gain=0)}",
    ),
    "PP 2, EP 2, grouped, replicas in shared slots": (
        4,
        f"{PP2} {EP2} --moe-grouped-gemm {OVERLAPS} "
        f"--balance-experts {settings('experts', min_gain=0, replica_mode='shared')}",
    ),
}
DEFAULT = (
    "PP 2, VPP 2, DP 2, both overlaps, layers that move",
    "PP 2, EP 2, grouped, replicas, multi-token prediction, both overlaps",
)


def _rank(argv: list[str]) -> tuple[Run, int]:
    """The run of one rank, and the pieces that it computed before the end of a step."""
    from megatron.balanced.fill.weight_gradients import WeightGradients

    early = 0
    compute = WeightGradients.compute

    def counted(self: WeightGradients, pieces: int) -> None:
        nonlocal early
        early += min(pieces, len(self._deferred))
        compute(self, pieces)

    WeightGradients.compute = counted
    if "--balance-layers" in argv:
        move_at(MOVES)
    leave_out([2])
    return train_rank(argv, True), early


@pytest.mark.parametrize("case", sampled(CASES, *DEFAULT))
def test_no_number_changes(engine, tmp_path, case):
    world_size, flags = CASES[case]
    argv = [*BASE, *flags.split(), "--balance-report", str(tmp_path)]
    plain = join([run for run, _ in engine.run(world_size, _rank, argv)])
    ranks = engine.run(world_size, _rank, [*argv[:-2], FILL])
    assert_same(join([run for run, _ in ranks]), plain)
    assert all(early > 4 for _, early in ranks), "nothing was left for later"
    if "--balance-experts" in flags:
        events = events_in(tmp_path)
        assert any(event["action"] == "replicate" for event in events), "nothing was replicated"
