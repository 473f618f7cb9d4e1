"""Published headlines: the page says what the data say, and rows are judged by them."""

import json
from pathlib import Path

import pytest

from benchmarks.headlines.__main__ import main
from benchmarks.headlines.data import HEADLINES, SETTINGS
from benchmarks.headlines.table import Row, table

PAGE = Path(__file__).parents[2] / "docs" / "results.md"


def _row(**fields) -> Row:
    times = {"none": [8.0, 6.0], "paper": [4.0, 3.0], "rival": [6.0, 3.0], "ours": [4.0, 1.0], "limit": [2.0, 0.5]}
    return Row(
        **({"headline": "Zeppelin, mean", "how": "modelled", "setting": "S1", "times": times, "rival": "x"} | fields)
    )


def test_the_page_has_every_headline_as_published() -> None:
    rows = [line.split("|") for line in PAGE.read_text().splitlines() if line.startswith("| ")]
    shown = {row[1].strip(): row[2].strip() for row in rows if row[1].strip() != "headline"}
    assert shown == {name: str(headline) for name, headline in HEADLINES.items()}


def test_the_page_explains_its_settings_as_the_data_do() -> None:
    page = PAGE.read_text()
    used = {name for name in SETTINGS if f", {name} " in page}
    assert used >= {"L1", "L2", "S1", "S2", "E1", "E2", "E3", "E4", "E5", "E6"}
    for name in used:
        assert f"- **{name}**: {SETTINGS[name]}\n" in page


def test_gains_are_means_or_of_the_case_with_the_largest() -> None:
    assert _row().gain() == pytest.approx((2 + 6) / 2)
    assert _row(pick="largest").gain() == pytest.approx(6)
    assert _row(pick="largest").gain("limit") == pytest.approx(12)
    assert _row(headline="Pro-Prophet over FasterMoE, largest", pick="largest", times=_row().times | {"rival": [6, 6]})


def test_a_headline_that_is_missed_without_a_reason_fails() -> None:
    slow = _row().times | {"ours": [8.0, 6.0]}
    assert not _row().fails and _row().cells()[-1] == "yes"
    assert _row(times=slow).fails
    assert not _row(times=slow, usual=True).fails and _row(times=slow, usual=True).cells()[-1] == "usual"
    told = _row(times=slow, reason="links are full")
    assert not told.fails and told.cells()[-1] == "no: links are full"


def test_the_table_shows_published_figures_beside_ours() -> None:
    head, _, line, *rest = table([_row(), _row(usual=True)]).splitlines()
    cells = dict(zip(map(str.strip, head.split("|")), map(str.strip, line.split("|")), strict=True))
    assert cells["published"] == "2.80" and cells["rival"] == "4.5 s (x)" and cells["gain"] == "4.00"
    assert cells["how"] == "modelled, S1" and rest[-1].startswith("- **S1**: ")


def test_layers_reach_every_headline_simulated(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    mark = PAGE.read_text().split("\n<!-- ")[1].splitlines()[0]
    page.write_text(f"before\n<!-- {mark}\nold\n<!-- {mark}\nafter\n")
    assert main(["--only", "layers", "--json", str(tmp_path / "rows.json"), "--page", str(page)]) == 0
    rows = json.loads((tmp_path / "rows.json").read_text())["rows"]
    best = {row["headline"]: max(own["gain"] for own in rows if own["headline"] == row["headline"]) for row in rows}
    published = {name: one.figure for name, one in HEADLINES.items() if name.startswith("DynMo")}
    assert {name for name, gain in best.items() if round(gain, 2) >= published[name]} == published.keys()
    for row in rows:
        assert (
            row["times"]["limit"][0] < row["times"]["ours"][0] <= min(row["times"]["none"][0], row["times"]["rival"][0])
        )
    before, *shown, after = page.read_text().splitlines()
    assert (before, after) == ("before", "after") and "old" not in shown and any("early exit" in line for line in shown)
