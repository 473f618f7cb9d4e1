"""Observing an iteration: figures worked out by hand, a log that survives what happens to files, a valid trace."""

import json
import logging
import os

import numpy as np
import pytest

from balancing.report import (
    STANDARD_KEYS,
    EventLog,
    History,
    IterationRecord,
    RankRecord,
    Span,
    TraceLog,
    event,
    imbalance,
    observe,
    read_trace,
    scalars,
    write_trace,
)
from balancing.report import trace as trace_module


def rank_record(rank: int, **changes) -> RankRecord:
    values = dict(
        rank=rank, stage=0, node=0, data=0, tensor=0, expert=0, context=0, start=0.0, busy_seconds=1.0,
        step_seconds=4.0, memory_bytes=100, tokens=8, attention_area=36, longest_sequence=8, spans=[], expert_tokens={},
    )  # fmt: skip
    return RankRecord(**(values | changes))


def two_stages() -> IterationRecord:
    """Two stages of two replicas. Rank 3 has a layer that costs more, and expert-parallel rank 1 more tokens."""

    def spans(first: int, slow: float) -> list[Span]:
        return [
            Span("forward-step", "", 0, 0, 0.0, 1.0, 1.0),
            Span("forward", "embedding" if first == 0 else "head", 0, 0, 0.0, 0.1, 0.1),
            Span("forward", first, 0, 0, 0.1, 0.2, 0.2),
            Span("forward", first + 1, 0, 0, 0.3, 0.2 * slow, 0.2 * slow),
            Span("forward", first, 0, 1, 1.0, 0.2, 0.2),
            Span("forward", first + 1, 0, 1, 1.2, 0.2 * slow, 0.2 * slow),
            Span("backward", first, 0, 0, 2.0, 0.5, 0.4),
            Span("recompute", first, 0, 0, 2.0, 0.1, 0.1),
        ]

    def expert_tokens(replica: int) -> dict[int, np.ndarray]:
        return {1: np.array([1, 2, 3, 6]) * (1 + replica)}

    return IterationRecord(
        iteration=7,
        step_seconds=4.0,
        ranks=[
            rank_record(2, stage=1, data=0, busy_seconds=1.0, spans=spans(2, 1.0), attention_area=10),
            rank_record(3, stage=1, data=1, expert=1, busy_seconds=1.0, spans=spans(2, 3.0), tokens=24, node=1),
            rank_record(0, stage=0, data=0, busy_seconds=3.5, spans=spans(0, 1.0), expert_tokens=expert_tokens(0)),
            rank_record(1, stage=0, data=1, expert=1, busy_seconds=2.5, spans=spans(0, 1.0), start=0.25,
                        expert_tokens=expert_tokens(1)),
        ],
    )  # fmt: skip


def by_unit(events: list[dict]) -> dict[tuple[str, str], dict]:
    return {(line["balancer"], line["unit"]): line for line in events}


def test_imbalance_is_max_over_mean():
    assert imbalance([1, 1, 4]) == 2.0
    assert imbalance([[2.0, 2.0], [2.0, 2.0]]) == 1.0
    assert imbalance([]) == imbalance([0, 0]) == 1.0


def test_every_event_has_the_standard_keys_and_moves_nothing():
    events = observe(two_stages())
    assert [(line["balancer"], line["unit"]) for line in events] == [
        ("layers", "stage"), ("layers", "layer"), ("sequences", "rank"), ("experts", "rank"),
    ]  # fmt: skip
    for line in events:
        assert set(STANDARD_KEYS) <= set(line)
        assert line["iteration"] == 7 and line["action"] == "observe" and line["reason"] == ""
        assert line["imbalance_before"] == line["imbalance_after"] >= 1.0
        assert line["plan_ms"] == line["apply_ms"] == line["moved_bytes"] == 0
    json.dumps(events, allow_nan=False)


def test_stage_event_by_hand():
    line = by_unit(observe(two_stages()))["layers", "stage"]
    assert line["rank"] == [0, 1, 2, 3] and line["stage"] == [0, 0, 1, 1] and line["node"] == [0, 0, 0, 1]
    assert line["busy_s"] == [3.0, 1.0] and line["idle_s"] == [1.0, 3.0]
    assert line["imbalance_before"] == 1.5
    assert line["bubble_fraction"] == pytest.approx(1 - 8 / 16)
    assert line["rank_busy_s"] == [3.5, 2.5, 1.0, 1.0] and line["micro_batches"] == 2 and line["chunks"] == 1


def test_layer_event_by_hand():
    line = by_unit(observe(two_stages()))["layers", "layer"]
    assert line["layers"] == ["embedding", 0, 1, 2, 3, "head"]
    assert line["stage"] == [0, 0, 0, 1, 1, 1]
    # The embedding ran in one of two micro-batches; layer 3 takes 0.2 on one replica and 0.6 on the other.
    assert line["forward_s"] == pytest.approx([0.05, 0.2, 0.2, 0.2, 0.4, 0.05])
    assert line["backward_s"] == pytest.approx([0.0, 0.2, 0.0, 0.2, 0.0, 0.0])
    assert line["recompute_s"] == pytest.approx([0.0, 0.05, 0.0, 0.05, 0.0, 0.0])
    assert line["imbalance_before"] == pytest.approx(0.45 / np.mean([0.45, 0.2, 0.45, 0.4]))


def test_sequence_and_expert_events_by_hand():
    events = by_unit(observe(two_stages()))
    sequences, experts = events["sequences", "rank"], events["experts", "rank"]
    assert sequences["tokens"] == [8, 8, 8, 24] and sequences["token_imbalance"] == 2.0
    assert sequences["attention_area"] == [36, 36, 10, 36]
    assert sequences["imbalance_before"] == pytest.approx(36 / 29.5)
    assert experts["layer"] == 1 and experts["tokens_per_expert"] == [3, 6, 9, 18]
    assert experts["tokens_per_rank"] == [9, 27]  # experts 0 and 1 live on expert-parallel rank 0
    assert experts["imbalance_before"] == 1.5 and experts["expert_imbalance"] == 2.0
    assert experts["busy_s"] == pytest.approx([0.2, 0.2])


def test_scalars_from_record_and_from_events():
    values = scalars(two_stages())
    assert values == scalars(observe(two_stages()))
    assert values["balance/stage-imbalance"] == 1.5
    assert values["balance/rank-imbalance"] == pytest.approx(3.5 / 2.0)
    assert values["balance/bubble-fraction"] == 0.5
    assert values["balance/token-imbalance"] == 2.0
    assert values["balance/expert-rank-imbalance"] == 1.5
    dense = IterationRecord(1, 4.0, [rank_record(0)])
    assert not any("expert" in name or "layer" in name for name in scalars(dense))


def test_a_round_of_trials_is_a_scalar_a_balancer():
    figures = {"gain": 1.31, "gain_low": 1.28, "gain_high": None, "pairs": 5, "on": True}
    line = event(40, "experts", "step", imbalance_before=1.0, action="trial") | figures
    assert scalars([line]) == {"balance-gain/experts": 1.31}


@pytest.mark.parametrize("ratios", [[1.0, 0.0], [1.0], [1.0, float("nan")], [1.0, "2"]])
def test_pairs_without_a_ratio_are_damage(tmp_path, ratios):
    line = event(40, "experts", "step", imbalance_before=1.0, action="trial")
    line |= {"gain": 1.3, "gain_low": 1.2, "gain_high": None, "pairs": 2, "pair_iterations": [22, 24]}
    History(tmp_path).keep(line | {"pair_ratios": [1.2, 1.4]})
    with pytest.raises((TypeError, ValueError)):
        History(tmp_path).keep(line | {"pair_ratios": ratios})


def test_scalars_of_replicas_are_told_layer_by_layer():
    lines = [
        event(
            7, "experts", "layer", imbalance_before=2.0 + layer, imbalance_after=1.0, plan_ms=0.5, apply_ms=0.1,
            moved_bytes=64, action="replicate", reason="", layer=layer, replicas=3, late_copies=5,
        )
        for layer in (1, 3)
    ]  # fmt: skip
    values = scalars(lines)
    assert len(values) == 14
    assert values["balance-experts/late-copies/layer-3"] == 5
    assert values["balance-experts/imbalance-before/layer-3"] == 5.0
    assert values["balance-experts/imbalance-after/layer-1"] == 1.0
    assert values["balance-experts/exposed-ms/layer-1"] == 0.1


def test_log_appends_and_takes_numpy(tmp_path):
    for iteration in (1, 2):
        with EventLog(tmp_path / "made" / "here") as log:
            log.write([event(iteration, "x", "y", imbalance_before=np.float64(1.5), load=np.arange(3))])
    lines = [json.loads(text) for text in (tmp_path / "made" / "here" / "events.jsonl").read_text().splitlines()]
    assert [line["iteration"] for line in lines] == [1, 2]
    assert lines[0]["imbalance_after"] == 1.5 and lines[0]["load"] == [0, 1, 2]


def test_a_line_cut_short_by_a_crash_does_not_swallow_the_next(tmp_path):
    (tmp_path / "events.jsonl").write_text('{"iteration": 1, "bal')
    with EventLog(tmp_path) as log:
        log.write(observe(two_stages()))
    first, *others = (tmp_path / "events.jsonl").read_text().splitlines()
    assert first == '{"iteration": 1, "bal' and len(others) == 4
    assert all(json.loads(text)["iteration"] == 7 for text in others)


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full on this system")
def test_a_full_disk_gives_one_warning_and_training_goes_on(tmp_path, caplog):
    (tmp_path / "events.jsonl").symlink_to("/dev/full")
    with caplog.at_level(logging.WARNING), EventLog(tmp_path) as log:
        for _ in range(3):
            log.write(observe(two_stages()))
    assert len(caplog.records) == 1
    assert "No space left" in caplog.text and "training goes on" in caplog.text


def test_a_directory_that_cannot_be_written_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"cannot write the event log .*file/DIR/events.jsonl") as error:
        EventLog(tmp_path / "file" / "DIR")
    assert "\n" not in str(error.value)


def test_an_event_without_a_standard_key_is_our_own_error(tmp_path):
    with EventLog(tmp_path) as log, pytest.raises(AssertionError, match="standard key"):
        log.write([{"iteration": 1}])


def test_trace_has_what_perfetto_needs(tmp_path):
    write_trace(tmp_path / "trace.json", [two_stages()])
    trace = json.loads((tmp_path / "trace.json").read_text())
    names = {e["pid"]: e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "process_name"}
    assert names[3] == "rank 3 (stage 1)" and len(names) == 4
    threads = {(e["pid"], e["tid"]): e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "thread_name"}
    complete = [e for e in trace["traceEvents"] if e["ph"] == "X"]
    assert all((e["pid"], e["tid"]) in threads and e["dur"] >= 0 for e in complete)
    (slow,) = (e for e in complete if e["pid"] == 3 and e["args"].get("layer") == 3 and e["args"]["micro_batch"] == 1)
    assert slow["name"] == "layer 3 forward" and threads[3, slow["tid"]] == "layers"
    assert slow["ts"] == pytest.approx(1.2e6) and slow["dur"] == pytest.approx(0.6e6)
    assert slow["args"]["busy_us"] == pytest.approx(0.6e6)
    steps = {e["pid"]: e["ts"] for e in complete if threads[e["pid"], e["tid"]] == "step"}
    assert steps[0] == 0.0 and steps[1] == pytest.approx(0.25e6)  # the late start of rank 1


def test_trace_reads_back(tmp_path):
    write_trace(tmp_path / "trace.json", [two_stages()])
    (one,) = read_trace(tmp_path / "trace.json")
    assert one.iteration == 7 and one.step_seconds == 4.0 and one.stage == {0: 0, 1: 0, 2: 1, 3: 1}
    for span, original in zip(one.spans[3], two_stages().ranks[1].spans, strict=True):  # the file has nanoseconds
        assert span[:4] == original[:4] and span[4:] == pytest.approx(original[4:], abs=1e-9)
    late = two_stages().ranks[3].spans[3]
    assert one.spans[1][3] == late._replace(start=pytest.approx(late.start + 0.25))
    (tmp_path / "other.json").write_text('{"traceEvents": []}')
    with pytest.raises(ValueError, match="not a trace"):
        read_trace(tmp_path / "other.json")


def test_trace_keeps_the_last_iterations_only(tmp_path, monkeypatch):
    log = TraceLog(tmp_path)
    log.write()
    assert not log.path.exists()
    for iteration in range(1, 21):
        record = two_stages()
        record.iteration = iteration
        log.add(record)
    log.write()
    assert [one.iteration for one in read_trace(log.path)] == [18, 19, 20]
    monkeypatch.setattr(trace_module, "MAX_SPANS", 2 * 32 + 1)  # an iteration here has 32
    log.write()
    assert [one.iteration for one in read_trace(log.path)] == [19, 20]
    monkeypatch.setattr(trace_module, "MAX_SPANS", 20)
    log.write()
    (one,) = read_trace(log.path)
    assert one.iteration == 20 and sorted(one.spans) == [0, 1]


def test_a_trace_that_cannot_be_written_leaves_the_old_one_and_warns_once(tmp_path, monkeypatch, caplog):
    log = TraceLog(tmp_path)
    log.add(two_stages())
    log.write()
    before = log.path.read_text()

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(trace_module.os, "replace", full)
    with caplog.at_level(logging.WARNING):
        log.write()
        log.write()
    assert len(caplog.records) == 1 and "No space left" in caplog.text
    assert log.path.read_text() == before and os.listdir(tmp_path) == ["trace.json"]
