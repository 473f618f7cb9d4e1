"""Small training runs in which every rank notes its operations and checks its accesses.

Few iterations of few layers, in the structures that real jobs have: small buckets, groups that plan apart, both
overlaps, pipelines. Each run is made once, for all checks.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tests.support.checkers.device_log import Operation
from tests.support.settings import EARLY_EXIT, HASH_ATTENTION, PLASTICITY, scheme_flags, settings
from tests.support.training import EXACT, MOCK_DATA, MODEL, MOE, train_rank

__all__ = ["RUNS", "CheckedRun", "Noted", "checked", "noted_rank"]

_OVERLAPS = "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"
_MOE = f"{' '.join(MOE)} --expert-model-parallel-size 2 --moe-token-dispatcher-type alltoall"
_EXPERTS = f"{_MOE} --balance-experts"
_BATCHES = "--overlap-moe-expert-parallel-comm"
_DOCUMENTS = "--balance-sequences --dataloader-inter-document-masking"
_PP2, _PP4 = ("--pipeline-model-parallel-size 2", "--pipeline-model-parallel-size 4")
_UNTIED = "--untie-embeddings-and-output-weights"
_RELEASE = "--balance-layers --repack-throughput-floor 0.5"


@dataclass(frozen=True)
class CheckedRun:
    """One run. plans: layers of each chunk from an iteration on. files: where operations must have been started.
    per_node: ranks of a node, 0 for all of them. queues: CUDA_DEVICE_MAX_CONNECTIONS."""

    ranks: int
    flags: str
    plans: Mapping[int, tuple[tuple[int, ...], ...]] = field(default_factory=dict)
    files: tuple[str, ...] = ()
    per_node: int = 0
    queues: int = 1


_RELAY, _TRANSPORT, _TRANSFER = "engine/relay.py", "engine/transport.py", "layers/transfer.py"
RUNS = {
    "experts, resident slots, many buckets, both overlaps": CheckedRun(
        4, f"{_EXPERTS} {_OVERLAPS} --ddp-bucket-size 2000", files=(_RELAY,)
    ),
    "experts, shared slots, interleaved": CheckedRun(
        4,
        f"{_EXPERTS} {_OVERLAPS} {settings('experts', replica_mode='shared')} {_PP2} "
        "--num-virtual-stages-per-pipeline-rank 2",
        files=(_RELAY,),
        queues=8,
    ),
    "experts, resident slots, several queues": CheckedRun(4, f"{_EXPERTS} {_OVERLAPS}", files=(_RELAY,), queues=8),
    "experts, messages overlapped with compute": CheckedRun(
        4, f"{_EXPERTS} {_OVERLAPS} {_BATCHES} --ddp-bucket-size 2000 --global-batch-size 8", files=(_RELAY,)
    ),
    "experts, messages overlapped with compute, interleaved": CheckedRun(
        4,
        f"{_EXPERTS} {_OVERLAPS} {_BATCHES} {_PP2} --num-virtual-stages-per-pipeline-rank 2 --global-batch-size 8",
        files=(_RELAY,),
    ),
    "experts, weight gradients fill waits, interleaved": CheckedRun(
        4,
        f"{_EXPERTS} {_OVERLAPS} {_PP2} --num-virtual-stages-per-pipeline-rank 2 --ddp-bucket-size 2000 "
        "--fill-with-weight-gradients --global-batch-size 8",
        files=(_RELAY,),
    ),
    "experts, tensor-parallel": CheckedRun(
        4,
        f"{_EXPERTS} --tensor-model-parallel-size 2 --sequence-parallel "
        "--expert-tensor-parallel-size 1 --recompute-granularity full --recompute-method uniform "
        "--recompute-num-layers 1",
        files=(_RELAY,),
    ),
    "sequences, ring, routed between two nodes": CheckedRun(
        4,
        # gloo sends slices on that have not come yet, where a communicator of NCCL runs one message after the other:
        # numbers mean nothing in this run, and order and accesses do not depend on them.
        f"--context-parallel-size 4 {_DOCUMENTS} {settings('sequences', planner='ring', routing=2)} {_OVERLAPS} "
        "--train-iters 2 --no-check-for-nan-in-loss-and-grad",
        files=(_TRANSPORT,),
        per_node=2,
    ),
    "sequences, gather, pipelines": CheckedRun(
        4,
        f"--context-parallel-size 2 {_PP2} {_DOCUMENTS} {settings('sequences', planner='gather')}",
        files=(_TRANSPORT,),
    ),
    "sequences and experts, messages overlapped with compute": CheckedRun(
        4,
        f"--context-parallel-size 2 {_DOCUMENTS} {settings('sequences', planner='gather')} {_EXPERTS} "
        f"{_OVERLAPS} {_BATCHES} --global-batch-size 8",
        files=(_RELAY, _TRANSPORT),
    ),
    "layers, interleaved, many buckets": CheckedRun(
        2,
        f"{_PP2} --pipeline-model-parallel-layout Et*2|t|t|tL --num-layers 5 --balance-layers {_OVERLAPS} "
        "--ddp-bucket-size 2000",
        {1: ((1, 2), (1, 1))},
        (_TRANSFER,),
    ),
    "early exit, moved and released": CheckedRun(
        4,
        f"{_PP4} {EARLY_EXIT} {_RELEASE} --global-batch-size 8",
        {1: ((2,), (1,), (1,)), 2: ((1,), (3,))},
        (_TRANSFER, "token_skipping.py"),
    ),
    "pruning, mixture of depths, sparse attention": CheckedRun(
        2,
        f"{_PP2} {scheme_flags(prune_sparsity=0.8, prune_end=2, prune_interval=1, prune_sparse_density=0.6)} "
        f"{scheme_flags(mixture_of_depths=0.25)} {HASH_ATTENTION} --balance-layers",
        {1: ((1,), (3,))},
        (_TRANSFER,),
    ),
    "freezing by plasticity": CheckedRun(
        4,
        f"{_PP2} {_OVERLAPS} {_UNTIED} --freeze-layers 2 --freeze-layers-interval 1 {PLASTICITY} --balance-layers",
        {1: ((1,), (3,))},
        (_TRANSFER,),
    ),
    "all balancers, frozen layers, released": CheckedRun(
        4,
        f"--context-parallel-size 2 {_PP2} {_EXPERTS} {_DOCUMENTS} {_OVERLAPS} {_UNTIED} --freeze-layers 2 "
        f"--freeze-layers-start 1 {_RELEASE}",
        {1: ((3,), (1,)), 2: ((4,),)},
        (_RELAY, _TRANSPORT, _TRANSFER),
    ),
}


@dataclass
class Noted:
    """What one rank tells: its operations, the accesses that race, and how many streams balancers have made."""

    operations: list[Operation]
    races: list[str]
    streams: int = 0


def noted_rank(argv: list[str], plans: Any, per_node: int, queues: int = 1) -> Noted:
    """The body of one rank."""
    os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = str(queues)
    if per_node:
        os.environ["LOCAL_WORLD_SIZE"] = str(per_node)
    from balancing.experts.engine import relay
    from tests.support.checkers.noted_device import install
    from tests.support.checkers.stream_races import watch_streams
    from tests.support.moving import move_at
    from tests.together.test_structures import _place_at_random

    log = install()
    races = watch_streams(log)
    if "--balance-experts" in argv:
        _place_at_random()
        relay._PIECE_BYTES = 1 << 14  # small experts would be sent in one turn
    if plans:
        move_at(plans)
    try:
        train_rank(argv, False)
    except SystemExit as left:
        if left.code != 0:  # else the rank has left the job, which went on
            raise
    return Noted(log.operations, races.found, log.streams_of_engine)


_STEPS = "--train-iters 3 --global-batch-size 4 --init-method-std 0.1".split()
_runs: dict[str, list[Noted]] = {}


def checked(pool: Any, name: str) -> list[Noted]:
    """What the ranks of a run of `RUNS` tell."""
    if name not in _runs:
        run = RUNS[name]
        argv = [*MODEL, *MOCK_DATA, *_STEPS, *EXACT, *run.flags.split()]
        _runs[name] = pool.run(run.ranks, noted_rank, argv, dict(run.plans), run.per_node, run.queues)
    return _runs[name]
