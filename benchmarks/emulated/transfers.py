"""Message times between the ranks of an emulated cluster: one JSON line with the quickest time of each.

Run on the ranks by `benchmarks.emulated.calibration`:

    python -m benchmarks.emulated ... -- -m benchmarks.emulated.transfers 10000000 3 0-4 0-4,1-5

The arguments are bytes, repeats and patterns. A pattern is a list of messages source-target that start together; its
time runs from the first start to the last arrival.
"""

import json
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist

__all__ = ["measure"]

_TIMEOUT = timedelta(seconds=300)


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


def main() -> None:
    size, repeats, *texts = sys.argv[1:]
    dist.init_process_group("gloo", timeout=_TIMEOUT)
    seconds = {}
    for text in texts:
        flows = [(int(source), int(target)) for source, target in (each.split("-") for each in text.split(","))]
        measure(flows, 1000)  # connects
        seconds[text] = min(measure(flows, int(size)) for _ in range(int(repeats)))
    if dist.get_rank() == 0:
        print(json.dumps(seconds), flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
