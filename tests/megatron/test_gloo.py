"""The collectives that gloo lacks, compared with their definitions, on three ranks."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

RANKS = 3
PIECES = [2, 0, 3]  # rows of each rank, uneven


def _join() -> tuple[int, Any]:
    """Start the job as Megatron would for NCCL, and return this rank and torch.distributed."""
    import torch
    import torch.distributed as dist

    dist.init_process_group("nccl", device_id=torch.device("cuda", 0))
    assert dist.get_backend() == "gloo"
    return dist.get_rank(), dist


def _piece(rank: int, rows: int, columns: int = 2) -> np.ndarray:
    return np.arange(rows * columns, dtype=np.float64).reshape(rows, columns) + 100.0 * rank + 1


def _finish(work: Any, asynchronous: bool) -> None:
    assert (work is not None) == asynchronous
    if asynchronous:
        work.wait()


def _all_reduce_average(asynchronous: bool) -> np.ndarray:
    import torch

    rank, dist = _join()
    tensor = torch.from_numpy(_piece(rank, 4))
    _finish(dist.all_reduce(tensor, op=dist.ReduceOp.AVG, async_op=asynchronous), asynchronous)
    return tensor.numpy()


def _reduce_scatter_average(asynchronous: bool, in_place: bool) -> tuple[np.ndarray, bool]:
    import torch

    rank, dist = _join()
    whole = torch.from_numpy(_piece(rank, 2 * RANKS))
    output = whole[2 * rank : 2 * rank + 2] if in_place else torch.empty(2, 2, dtype=torch.float64)
    _finish(dist.reduce_scatter_tensor(output, whole, op=dist.ReduceOp.AVG, async_op=asynchronous), asynchronous)
    return output.numpy().copy(), bool((whole.numpy() == _piece(rank, 2 * RANKS)).all())


def _all_gather_uneven(asynchronous: bool) -> list[np.ndarray]:
    import torch

    rank, dist = _join()
    pieces = [torch.empty(rows, 2, dtype=torch.float64) for rows in PIECES]
    _finish(dist.all_gather(pieces, torch.from_numpy(_piece(rank, PIECES[rank])), async_op=asynchronous), asynchronous)
    return [piece.numpy() for piece in pieces]


def _reduce_scatter_uneven(asynchronous: bool, average: bool) -> np.ndarray:
    import torch

    rank, dist = _join()
    pieces = [torch.from_numpy(_piece(rank, rows) + 10 * i) for i, rows in enumerate(PIECES)]
    output = torch.empty(PIECES[rank], 2, dtype=torch.float64)
    op = dist.ReduceOp.AVG if average else dist.ReduceOp.SUM
    _finish(dist.reduce_scatter(output, pieces, op=op, async_op=asynchronous), asynchronous)
    return output.numpy()


def _all_to_all(asynchronous: bool) -> np.ndarray:
    """Rank r sends s + 1 rows to rank s. The split sizes are tensors."""
    import torch

    rank, dist = _join()
    sent = torch.arange(1, RANKS + 1)
    received = torch.full((RANKS,), rank + 1)
    output = torch.empty(int(received.sum()), 2, dtype=torch.float64)
    rows = torch.from_numpy(_piece(rank, int(sent.sum())))
    _finish(dist.all_to_all_single(output, rows, received, sent, async_op=asynchronous), asynchronous)
    return output.numpy()


def _in_a_part_of_the_world() -> tuple[float, list[float]] | None:
    import torch

    rank, dist = _join()
    group = dist.new_group([0, 2], backend="nccl", pg_options=object())
    if rank == 1:
        return None
    tensor = torch.tensor([float(rank + 1)])
    dist.all_reduce(tensor, op=dist.ReduceOp.AVG, group=group)
    pieces = [torch.empty(1), torch.empty(2)]
    dist.all_gather(pieces, torch.full((1 if rank == 0 else 2,), float(rank)), group=group)
    return tensor.item(), torch.cat(pieces).tolist()


def _megatron_gathers_and_scatters_uneven_rows() -> tuple[np.ndarray, np.ndarray]:
    """Megatron's own mappings, which copied the names of torch.distributed when they were imported."""
    import torch
    from megatron.core.tensor_parallel import mappings

    rank, dist = _join()
    group = dist.group.WORLD
    rows = torch.from_numpy(_piece(rank, PIECES[rank]))
    gathered = mappings._gather_along_first_dim(rows, group, PIECES)
    scattered = mappings._reduce_scatter_along_first_dim(gathered, group, PIECES)
    return gathered.numpy(), scattered.numpy()


def _mean(make: Callable[[int], np.ndarray]) -> np.ndarray:
    return np.mean([make(rank) for rank in range(RANKS)], axis=0)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_average(pool, asynchronous):
    expected = _mean(lambda rank: _piece(rank, 4))
    for result in pool.run(RANKS, _all_reduce_average, asynchronous):
        np.testing.assert_allclose(result, expected, rtol=1e-15)


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("in_place", [False, True])
def test_average_scattered(pool, asynchronous, in_place):
    expected = _mean(lambda rank: _piece(rank, 2 * RANKS))
    for rank, (result, untouched) in enumerate(pool.run(RANKS, _reduce_scatter_average, asynchronous, in_place)):
        np.testing.assert_allclose(result, expected[2 * rank : 2 * rank + 2], rtol=1e-15)
        assert untouched != in_place


@pytest.mark.parametrize("asynchronous", [False, True])
def test_uneven_gather(pool, asynchronous):
    for pieces in pool.run(RANKS, _all_gather_uneven, asynchronous):
        for rank, piece in enumerate(pieces):
            np.testing.assert_array_equal(piece, _piece(rank, PIECES[rank]))


@pytest.mark.parametrize("asynchronous, average", [(False, False), (True, False), (False, True)])
def test_uneven_scatter(pool, asynchronous, average):
    for rank, result in enumerate(pool.run(RANKS, _reduce_scatter_uneven, asynchronous, average)):
        total = sum(_piece(source, PIECES[rank]) + 10 * rank for source in range(RANKS))
        np.testing.assert_allclose(result, total / RANKS if average else total, rtol=1e-15)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_all_to_all_with_sizes_in_tensors(pool, asynchronous):
    starts = [0, 1, 3]
    for rank, result in enumerate(pool.run(RANKS, _all_to_all, asynchronous)):
        rows = [_piece(source, 6)[starts[rank] : starts[rank] + rank + 1] for source in range(RANKS)]
        np.testing.assert_array_equal(result, np.concatenate(rows))


def test_groups(pool):
    first, outside, last = pool.run(RANKS, _in_a_part_of_the_world)
    assert outside is None
    assert first == last == (2.0, [0.0, 2.0, 2.0])


def test_megatrons_mappings(pool):
    whole = np.concatenate([_piece(rank, rows) for rank, rows in enumerate(PIECES)])
    starts = np.cumsum([0, *PIECES])
    for rank, (gathered, scattered) in enumerate(pool.run(RANKS, _megatron_gathers_and_scatters_uneven_rows)):
        np.testing.assert_array_equal(gathered, whole)
        np.testing.assert_array_equal(scattered, RANKS * whole[starts[rank] : starts[rank + 1]])
