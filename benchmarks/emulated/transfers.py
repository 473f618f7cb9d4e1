"""Message times between the ranks of an emulated cluster: one JSON line with the quickest time of each.

Run on the ranks by `benchmarks.emulated.calibration`:

    python -m benchmarks.emulated ... -- -m benchmarks.emulated.transfers --bytes 10000000 --repeats 3 0-4 0-4,1-5

A pattern is a list of messages source-target that start together; its time runs from the first start to the last
arrival.
"""

import argparse
import json
import time
from datetime import timedelta

import torch
import torch.distributed as dist

__all__ = ["measure"]

_TIMEOUT = timedelta(seconds=120)


def measure(flows: list[tuple[int, int]], size: int) -> float:
    """Seconds to send `size` bytes along all `flows` (source, target) at once. Every rank of the world must call it."""
    rank = dist.get_rank()
    works: list[dist.Work | None] = []
    data = torch.zeros(size, dtype=torch.uint8)
    received = {tag: torch.ones_like(data) for tag, (_, target) in enumerate(flows) if target == rank}
    dist.barrier()
    begin = time.perf_counter()
    # Receives first: gloo queues the note that a receive is ready behind the data of a send to the same rank.
    for tag, (source, target) in enumerate(flows):
        if rank == target:
            works.append(dist.irecv(received[tag], source, tag=tag))
    for tag, (source, target) in enumerate(flows):
        if rank == source:
            works.append(dist.isend(data, target, tag=tag))
    for work in works:
        assert work is not None, "this rank is part of the world"
        work.wait()
    end = time.perf_counter()  # the same clock in all processes of a machine
    assert not any(bool(each.any()) for each in received.values()), "a message came damaged"
    took_part = any(rank in flow for flow in flows)
    times = torch.tensor([-begin, end] if took_part else [float("-inf"), float("-inf")], dtype=torch.float64)
    dist.all_reduce(times, op=dist.ReduceOp.MAX)
    return float(times.sum())


def _flow(text: str) -> tuple[int, int]:
    source, target = text.split("-")
    return int(source), int(target)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--bytes", type=int, required=True)
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("patterns", nargs="+")
    options = parser.parse_args()
    dist.init_process_group("gloo", timeout=_TIMEOUT)
    patterns = {text: [_flow(each) for each in text.split(",")] for text in options.patterns}
    for flows in patterns.values():
        measure(flows, 1000)  # connects
    seconds = {
        text: min(measure(flows, options.bytes) for _ in range(options.repeats)) for text, flows in patterns.items()
    }
    if dist.get_rank() == 0:
        print(json.dumps(seconds), flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
