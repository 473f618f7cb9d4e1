"""Short runs of all balancers, moves and releases under chaos, compared with the same runs without it.

    python -m tests.support.chaos_runs --runs 200 --json chaos.jsonl

Each run takes one of the jobs below and the next seed. It must end, lose no message, and have the losses of the job's
run without chaos to the last bit. A run that fails is told with its seed, and repeats with --job and --seed.
"""

import argparse
import faulthandler
import json
import math
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from tests.support.chaos import Pauses, dropped_messages, install
from tests.support.corpus import heavy_tailed, write_documents
from tests.support.moving import Plans, move_at
from tests.support.pool import Pool
from tests.support.training import MOCK_DATA, MODEL, watch

__all__ = ["JOBS", "Job", "Runs"]

PP = "--pipeline-model-parallel-size"
CP = "--context-parallel-size"
TP2 = "--tensor-model-parallel-size 2 --sequence-parallel --make-vocab-size-divisible-by 64"
EP2 = (
    "--swiglu --disable-bias-linear --num-experts 8 --moe-router-topk 2 --moe-ffn-hidden-size 32 "
    "--expert-model-parallel-size 2 --moe-token-dispatcher-type alltoall --moe-aux-loss-coeff 1e-2"
)
EP4 = EP2.replace("size 2 --moe-token", "size 4 --moe-token")
VPP = "--num-virtual-stages-per-pipeline-rank 2"
BUCKETS = "--ddp-bucket-size 2000"
OVERLAPS = "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"
PACKED = "--dataloader-inter-document-masking"
SEQUENCES = f"{PACKED} --eod-mask-loss --balance-sequences"
EXPERTS = "--balance-experts --expert-min-gain 0"
LAYERS = "--balance-layers"
RELEASE = f"{LAYERS} --repack-throughput-floor 0.5"
EXITS = "--early-exit-layers 1,2,3 --early-exit-threshold 0.9 --early-exit-start 1 --early-exit-loss-weight 0.5"
MORE_TOKENS = "--mtp-num-layers 1 --untie-embeddings-and-output-weights"
PLAIN = "--attention-dropout 0 --hidden-dropout 0 --init-method-std 0.1 --train-iters 3 --global-batch-size 4"
TO_THE_RIGHT: Plans = {1: ((1,), (3,))}
INTERLEAVED: Plans = {1: ((1, 3), (3, 1)), 2: ((2, 2), (2, 2))}


class Job(NamedTuple):
    """What one run does, short of its seed."""

    ranks: int
    flags: str
    plans: Plans = MappingProxyType({})


JOBS = {
    # The three that once stood still on a busy machine.
    "layers and sequences, interleaved": Job(
        4, f"{PP} 2 {CP} 2 {VPP} --num-layers 8 {SEQUENCES} {LAYERS}", INTERLEAVED
    ),
    "layers and sequences, interleaved, TP 2": Job(
        8, f"{PP} 2 {CP} 2 {TP2} {VPP} --num-layers 8 {SEQUENCES} {LAYERS}", INTERLEAVED
    ),
    "no balancer, PP 2, EP 2": Job(4, f"{PP} 2 {EP2} {PACKED} {OVERLAPS}"),
    "no balancer, interleaved, buckets, validated": Job(
        4, f"{PP} 2 {VPP} {OVERLAPS} {BUCKETS} --eval-interval 1 --eval-iters 1 --num-workers 1"
    ),
    "experts, PP 2": Job(4, f"{PP} 2 {EP2} {OVERLAPS} {EXPERTS} --expert-replica-mode resident"),
    "experts, EP 4, shared slots": Job(4, f"{EP4} {OVERLAPS} {EXPERTS} --expert-replica-mode shared"),
    "experts, EP 4, buckets": Job(4, f"{EP4} {OVERLAPS} {BUCKETS} {EXPERTS} --expert-replica-slots 4"),
    "experts, interleaved, more tokens": Job(
        4, f"{PP} 2 {VPP} {EP2} --num-layers 8 {MORE_TOKENS} {OVERLAPS} {EXPERTS}"
    ),
    "sequences, ring over two nodes": Job(4, f"{CP} 4 {SEQUENCES} --sequence-planner ring --sequence-routing 2"),
    "sequences, zones, workers": Job(
        4, f"{CP} 2 {PP} 2 {SEQUENCES} --sequence-planner zones --num-workers 2 {OVERLAPS}"
    ),
    "sequences, chunks, validated": Job(
        4, f"{CP} 4 {SEQUENCES} --sequence-chunk 4 --eval-interval 1 --eval-iters 1 --num-workers 1"
    ),
    "layers, PP 4": Job(4, f"{PP} 4 {LAYERS} {OVERLAPS}", {1: ((2,), (1,), (1,), (0,))}),
    "layers and experts": Job(4, f"{PP} 2 {EP2} {OVERLAPS} {LAYERS} {EXPERTS}", TO_THE_RIGHT),
    "ranks leave, early exit": Job(4, f"{PP} 4 {RELEASE} {EXITS}", {1: ((1,), (3,)), 2: ((4,),)}),
    "ranks leave, all balancers": Job(
        4,
        f"{PP} 2 {CP} 2 {EP2} --untie-embeddings-and-output-weights {OVERLAPS} {SEQUENCES} {EXPERTS} {RELEASE} "
        "--freeze-layers 1 --freeze-layers-start 1",
        {1: ((3,), (1,)), 2: ((4,),)},
    ),
}


def _rank(argv: list[str], plans: Plans, seed: int | None, two_nodes: bool, stacks_after: float) -> Any:
    """Returns the losses of this rank, bit for bit, and the messages that it lost."""
    faulthandler.dump_traceback_later(stacks_after)
    if two_nodes:
        os.environ["LOCAL_WORLD_SIZE"] = "2"
    if seed is not None:
        install(seed, int(os.environ["RANK"]))
    from megatron.balanced.arguments import parse_arguments

    args, config = parse_arguments(argv)

    from megatron.balanced.train import train

    if plans:
        move_at(plans)
    finish = watch(False)
    try:
        train(args, config)
    except SystemExit as left:
        assert not left.code, f"exit code {left.code}"
    faulthandler.cancel_dump_traceback_later()
    return [loss.hex() for loss in finish().losses], dropped_messages()


class Runs:
    """Jobs on one pool and one corpus. What each one's losses are is found out once, without chaos."""

    def __init__(self, pool: Pool, folder: Path, seconds: float, share: float = 1.0) -> None:
        documents = write_documents(folder / "documents", heavy_tailed(400, seed=1))
        documents[documents.index("100,0,0")] = "80,20,0"
        self._pool, self._documents, self._seconds = pool, documents, seconds
        self._share = share
        self._losses: dict[str, list] = {}

    def _run(self, job: Job, seed: int | None) -> list:
        packed = PACKED in job.flags
        argv = [*MODEL, *(self._documents if packed else MOCK_DATA), *PLAIN.split(), *job.flags.split()]
        # What stands still is told after half of that, and ended by the pool, which shows it.
        argv += ["--distributed-timeout-minutes", str(math.ceil(self._seconds / 60))]
        call = (argv, dict(job.plans), seed, "--sequence-routing" in job.flags, self._seconds - 10)
        return self._pool.run(job.ranks, _rank, *call, timeout=self._seconds)

    def check(self, name: str, seed: int) -> None:
        """Raises AssertionError, or what the pool raises, where the run is not as it is without chaos."""
        job = JOBS[name]
        if name not in self._losses:
            self._losses[name] = [losses for losses, _ in self._run(job, None)]
            assert any(self._losses[name]), "no rank has losses"
        server = self._pool.server
        with nullcontext() if self._share == 1 else Pauses(server, self._share, seed):
            found = self._run(job, seed)
        lost = {rank: messages for rank, (_, messages) in enumerate(found) if messages}
        assert not lost, f"messages were given up before they had gone: {lost}"
        assert [losses for losses, _ in found] == self._losses[name], "chaos changed the losses"


def _records(runs: Runs, names: list[str], seeds: range) -> Iterator[dict[str, Any]]:
    for number, seed in enumerate(seeds):
        name, begin, error = names[number % len(names)], time.monotonic(), None
        try:
            runs.check(name, seed)
        except Exception as found:
            error = "\n".join([f"{type(found).__name__}: {found}", *getattr(found, "__notes__", ())])
        load = os.getloadavg()[0]
        seconds = round(time.monotonic() - begin, 1)
        yield {"job": name, "seed": seed, "seconds": seconds, "load": round(load, 1), "error": error}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0, help="of the first run")
    parser.add_argument("--job", choices=JOBS, action="append", help="only this one; may be given again")
    parser.add_argument("--seconds", type=float, default=400, help="that a run may take")
    parser.add_argument("--share", type=float, default=1, help="of the time that processes are not paused")
    parser.add_argument("--json", type=Path, help="file to append a line a run to")
    args = parser.parse_args()
    pool, failed = Pool(), 0
    try:
        with tempfile.TemporaryDirectory() as folder:
            runs = Runs(pool, Path(folder), args.seconds, args.share)
            for record in _records(runs, args.job or list(JOBS), range(args.seed, args.seed + args.runs)):
                failed += record["error"] is not None
                print(f"{record['seed']:4d} {record['seconds']:6.1f} s  {record['job']}: {record['error'] or 'same'}")
                sys.stdout.flush()
                if args.json:
                    with args.json.open("a") as lines:
                        lines.write(json.dumps(record) + "\n")
    finally:
        pool.stop()
    print(f"{failed} of {args.runs} runs failed")
    return 1 if failed else 0


if __name__ == "__main__":
    from tests.support.chaos_runs import main as run  # by its name, by which ranks find what they are to call

    sys.exit(run())
