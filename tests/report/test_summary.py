"""The report must name what is planted: a slow layer, a slow stage, a hot expert, a long sequence, a memory hog."""

import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

from balancing.report import EventLog, History, Summary, event, observe, read_history, summarize
from balancing.report.__main__ import main
from balancing.report.findings import answers, finding_rows, verdict
from balancing.report.summary import warm_up
from balancing.report.trace import TraceIteration, TraceLog
from balancing.report.units import byte_count, count, duration
from balancing_tools.report.figures.timeline import MOST_ROWS, ranks_shown
from balancing_tools.report.page import page
from tests.support.command import run_python
from tests.support.made_up_run import Job, write_run


def report(directory: Path, job: Job, iterations: int = 12) -> tuple[History, Summary]:
    history = read_history(write_run(directory, job, iterations))
    return history, summarize(history)


def rows(summary: Summary) -> dict[str, str]:
    return {row.what: row.who for row in finding_rows(summary)}


@pytest.fixture
def command(capsys, monkeypatch):
    """Runs the command in this process; gives its exit code and what it printed on stdout and stderr."""
    monkeypatch.setenv("COLUMNS", "300")

    def run(*arguments: object) -> tuple[int, str, str]:
        try:
            code = main([str(argument) for argument in arguments])
        except SystemExit as end:
            code = int(end.code or 0)
        return code, *capsys.readouterr()

    return run


# ---- what is planted must be named


def test_names_a_slow_layer_and_the_stage_it_slows(tmp_path):
    _, summary = report(tmp_path, Job(slow={5: 2.5}))
    assert summary.slow_layer and summary.slow_layer.layer == 5 and summary.slow_layer.stage == 2
    assert summary.slow_layer.over == pytest.approx(2.5, rel=0.05)
    assert summary.stage and summary.stage.which == 2
    assert summary.stage.over == pytest.approx(3.5 / (9.5 / 4), rel=0.05)
    assert rows(summary)["slowest layer"] == "layer 5 (stage 2)" and rows(summary)["slowest stage"] == "stage 2"
    assert "Stage 2 sets the pace" in verdict(summary) and "layer 5 costs 2.5" in verdict(summary)


def test_names_the_head_as_the_reason_of_a_slow_last_stage(tmp_path):
    _, summary = report(tmp_path, Job(head=0.03, embedding=0.001, recompute=True))
    assert summary.stage and summary.stage.which == 3
    assert summary.layers and summary.layers.in_layers("head") == pytest.approx(3.0, rel=0.05)
    assert "its head costs as much as 3.0 layers" in verdict(summary)


def test_compares_a_layer_with_its_own_kind(tmp_path):
    """Dense layers next to MoE layers are cheaper, which makes no MoE layer slow."""
    job = Job(experts=0, slow={layer: 3.0 for layer in (1, 3, 5, 7)} | {2: 1.6})
    history = read_history(write_run(tmp_path, job, 12))
    line = next(iter(observe(replace(job, experts=8, slow={}).record(1))[-1:]))
    for iteration in history.iterations:  # make the slow ones MoE layers
        history.experts[iteration] = {
            layer: line | {"tokens_per_expert": np.ones(8), "tokens_per_rank": np.ones(2), "busy_s": np.ones(2)}
            for layer in (1, 3, 5, 7)
        }
    slow = summarize(history).slow_layer
    assert slow and slow.layer == 2 and slow.kind == "dense" and slow.over == pytest.approx(1.6, rel=0.05)


def test_names_a_hot_expert_and_the_rank_that_holds_it(tmp_path):
    _, summary = report(tmp_path, Job(hot={(3, 6): 12.0}))
    assert summary.expert and (summary.expert.layer, summary.expert.which) == (3, 6)
    assert summary.expert.over == pytest.approx(12 / 19 * 8, rel=0.05)
    assert summary.expert_rank and (summary.expert_rank.layer, summary.expert_rank.which) == (3, 1)
    assert summary.expert_rank.over == pytest.approx(15 / 19 * 2, rel=0.05)
    assert rows(summary)["hottest expert"] == "layer 3, expert 6"
    assert rows(summary)["hottest EP rank"] == "layer 3, EP rank 1"


def test_names_a_long_sequence(tmp_path):
    _, summary = report(tmp_path, Job(stages=1, replicas=4, experts=0, long={2: 7000}))
    assert rows(summary)["longest sequence"] == rows(summary)["most attention"] == "rank 2"
    assert summary.longest and summary.longest.value == 7000
    assert rows(summary)["most tokens"] == "all alike"


def test_names_a_memory_hog_and_a_slow_rank(tmp_path):
    _, summary = report(tmp_path, Job(memory={5: 12 << 30}, rank_slow={6: 1.5}))
    assert rows(summary)["most memory"] == "rank 5 (stage 2, node 1)"
    assert summary.memory and summary.memory.value == pytest.approx(12 << 30, rel=0.001)
    assert rows(summary)["slowest rank"] == "rank 6 (stage 3, node 1)"
    assert "Rank 6 (stage 3, node 1) is busy 20 % longer than the mean rank of its stage" in verdict(summary)


def test_the_first_screen_answers_in_order_and_names_the_flag(tmp_path):
    _, summary = report(tmp_path, Job(slow={5: 2.5}))
    said = answers(summary)
    assert [each.about for each in said] == ["step", "slow", "to gain", "flag"]
    assert said[0].text.startswith("A step takes") and "Stage 2" in said[1].text and "less" in said[2].text
    assert re.fullmatch(r"Switch on --balance-layers \(about \d+ % less\)\.", said[3].text)


def test_no_flag_is_named_where_nothing_is_uneven(tmp_path):
    _, summary = report(tmp_path, Job(noise=0.001))
    assert answers(summary)[1].text == "Nobody by much." and answers(summary)[-1].text == "None is needed."
    assert "The ranks are balanced" in verdict(summary) and "sets the pace" not in verdict(summary)


# ---- reading what is left of a run


def test_warm_up_is_a_tenth_at_least_two_never_all():
    assert [warm_up(n) for n in (0, 1, 2, 3, 12, 40, 41)] == [0, 0, 1, 2, 2, 4, 5]


def test_the_memory_that_balancers_take_is_told(tmp_path):
    """Of replica slots and of moves, where it was largest."""
    write_run(tmp_path, Job(), 6)
    lines = [
        event(4, "experts", "layer", imbalance_before=2.0, action="replicate") | {"slot_bytes": size << 20}
        for size in (3, 5, 4)
    ]
    lines.append(event(4, "layers", "stage", imbalance_before=2.0, action="move") | {"peak_bytes": 7 << 30})
    with open(tmp_path / "events.jsonl", "a") as file:
        file.writelines(json.dumps(line) + "\n" for line in [*lines, lines[0] | {"slot_bytes": -1}])
    history = read_history(tmp_path)
    assert history.damage.count == 1, "bytes below zero"
    summary = summarize(history)
    assert summary.actions["experts"].memory == {"slot_bytes": 5 << 20}
    text = page(history, summary)
    assert "slots 5.00 MiB" in text and "at most 7.00 GiB until a move ended" in text


def test_damaged_lines_are_counted_and_unknown_ones_accepted(tmp_path):
    write_run(tmp_path, Job(), 6)
    path = tmp_path / "events.jsonl"
    good = json.loads(path.read_text().splitlines()[0])
    with open(path, "a") as file:
        for line in (
            good | {"iteration": 7, "colour": "blue", "deep": {"er": [1]}},  # unknown keys
            good | {"iteration": 8, "balancer": "weather", "unit": "cloud"},  # an unknown balancer
            event(6, "experts", "rank", imbalance_before=2.0, imbalance_after=1.25, action="teleport", moved_bytes=99),
        ):
            file.write(json.dumps(line) + "\n")
        for line in (
            "not json", "[1, 2]", "{}", '"text"', json.dumps(good | {"busy_s": [1.0]}),
            json.dumps(good | {"step_s": float("nan")}), json.dumps(good | {"iteration": "seven"}),
            json.dumps(good | {"stage": [0] * 8}), json.dumps(good)[:80],
        ):  # fmt: skip
            file.write(line + ("" if line == json.dumps(good)[:80] else "\n"))
    history = read_history(tmp_path)
    assert history.damage.count == 9 and history.iterations == [1, 2, 3, 4, 5, 6, 7]
    summary = summarize(history)
    assert summary.actions["experts"].counts == {"teleport": 1} and summary.actions["experts"].moved_bytes == 99
    text = page(history, summary)
    assert "9 damaged lines" in text and "teleport 1" in text


def test_the_last_word_on_an_iteration_wins(tmp_path):
    write_run(tmp_path, Job(), 4)
    write_run(tmp_path, replace(Job(), slow={0: 3.0}), 4)  # a restart from an older checkpoint
    history = read_history(tmp_path)
    assert history.iterations == [1, 2, 3, 4]
    summary = summarize(history)
    assert summary.slow_layer and summary.slow_layer.layer == 0
    assert summary.stage and summary.stage.which == 0 and summary.stage.over > 1.5


def test_only_the_last_layout_is_counted(tmp_path):
    before, after = Job(stages=4, replicas=2, slow={0: 3.0}), Job(stages=2, replicas=2, slow={7: 2.0})
    with EventLog(tmp_path) as log:
        for iteration in range(1, 31):
            log.write(observe((before if iteration <= 20 else after).record(iteration)))
    summary = summarize(read_history(tmp_path))
    assert summary.counted == list(range(22, 31)) and summary.skipped == 3 and summary.other_layout == 18
    assert summary.slow_layer and summary.slow_layer.layer == 7 and summary.stage_count == 2


# ---- the page


class Reader(HTMLParser):
    """Collects what a browser would have to fetch, ids, and tags left open."""

    def __init__(self):
        super().__init__()
        self.ids, self.fetched, self.open = [], [], []

    def handle_starttag(self, tag, attributes):
        if tag not in ("meta", "br"):
            self.open.append(tag)
        self.handle_startendtag(tag, attributes)

    def handle_startendtag(self, tag, attributes):
        for name, value in attributes:
            if name == "id":
                self.ids.append(value)
            if name in ("src", "href", "xlink:href", "data") and not value.startswith(("#", "data:image/png;base64,")):
                self.fetched.append(value)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def check_self_contained(text: str) -> None:
    reader = Reader()
    reader.feed(text)
    assert reader.open == [] and reader.fetched == []
    assert len(reader.ids) == len(set(reader.ids))
    references = set(re.findall(r"https?://[^\s\"'<>]+", re.sub(r'xmlns(:\w+)?="[^"]*"', "", text)))
    assert references == set()
    assert "<script" not in text and "@import" not in text and "#0102" not in text


def test_page_is_one_file_with_every_figure(tmp_path):
    history, summary = report(tmp_path, Job(hot={(3, 6): 6.0}, slow={5: 2.0}, recompute=True))
    text = page(history, summary)
    check_self_contained(text)
    assert text.count("<figure>") == 7 and "Left out" not in text
    assert all(row.who in text for row in finding_rows(summary))


def test_page_shows_the_pipeline_before_and_after_a_move(tmp_path):
    """However long ago the move was."""
    before, after = Job(stages=2, slow={0: 3.0}), Job(stages=2, slow={0: 3.0}, moved={3: 1})
    with EventLog(tmp_path) as log:
        trace = TraceLog(tmp_path)
        for iteration in range(1, 21):
            record = (before if iteration <= 8 else after).record(iteration)
            log.write(observe(record))
            trace.add(record)
        trace.write()
    history = read_history(tmp_path)
    assert [one.iteration for one in history.timelines] == [8, 18, 19, 20]
    text = page(history, summarize(history))
    check_self_contained(text)
    assert text.count("<figure>") == 8
    assert "stage 0 went from 4 to 3 layers, stage 1 went from 4 to 5 layers" in text


@pytest.mark.parametrize(
    ("job", "figures", "words"),
    [
        (Job(experts=0), 6, ["dense model"]),
        (Job(stages=1, replicas=1, layers=1, experts=0), 2, ["dense model", "one rank has none", "nothing to compare"]),
        (Job(stages=16, replicas=4, layers=32, micro_batches=2, experts=64), 7, ["32 of 64 ranks are shown"]),
    ],
    ids=["dense", "one rank", "64 ranks"],
)
def test_page_leaves_out_what_was_not_measured(tmp_path, job, figures, words):
    text = page(*report(tmp_path, job, 3))
    check_self_contained(text)
    assert text.count("<figure>") == figures
    assert all(why in text for why in words)


def test_names_from_the_run_cannot_break_the_page(tmp_path):
    directory = write_run(tmp_path / "a<script>b", Job(), 3)
    with EventLog(directory) as log:
        log.write([event(2, "<b>", "x", imbalance_before=1.0, action="<i>")])
    history = read_history(directory)
    text = page(history, summarize(history))
    check_self_contained(text)
    assert "a&lt;script&gt;b" in text and "&lt;i&gt; 1" in text


@pytest.mark.parametrize(
    ("stages", "replicas", "slowest"), [(4, 2, 3), (8, 16, 127), (8, 16, 37), (40, 1, 39), (1, 99, 50)]
)
def test_timeline_of_many_ranks_shows_the_slowest(stages, replicas, slowest):
    stage = {rank: rank // replicas for rank in range(stages * replicas)}
    shown = ranks_shown(TraceIteration(1, 1.0, stage, {rank: [] for rank in stage}), slowest)
    assert slowest in shown and len(shown) == len(set(shown)) == min(len(stage), MOST_ROWS)
    assert shown == sorted(shown)


# ---- the command


def test_command_prints_a_table_and_writes_the_page(tmp_path):
    write_run(tmp_path, Job(slow={5: 2.0}, hot={(3, 6): 6.0}, long={1: 7000}), 6)
    done = run_python("-m", "balancing.report", tmp_path, COLUMNS="300")
    assert done.returncode == 0 and done.stderr == ""
    for words in ("layer 5 (stage 2)", "stage 2", "layer 3, expert 6", "what perfect balance would give", "% less"):
        assert words in done.stdout
    lines = done.stdout.splitlines()
    assert max(len(line) for line in lines if str(tmp_path) not in line) <= 100
    assert (tmp_path / "report.html").read_text().startswith("<!DOCTYPE html>")


def test_command_options(tmp_path, command):
    write_run(tmp_path / "run", Job(), 3)
    assert command(tmp_path / "run", "--no-html")[0] == 0
    assert not (tmp_path / "run" / "report.html").exists()
    assert command(tmp_path / "run", "--html", tmp_path / "other.html")[0] == 0
    assert (tmp_path / "other.html").exists() and not (tmp_path / "run" / "report.html").exists()


def test_command_refuses_bad_input_in_one_line(tmp_path, command):
    empty, none, damaged, good = (tmp_path / name for name in ("empty", "none", "damaged", "good"))
    for directory in (empty, none, damaged):
        directory.mkdir()
    (empty / "events.jsonl").write_text("")
    (damaged / "events.jsonl").write_text("nothing\nuseful\n")
    write_run(good, Job(), 2)
    for arguments, words in (
        ([tmp_path / "missing"], "missing is not a directory"),
        ([none], "holds no events.jsonl"),
        ([empty], "is empty"),
        ([damaged], "is damaged: all of its 2 lines (line 1: "),
        ([good, "--html", none], "cannot write"),
        ([good, "--colour"], "--colour"),
        ([], "DIR"),
    ):
        code, _, told = command(*arguments)
        assert code == 2 and words in told, (arguments, code, told)
        assert told.count("\n") == 1


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (duration(1.2345), "1.23 s"), (duration(0.0618), "61.8 ms"), (duration(0.00094), "940 us"),
        (duration(0), "0 s"),
        (duration(123.4), "123 s"), (byte_count(3), "3 B"), (byte_count(25 << 30), "25.0 GiB"), (count(812), "812"),
        (count(9999), "9999"), (count(12345), "12.3 k"), (count(4.56e6), "4.56 M"),
    ],
)  # fmt: skip
def test_numbers_as_people_read_them(text, expected):
    assert text == expected
