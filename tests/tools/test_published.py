"""Published figures: each stands where the list says, README has no other, and differences are marked."""

import importlib.util
import json
import re
from pathlib import Path

import pytest

from benchmarks import published
from benchmarks.published import FIGURES, ROOT, RUNS, Figure, Run, main, text_of
from benchmarks.since import Age


@pytest.fixture(autouse=True)
def _ages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ages of the figures that are not repeated, without reading the history of each file."""
    rows = [Age("python -m benchmarks.host", "f1257a0", "2026-11-26", 3, ()),
            Age("python -m benchmarks.experts.training", "f1257a0", "2026-11-26", 3, ())]  # fmt: skip
    monkeypatch.setattr(published, "ages", lambda page, root=ROOT: rows)


@pytest.mark.parametrize("figure", FIGURES, ids=lambda each: f"{each.file} {each.run} {each.keys[0]}")
def test_each_figure_stands_where_the_list_says(figure: Figure) -> None:
    assert len(text_of(figure)) == len(figure.keys)
    assert figure.run in RUNS and figure.noise > 0


def test_readme_has_no_gain_that_no_run_repeats() -> None:
    text = re.sub(r"```.*?```", lambda block: " " * len(block[0]), (ROOT / "README.md").read_text(), flags=re.S)
    known = [match.span() for each in FIGURES if each.file == "README.md" for match in re.finditer(each.pattern, text)]
    # Of the GPU acceptance, whose record the page names: no command of this machine repeats them.
    known += [match.span() for match in re.finditer(r"^\| \[one H200\].*\n(?:\| \| .*\n)+", text, re.M)]
    told = list(re.finditer(r"\d[\d.]*\**(?: to [\d.]+)? (?:%|times)", text))
    assert len(told) >= 7
    for figure in told:
        assert any(begin <= figure.start(0) < end for begin, end in known), f"{figure[0]} is not in FIGURES"


def test_each_run_is_a_command_that_a_reader_can_run() -> None:
    assert {each.run for each in FIGURES} == set(RUNS)
    for run in RUNS.values():
        assert importlib.util.find_spec(run.command.split()[0]) is not None


def _runs(change: float) -> dict[str, Run]:
    """Runs that find what is published, but for the first figure of "experts, real" by so much."""

    def action(name: str) -> dict[str, float]:
        found = {key: value for each in FIGURES if each.run == name
                 for key, value in zip(each.keys, text_of(each), strict=True)}  # fmt: skip
        return found | ({"saved": found["saved"] + change} if name == "experts, real" else {})

    return {name: Run(run.command, run.minutes, lambda quick, name=name: action(name)) for name, run in RUNS.items()}


@pytest.mark.parametrize(("change", "code", "marked"), [(0, 0, 0), (5, 0, 0), (-5.1, 1, 2), (5.1, 1, 2)])
def test_differences_above_the_noise_are_marked(
    change: float,
    code: int,
    marked: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture,
    tmp_path: Path,
) -> None:
    monkeypatch.setattr(published, "RUNS", _runs(change))
    assert main(["--json", str(tmp_path / "found.json")]) == code
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if "f1257a0" in line] == [
        "  2026-11-26 f1257a0 python -m benchmarks.host: 0 commits back, 0 of 3 files changed"
    ], "of runs that were not repeated alone"
    assert sum(line.endswith("DIFFERS") for line in lines) == marked
    found = json.loads((tmp_path / "found.json").read_text())
    assert len(found) == sum(len(each.keys) for each in FIGURES) and sum(row["differs"] for row in found) == marked


def test_quick_runs_what_readme_says_alone(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    monkeypatch.setattr(published, "RUNS", _runs(0))
    assert main(["--quick"]) == 0
    shown = [line.split()[0] for line in capsys.readouterr().out.splitlines() if ".md" in line]
    assert shown and set(shown) == {"README.md"}
    assert (
        sum(run.minutes[0] for name, run in RUNS.items() if name in {e.run for e in FIGURES if e.file == "README.md"})
        <= 20
    )


def test_only_what_is_named_runs(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    monkeypatch.setattr(published, "RUNS", _runs(0))
    assert main(["--only", "drift"]) == 0
    shown = [line.split()[1] for line in capsys.readouterr().out.splitlines() if ".md" in line]
    assert shown == ["drift:"] * 4


def test_a_sentence_that_is_gone_is_named_before_anything_runs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    gone = Figure("README.md", "gain (77) %", "experts, real", ("saved",), 1)
    monkeypatch.setattr(published, "FIGURES", (gone,))
    monkeypatch.setattr(published, "RUNS", {"experts, real": Run("x", (1, 1), lambda quick: pytest.fail("it ran"))})
    assert main([]) == 2
    assert "README.md has 0 times what 'gain (77) %' finds" in capsys.readouterr().err
