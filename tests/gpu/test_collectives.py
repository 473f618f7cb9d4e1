"""Every collective that training uses, on 2 and on 4 ranks, which may share a GPU."""

import time
from typing import Any

from tests.support.patience import PATIENCE

SECONDS = 40.0  # that NCCL waits for a rank


def _talk(device: str) -> dict[str, float]:
    """Milliseconds of each collective on this rank. Raises AssertionError where one gives a wrong value."""
    from datetime import timedelta

    import torch
    import torch.distributed as dist

    from tests.gpu.training import local_device

    place = local_device(device)
    dist.init_process_group(
        "nccl" if device == "cuda" else "gloo", timeout=timedelta(seconds=SECONDS if device == "cuda" else PATIENCE)
    )
    rank, size = dist.get_rank(), dist.get_world_size()
    pairs = [dist.new_group([first, first + 1]) for first in range(0, size, 2)]
    took: dict[str, float] = {}

    def whole(value: float, count: int = 1000) -> torch.Tensor:
        return torch.full((count,), float(value), device=place)

    def check(name: str, wanted: Any, call: Any) -> None:
        for _ in range(2):  # the first builds the communicator
            begin = time.perf_counter()
            found = call().cpu()  # waits for the device
            took[name] = 1e3 * (time.perf_counter() - begin)
            assert torch.equal(found, torch.as_tensor(wanted, dtype=found.dtype).expand_as(found)), (name, found)

    def all_reduce(group: Any = None) -> torch.Tensor:
        tensor = whole(rank + 1)
        dist.all_reduce(tensor, group=group)
        return tensor

    def all_gather() -> torch.Tensor:
        gathered = whole(0, size * 1000)
        dist.all_gather_into_tensor(gathered, whole(rank))
        return gathered

    def reduce_scatter() -> torch.Tensor:
        part = whole(0)
        dist.reduce_scatter_tensor(part, torch.arange(float(size), device=place).repeat_interleave(1000))
        return part

    def all_to_all() -> torch.Tensor:
        """Rank r sends 10 (r + 1) numbers to each: uneven, as tokens of experts are."""
        received = whole(-1, sum(10 * (sender + 1) for sender in range(size)))
        dist.all_to_all_single(
            received, whole(rank, 10 * (rank + 1) * size), [10 * (sender + 1) for sender in range(size)],
            [10 * (rank + 1)] * size,
        )  # fmt: skip
        return received

    def broadcast() -> torch.Tensor:
        tensor = whole(rank)
        dist.broadcast(tensor, size - 1)
        return tensor

    def ring() -> torch.Tensor:
        received = whole(-1)
        messages = [
            dist.P2POp(dist.irecv, received, (rank - 1) % size),
            dist.P2POp(dist.isend, whole(rank), (rank + 1) % size),
        ]
        for work in dist.batch_isend_irecv(messages):
            work.wait()
        return received

    check("all-reduce", size * (size + 1) / 2, all_reduce)
    check("all-reduce of pairs", 4 * (rank // 2) + 3, lambda: all_reduce(pairs[rank // 2]))
    check("all-gather", [n for n in range(size) for _ in range(1000)], all_gather)
    check("reduce-scatter", size * rank, reduce_scatter)
    check("all-to-all", [n for n in range(size) for _ in range(10 * (n + 1))], all_to_all)
    check("broadcast", size - 1, broadcast)
    check("messages", (rank - 1) % size, ring)
    dist.destroy_process_group()
    return took


def _check(ranks: Any, count: int, figure: Any) -> None:
    took = ranks.run(count, _talk, ranks.device)
    name, slowest = max(((name, ms) for rank in took for name, ms in rank.items()), key=lambda pair: pair[1])
    assert all(len(rank) == 7 for rank in took)
    figure(f"slowest: {name}, {slowest:.2g} ms")


def test_two_ranks_talk(ranks, figure):
    _check(ranks, 2, figure)


def test_four_ranks_talk(ranks, figure):
    _check(ranks, 4, figure)
