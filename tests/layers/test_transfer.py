"""Transfers of a move: every rank receives exactly what it requests, from itself or from the nearest replica."""

import datetime

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from balancing.layers import LayerMemory, StagePlan, stage_memory
from balancing.layers.measurements import fit_activations, join_ranks, layer_seconds
from balancing.layers.transfer import Piece, Transfer, plan_transfers, run_transfers
from balancing.report import RankRecord, Span
from tests.support.patience import PATIENCE


def _cut(tensor: str, size: int, bounds: list[int], ranks: list[int]) -> list[Piece]:
    ends = [0, *sorted(bounds), size]
    return [Piece(tensor, rank, a, b) for rank, a, b in zip(ranks, ends, ends[1:], strict=False) if a < b]


@st.composite
def _cuts(draw):
    """A tensor over some ranks as it is, in whole or in pieces, and over others as it shall be."""
    size = draw(st.integers(1, 60))

    def places() -> list[Piece]:
        count = draw(st.integers(1, 4))
        ranks = draw(st.permutations(range(6)))[:count]
        if draw(st.booleans()):
            return [Piece("t", rank, 0, size) for rank in ranks]
        bounds = draw(st.lists(st.integers(0, size), min_size=count - 1, max_size=count - 1))
        return _cut("t", size, bounds, ranks)

    return places(), places()


@given(_cuts())
def test_every_element_comes_once_from_a_rank_that_has_it(cuts):
    held, wanted = cuts
    transfers = plan_transfers(held, wanted)
    assert transfers == plan_transfers(held[::-1], wanted)
    for piece in wanted:
        mine = sorted((t.start, t.stop) for t in transfers if t.target == piece.rank)
        assert [a for a, _ in mine] == [piece.start, *(b for _, b in mine[:-1])]
        assert mine[-1][1] == piece.stop
    for t in transfers:
        assert any(p.rank == t.source and p.start <= t.start and t.stop <= p.stop for p in held)
    moved = sum(t.stop - t.start for t in transfers if t.source != t.target)
    missing = 0
    for piece in wanted:
        own = {i for p in held if p.rank == piece.rank for i in range(p.start, p.stop)}
        missing += len(set(range(piece.start, piece.stop)) - own)
    assert moved == missing, "something travels that is there already"


def test_replicas_share_the_work_and_keep_their_places():
    held = [Piece("t", rank, 0, 8) for rank in (0, 1)]
    wanted = [Piece("t", rank, 0, 8) for rank in (2, 3)]
    assert plan_transfers(held, wanted) == [Transfer("t", 0, 2, 0, 8), Transfer("t", 1, 3, 0, 8)]


def test_what_nobody_has_is_refused():
    with pytest.raises(ValueError, match="no rank holds element 4 of t, which rank 1 needs"):
        plan_transfers([Piece("t", 0, 0, 4)], [Piece("t", 1, 2, 6)])


def _shuffle() -> tuple[int, bool]:
    """Three ranks hand on pieces of tensors of different precision, two tensors to the same rank among them."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    kinds = {"a": torch.float64, "b": torch.bfloat16, "c": torch.int32, "d": torch.bool}
    sizes = {"a": 7, "b": 5, "c": 3, "d": 9}
    whole = {name: torch.arange(size).to(kinds[name]) for name, size in sizes.items()}
    held = [piece for name, size in sizes.items() for piece in _cut(name, size, [size // 2], [0, 1])]
    wanted = [Piece(name, target, 0, size) for name, size in sizes.items() for target in (1, 2)]
    got = {name: torch.zeros_like(tensor) for name, tensor in whole.items()}
    sent = run_transfers(
        plan_transfers(held, wanted),
        lambda t: whole[t.tensor][t.start : t.stop],
        lambda t: got[t.tensor][t.start : t.stop],
        dist.group.WORLD,
        datetime.timedelta(seconds=PATIENCE),
    )
    return sent, rank == 0 or all(torch.equal(got[name], whole[name]) for name in whole)


def test_transfers_deliver_what_was_planned(pool):
    results = pool.run(3, _shuffle)
    assert all(right for _, right in results)
    first, second = [3 * 8, 2 * 2, 1 * 4, 4 * 1], [4 * 8, 3 * 2, 2 * 4, 5 * 1]
    assert [sent for sent, _ in results] == [2 * sum(first), sum(second), 0]


def _record(rank: int, spans: list[Span]) -> RankRecord:
    return RankRecord(rank, 0, 0, 0, 0, 0, 0, 0.0, 0.0, 1.0, 0, 0, 0, 0, spans)


def test_what_ranks_measured_becomes_the_cost_of_the_model():
    """Two stages of one layer each, two micro-batches; the second stage on two expert-parallel ranks."""

    def spans(layer: int | str, *seconds: tuple[str, float]) -> list[Span]:
        return [Span(kind, layer, 0, b, 0.0, busy + 1.0, busy) for b in range(2) for kind, busy in seconds]

    whole_step = spans("", ("forward-step", 7.0))
    first = spans(0, ("forward", 1.0), ("recompute", 1.0), ("backward", 2.0)) + spans("embedding", ("forward", 0.5))
    second = [
        spans(1, ("forward", f), ("backward", 2 * f)) + spans("head", ("forward", 0.25), ("backward", 0.5))
        for f in (2.0, 3.0)
    ]
    records = [_record(n, s + whole_step) for n, s in enumerate([first, *second])]
    in_turn = [layer_seconds(record, 2, in_turn=True)[None] for record in records]
    (cost,) = join_ranks(in_turn, [0, 0, 0], tells_waiting=True)
    assert cost.forward.tolist() == [1.0, 3.0], "the slowest of ranks that wait for each other"
    assert cost.backward.tolist() == [3.0, 6.0]
    assert (cost.embedding, cost.head) == ((0.5, 0.0), (0.25, 0.5))
    assert cost.tail == (0.0, 0.0)
    (cost,) = join_ranks(in_turn, [0, 0, 1], tells_waiting=True)
    assert cost.forward.tolist() == [1.0, 2.5], "the mean of replicas"
    seconds = [layer_seconds(record, 2)[None] for record in records]
    (cost,) = join_ranks([seconds[0], seconds[1], seconds[1]], [0, 0, 0], tells_waiting=True)
    assert cost.forward.tolist() == [1.0, 3.0], "both wait one second for messages"
    assert (cost.embedding, cost.head) == ((0.5, 0.0), (1.25, 1.5))
    with pytest.raises(ValueError, match="measured on no rank"):
        join_ranks([np.stack(s) for s in seconds[:1]], [0], tells_waiting=True)


def test_activations_are_what_measured_memory_leaves_over():
    plan = StagePlan.from_counts(((2,), (2,)))
    true = LayerMemory(np.full(4, 100.0), activation=7.0, embedding=50.0, head=60.0)
    resting = LayerMemory(np.full(4, 100.0), embedding=50.0, head=60.0)
    peaks = stage_memory(plan, true)
    assert fit_activations(resting, peaks, plan).activation == pytest.approx(7.0)
    peaks[1] += 10  # two layers of one micro-batch hold this much more
    assert fit_activations(resting, peaks, plan).activation == pytest.approx(12.0)
    assert fit_activations(resting, 0 * peaks, plan).activation == 0
