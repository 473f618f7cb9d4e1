"""A damaged log: every command says how much of it is lost, and what is beyond reason is damage."""

import json
from pathlib import Path

import pytest

from balancing.report import history as history_module
from balancing.report import read_history
from balancing.report.__main__ import main as report
from balancing.report.trace import read_trace
from balancing_tools.experts import main as experts
from balancing_tools.layers import main as layers
from balancing_tools.whatif.command import main as whatif
from tests.support.made_up_run import Job, write_run

STAGES, LAYERS, SEQUENCES, EXPERTS = (
    ("layers", "stage"),
    ("layers", "layer"),
    ("sequences", "rank"),
    ("experts", "rank"),
)
COMMANDS = {
    "report": lambda folder: report([str(folder), "--no-html"]),
    "layers": lambda folder: layers(["--from-report", str(folder)]),
    "experts": lambda folder: experts(["--from-report", str(folder)]),
    "whatif": lambda folder: whatif([str(folder)]),
}


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    return write_run(tmp_path_factory.mktemp("run"), Job(), 8)


def lines_of(folder: Path) -> list[dict]:
    return [json.loads(text) for text in (folder / "events.jsonl").read_text().splitlines()]


def with_lines(folder: Path, lines: list) -> Path:
    """A log of these lines, objects or text."""
    folder.mkdir(exist_ok=True)
    texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    (folder / "events.jsonl").write_text("\n".join(texts) + "\n")
    return folder


# unit, changes to a line of it, and the words that name what is wrong
BEYOND_REASON = {
    "step": (STAGES, {"step_s": 1e308}, "step_s is 1e+308"),
    "step that is no number": (STAGES, {"step_s": float("nan")}, "step_s is nan"),
    "step as text": (STAGES, {"step_s": "1.0"}, "step_s is '1.0'"),
    "micro-batches below 0": (STAGES, {"micro_batches": -3}, "micro_batches is -3"),
    "micro-batches": (STAGES, {"micro_batches": 10**9}, "micro_batches is 1e+09"),
    "half a micro-batch": (STAGES, {"micro_batches": 1.5}, "micro_batches is 1.5, no whole number"),
    "no chunks": (STAGES, {"chunks": 0}, "chunks is 0"),
    "chunks": (STAGES, {"chunks": 10**9}, "chunks is 1e+09"),
    "one rank": (STAGES, {"rank": [0] * 8}, "rank has one number twice"),
    "half ranks": (STAGES, {"rank": [0.5, 1, 2, 3, 4, 5, 6, 7]}, "rank is no row of whole numbers"),
    "nested times": (STAGES, {"busy_s": [[1.0], [1.0], [1.0], [1.0]]}, "busy_s is no row"),
    "times as text": (STAGES, {"busy_s": ["1", "1", "1", "1"]}, "busy_s is no row"),
    "memory": (STAGES, {"memory_bytes": [2**60] * 8}, "memory_bytes has numbers that are not from 0"),
    "one layer": (LAYERS, {"layers": [0] * 8}, "layers has one number twice"),
    "layer below 0": (LAYERS, {"layers": [-1, 1, 2, 3, 4, 5, 6, 7]}, "layers has -1"),
    "time of a layer": (LAYERS, {"forward_s": [1e308] * 8}, "forward_s has numbers"),
    "chunk of a layer": (LAYERS, {"chunk": [10**9] * 8}, "chunk has numbers"),
    "tokens": (SEQUENCES, {"tokens": [2**62] * 8}, "tokens has numbers"),
    "layer as text": (EXPERTS, {"layer": "a"}, "layer is 'a'"),
    "tokens of experts": (EXPERTS, {"tokens_per_expert": [-1] * 8}, "tokens_per_expert has numbers"),
    "iteration": (STAGES, {"iteration": 10**300}, "iteration is 1e+300"),
    "imbalance": (STAGES, {"imbalance_before": 1e308}, "imbalance_before is 1e+308"),
    "moved bytes": (STAGES, {"moved_bytes": -5}, "moved_bytes is -5"),
    "no such key": (STAGES, {"busy_s": None}, "busy_s is no row"),
}


@pytest.mark.parametrize("case", BEYOND_REASON)
def test_what_is_beyond_reason_is_damage(run, tmp_path, case):
    unit, changes, says = BEYOND_REASON[case]
    whole = lines_of(run)
    at = next(number for number, line in enumerate(whole) if (line["balancer"], line["unit"]) == unit)
    history = read_history(with_lines(tmp_path, [*whole[:at], whole[at] | changes, *whole[at + 1 :]]))
    assert history.damage.count == 1
    assert f"1 damaged line in events.jsonl skipped, the first is line {at + 1}: {says}" in str(history.damage)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_says_that_lines_are_damaged(run, tmp_path, name, capsys):
    folder = with_lines(
        tmp_path, ["[" * 100_000, *lines_of(run), '{"iteration": 9, "bal', '{"n": 1' + "0" * 5000 + "}"]
    )
    assert COMMANDS[name](folder) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "3 damaged lines in events.jsonl skipped, the first is line 1: brackets are nested too deeply" in said


@pytest.mark.parametrize(
    "name, unit, changes",
    [
        ("layers", LAYERS, {"forward_s": "gone"}),
        ("whatif", LAYERS, {"layers": None}),
        ("layers", STAGES, {"busy_s": [[1]]}),
        ("experts", EXPERTS, {"layer": "a"}),
    ],
)
def test_where_all_lines_of_a_kind_are_damaged_nobody_is_sent_to_train_again(
    run, tmp_path, name, unit, changes, capsys
):
    damaged = [line | changes if (line["balancer"], line["unit"]) == unit else line for line in lines_of(run)]
    assert COMMANDS[name](with_lines(tmp_path, damaged)) == 2
    error = capsys.readouterr().err
    assert f"of balancer '{unit[0]}' and unit '{unit[1]}' are damaged" in error and "restore the file" in error
    assert error.count("\n") == 1 and "train" not in error


@pytest.mark.parametrize("name", COMMANDS)
def test_where_no_line_can_be_used_that_is_said(run, tmp_path, name, capsys):
    folder = with_lines(tmp_path, [line | {"iteration": "first"} for line in lines_of(run)])
    assert COMMANDS[name](folder) == 2
    error = capsys.readouterr().err
    assert "is damaged: all of its 88 lines (line 1: iteration is 'first', no whole number)" in error
    assert error.count("\n") == 1 and "train" not in error and "let the run" not in error


@pytest.mark.parametrize("name", COMMANDS)
def test_layers_on_stages_that_are_not_there_are_damage(run, tmp_path, name, capsys):
    moved = [
        line | {"stage": [9] * 8} if (line["balancer"], line["unit"]) == LAYERS else line for line in lines_of(run)
    ]
    code = COMMANDS[name](with_lines(tmp_path, moved))
    out, error = capsys.readouterr()
    assert code == (2 if name in ("layers", "whatif") else 0)
    assert "the first is line 2: stage names stage 9 of 4" in " ".join(f"{out} {error}".split())


def test_chunks_that_no_layers_fill_are_refused(run, tmp_path, capsys):
    many = [
        line | {"chunk": [4000] * 8} if (line["balancer"], line["unit"]) == LAYERS else line for line in lines_of(run)
    ]
    assert COMMANDS["layers"](with_lines(tmp_path, many)) == 2
    assert "has 8 layers, too few for its 4 stages of 4001 chunks" in capsys.readouterr().err


def test_a_line_without_end_is_not_read_whole(run, tmp_path, monkeypatch):
    monkeypatch.setattr(history_module, "MOST_LINE_BYTES", 4000)
    folder = with_lines(tmp_path, ['"' + "x" * 100_000 + '"', *lines_of(run)])
    history = read_history(folder)
    assert history.damage.count == 1 and "it has more than 4,000 bytes" in history.damage.first
    assert history.iterations == list(range(1, 9))


def test_what_is_no_log_is_refused(tmp_path, capsys):
    (tmp_path / "events.jsonl").symlink_to("/dev/zero")
    assert COMMANDS["report"](tmp_path) == 2
    assert "is no regular file" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["[" * 100_000, "{}", '{"otherData": 3}'])
def test_a_damaged_trace_is_told_and_the_rest_is_shown(run, tmp_path, text):
    folder = with_lines(tmp_path, lines_of(run))
    (folder / "trace.json").write_text(text)
    assert read_history(folder).no_timeline.startswith("trace.json cannot be read (it is not a trace written by")


@pytest.mark.parametrize("wrong", ["1e308", "NaN", '"soon"'])
def test_times_of_a_trace_have_bounds(run, tmp_path, wrong):
    text = (run / "trace.json").read_text()
    at = text.index('"busy_us":', text.index('"cat":"forward"')) + len('"busy_us":')
    end = min(text.index(mark, at) for mark in ",}")
    (tmp_path / "trace.json").write_text(text[:at] + wrong + text[end:])
    with pytest.raises(ValueError, match="not a trace"):
        read_trace(tmp_path / "trace.json")


def test_the_page_replaces_no_input(run, tmp_path, capsys):
    folder = with_lines(tmp_path, lines_of(run))
    before = (folder / "events.jsonl").read_bytes()
    for command, arguments in (
        (report, [folder, "--html", folder / "events.jsonl"]),
        (whatif, [folder, "--json", folder / "events.jsonl"]),
        (experts, ["--from-report", folder, "--save", folder / "events.jsonl"]),
    ):
        assert command([str(each) for each in arguments]) == 2
        out, error = capsys.readouterr()
        assert "which this command reads" in error and error.count("\n") == 1 and not out
    assert (folder / "events.jsonl").read_bytes() == before
