"""Messages of experts that no computation hides: made-up sequences of events with answers worked out by hand."""

import pytest

from balancing.layers.measurements import join_ranks, layer_seconds
from balancing.report import RankRecord, Span
from balancing.report.exposed import exposed_seconds, exposed_spans


def _message(kind: str, layer: int, micro_batch: int, start: float, seconds: float) -> Span:
    return Span(kind, layer, 0, micro_batch, start, seconds, seconds)


def test_a_message_is_exposed_while_nothing_computes():
    computed = [(4.0, 2.0), (0.0, 1.0), (6.0, 1.0)]  # 0-1, 4-7
    messages = [
        _message("forward", 0, 0, 0.0, 1.0),  # hidden
        _message("forward", 1, 0, 0.5, 2.0),  # from 1 to 2.5
        _message("forward", 1, 0, 2.5, 2.0),  # from 2.5 to 4
        _message("backward", 1, 1, 6.5, 1.5),  # from 7 to 8
        _message("backward", 2, 1, 8.0, 2.0),  # after all
    ]
    assert exposed_spans(messages, computed) == [
        Span("forward-exposed", 1, 0, 0, 1.5, 3.0, 0.0),
        Span("backward-exposed", 1, 0, 1, 7.0, 1.0, 0.0),
        Span("backward-exposed", 2, 0, 1, 8.0, 2.0, 0.0),
    ]
    assert exposed_spans([], computed) == []
    assert [span.seconds for span in exposed_spans(messages[:1], [])] == [1.0]


def _steps(kind: str, *parts: int) -> list[Span]:
    """Passes of the stage, micro-batch after micro-batch, each in so many parts."""
    return [Span(f"{kind}-step", "", 0, at, 0.0, 1.0, 1.0) for at, many in enumerate(parts) for _ in range(many)]


def _exposed(kind: str, layer: int, *seconds: float) -> list[Span]:
    return [Span(f"{kind}-exposed", layer, 0, at, 0.0, each, 0.0) for at, each in enumerate(seconds) if each]


def test_passes_in_turn_count_and_those_alone_do_not():
    forward = _steps("forward", 1, 1, 2, 2, 3)  # two of warm-up
    spans = [*forward, *_steps("backward", 2, 2, 2, 1, 1)]
    spans += [*_exposed("forward", 0, 9.0, 9.0, 1.0, 0.0, 2.0), *_exposed("backward", 3, 4.0, 5.0, 6.0, 9.0, 9.0)]
    assert exposed_seconds(spans) == pytest.approx({(0, 0): 1.0, (3, 1): 5.0})
    assert exposed_seconds(forward) == {}


def test_where_every_pass_runs_alone_all_count():
    spans = [*_steps("forward", 1, 1), *_exposed("forward", 0, 3.0, 1.0)]
    assert exposed_seconds(spans) == {(0, 0): 2.0}


def _record(rank: int, busy: float, exposed: float) -> RankRecord:
    """A dense layer and one with experts, in two micro-batches of which each runs in turn with the other."""
    spans = [*_steps("forward", 2, 2), *_exposed("forward", 1, exposed, exposed)]
    for layer, took in ((0, 2.0), (1, busy)):
        spans += [Span("forward", layer, 0, at, 0.0, 50.0, took) for at in range(2)]
    spans += [Span("forward", name, 0, 0, 0.0, 50.0, 0.5) for name in ("embedding", "head")]
    return RankRecord(rank, 0, 0, 0, 0, 0, 0, 0.0, 0.0, 1.0, 0, 0, 0, 0, spans)


def test_a_layer_costs_what_it_computes_and_what_is_exposed():
    """The rank with few tokens waits for the one with many, which waits for messages alone."""
    seconds = [layer_seconds(record, 2, in_turn=True)[None] for record in (_record(0, 7.0, 1.0), _record(1, 3.0, 6.0))]
    assert seconds[0][0, 1, 0].tolist() == [7.0, 8.0], "device seconds, and with what is exposed"
    (cost,) = join_ranks(seconds, [0, 0], tells_waiting=True)
    assert cost.forward.tolist() == [2.0, 8.0], "not what the other micro-batch computed in between"
    assert (cost.embedding, cost.head) == ((0.5, 0.0), (0.5, 0.0))
