"""python -m balancing.experts: the gain of balanced experts on recorded loads."""

import numpy as np
import pytest

from balancing_tools.experts import main
from balancing_tools.load_trace import LoadTrace, read_load_trace, read_reported_loads, write_load_trace
from tests.support.made_up_run import Job, write_run

COSTS = "--cluster h200-8x400g --hidden-size 4096 --moe-ffn-hidden-size 14336".split()


@pytest.fixture
def trace(tmp_path):
    """Five records of two layers on 4 ranks; expert 3 of 8 has half of the tokens in the first layer."""
    counts = np.full((5, 4, 2, 2, 8), 1000)
    counts[:, :, 0, :, 3] = 7000
    path = tmp_path / "loads.npz"
    write_load_trace(LoadTrace(counts, np.arange(5), np.array([1, 3])), path)
    return path


def _cells(text: str, name: str) -> list[str]:
    return next(line.split() for line in text.splitlines() if line.split()[:1] == [name])


def test_planners_and_layers_of_a_trace(trace, capsys):
    assert main(["--trace", str(trace)]) == 0
    text = capsys.readouterr().out
    assert "2 MoE layers, 8 experts, 4 expert-parallel ranks" in text and "0.0% of the tokens" in text
    # The first layer's busiest rank has 8 of 14 parts, 2.286 times the mean; the second is even.
    assert _cells(text, "none")[1:] == ["1.643", "2.286", "0.0"]
    assert _cells(text, "quota")[1:3] == ["1.000", "1.000"]
    assert _cells(text, "1") == ["1", "2.286", "1.000"] and _cells(text, "3") == ["3", "1.000", "1.000"]


def test_costs(trace, capsys):
    assert main(["--trace", str(trace), *COSTS, "--non-expert-ms", "2", "--planner", "prophet"]) == 0
    text = capsys.readouterr().out
    assert float(_cells(text, "prophet")[-1]) > 1 == float(_cells(text, "none")[-1])


def test_a_report_is_replayed_and_saved(tmp_path, capsys):
    write_run(tmp_path, Job(hot={(2, 3): 3.0}), iterations=6)
    loads = read_reported_loads(tmp_path)
    assert main(["--from-report", str(tmp_path), "--save", str(tmp_path / "saved.npz")]) == 0
    assert np.array_equal(read_load_trace(tmp_path / "saved.npz").counts, loads.counts)
    assert f"{loads.counts.shape[-1]} experts" in capsys.readouterr().out


@pytest.mark.parametrize(
    "more, says",
    [
        (["--hidden-size", "64"], "--hidden-size 64 has no effect without --cluster"),
        (["--non-expert-ms", "3"], "--non-expert-ms 3.0 has no effect without --cluster"),
        ([*COSTS, "--non-expert-ms", "nan"], "nan must be a number from 0"),
        ([*COSTS, "--non-expert-ms", "-4"], "-4 must be a number from 0"),
        (["--ranks", "0"], "0 must be a whole number from 1"),
        (["--slots", "7"], "--slots 7 must be at most 6: of 8 experts each of 4 ranks has 2 at home"),
        (["--slots", "1000000000"], "must be a whole number from 0 to 1,000,000"),
        (["--ranks", "3"], "4 source ranks, not a multiple or a part of 3"),
        (["--slots", "-1"], "-1 must be a whole number from 0"),
        (["--cluster", "h200-8x400g"], "needs --hidden-size"),
        ([*COSTS[2:], "--cluster", "h300"], "unknown cluster preset 'h300'"),
    ],
)
def test_bad_input_is_one_line(trace, capsys, more, says):
    assert main(["--trace", str(trace), *more]) == 2
    error = capsys.readouterr().err
    assert says in error and error.count("\n") == 1 and "Traceback" not in error


def test_what_holds_no_loads(trace, tmp_path, capsys):
    for arguments, says in (
        (["--from-report", str(tmp_path)], "no events.jsonl"),
        (["--trace", str(tmp_path / "other.npz")], "cannot be read"),
    ):
        assert main(arguments) == 2
        assert says in capsys.readouterr().err


def test_what_is_saved_has_the_name_that_was_given(trace, tmp_path, capsys):
    assert main(["--trace", str(trace), "--save", str(tmp_path / "saved")]) == 0
    assert read_load_trace(tmp_path / "saved").counts.shape == (5, 4, 2, 2, 8)
    capsys.readouterr()
    for path, says in ((tmp_path, "it is a folder"), (trace, "which this command reads")):
        assert main(["--trace", str(trace), "--save", str(path)]) == 2
        out, error = capsys.readouterr()
        assert says in error and error.count("\n") == 1 and "planner" not in out
    assert read_load_trace(trace).counts.shape == (5, 4, 2, 2, 8)
