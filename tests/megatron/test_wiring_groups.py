"""Groups smaller than the job, and ranks inside a chain: faults there do not show with a group of the whole world."""

import time

import numpy as np

from tests.support.pool import Pool


def _in_a_smaller_group() -> list[np.ndarray] | None:
    """The collectives that gloo lacks, among ranks 1 and 2 of three."""
    import torch
    import torch.distributed as dist

    dist.init_process_group("nccl", device_id=torch.device("cuda", 0))
    group, rank = dist.new_group([1, 2]), dist.get_rank()
    if rank == 0:
        return None
    average = torch.full((2,), float(rank), dtype=torch.float64)
    dist.all_reduce(average, op=dist.ReduceOp.AVG, group=group)
    scattered = torch.empty(1, dtype=torch.float64)
    whole = torch.arange(2, dtype=torch.float64) + 10 * rank
    dist.reduce_scatter_tensor(scattered, whole, op=dist.ReduceOp.AVG, group=group)
    pieces = [torch.arange(rows, dtype=torch.float64) + 100 * rows for rows in (1, 2)]
    uneven = torch.empty_like(pieces[rank - 1])
    dist.reduce_scatter(uneven, pieces, group=group)
    gathered = [torch.empty(rows, dtype=torch.float64) for rows in (1, 2)]
    dist.all_gather(gathered, torch.full((rank,), float(rank), dtype=torch.float64), group=group)
    return [x.numpy() for x in (average, scattered, uneven, *gathered)]


def test_collectives_of_a_smaller_group(pool: Pool) -> None:
    """They count its ranks, and number them within it."""
    nobody, first, second = pool.run(3, _in_a_smaller_group)
    assert nobody is None
    expected = ([1.5, 1.5], [15.0], [200.0], [1.0], [2.0, 2.0]), ([1.5, 1.5], [16.0], [400.0, 402.0], [1.0], [2.0, 2.0])
    for found, wanted in zip((first, second), expected, strict=True):
        assert [x.tolist() for x in found] == list(wanted)


def _along_a_chain() -> float:
    """Three ranks hand on a piece, to which each adds its own. The first one begins when the others wait already."""
    import torch
    import torch.distributed as dist

    from balancing.experts.engine.relay import Hop, Relay

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    dist.barrier()
    if rank == 0:
        time.sleep(1)  # a rank that does not wait for this one has read its piece by now
    piece = torch.full((4,), 1.0 if rank == 0 else -1.0)
    hop = Hop(
        rank - 1 if rank else None, rank + 1 if rank < 2 else None, piece, torch.ones(4) if rank == 1 else None, 0, rank
    )
    relay = Relay([hop], dist.group.WORLD)
    relay.wait_received()
    received = piece.sum().item()
    relay.wait_sent()
    return received


def test_a_rank_in_the_middle_of_a_chain_waits(pool: Pool) -> None:
    assert pool.run(3, _along_a_chain) == [4.0, 8.0, 8.0]
