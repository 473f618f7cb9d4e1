"""Published headlines: the page says what the data say, and rows are judged by them."""

from pathlib import Path

import pytest

from benchmarks.experts import emulated as experts_emulated
from benchmarks.headlines.__main__ import _experts_emulated, _layers_emulated, _sequences_emulated
from benchmarks.headlines.data import HEADLINES, NAMES, QUESTIONS, SETTINGS
from benchmarks.headlines.table import Row, table
from benchmarks.layers import emulated as layers_emulated
from benchmarks.sequences import emulated as sequences_emulated

PAGE = Path(__file__).parents[2] / "docs" / "results.md"


def _row(**fields) -> Row:
    times = {"none": [8.0, 6.0], "paper": [4.0, 3.0], "rival": [6.0, 3.0], "ours": [4.0, 1.0], "limit": [2.0, 0.5]}
    return Row(
        **({"headline": "Zeppelin, mean", "how": "modelled", "setting": "S1", "times": times, "rival": "x"} | fields)
    )


def test_the_page_has_every_headline_as_published() -> None:
    page = PAGE.read_text().partition("\n## Published headlines")[2]
    rows = [line.split("|") for line in page.splitlines() if line.startswith("| ")]
    shown = {row[1].strip(): row[2].strip() for row in rows if row[1].strip() != "headline"}
    assert shown == {name: str(headline) for name, headline in HEADLINES.items()}


def test_the_page_explains_its_settings_as_the_data_do() -> None:
    page = PAGE.read_text()
    assert NAMES.keys() == SETTINGS.keys() and all(f"### {question}\n" in page for question in QUESTIONS.values())
    for name, text in SETTINGS.items():
        assert f", {NAMES[name]} " in page and f"- **{NAMES[name]}**: {text}\n" in page


def test_gains_are_means_or_of_the_case_with_the_largest() -> None:
    assert _row().gain() == pytest.approx((2 + 6) / 2)
    assert _row(pick="largest").gain() == pytest.approx(6)
    assert _row(pick="largest").gain("limit") == pytest.approx(12)
    assert _row(headline="Pro-Prophet over FasterMoE, largest", pick="largest", times=_row().times | {"rival": [6, 6]})


def test_a_headline_that_is_missed_without_a_reason_fails() -> None:
    slow = _row().times | {"ours": [8.0, 6.0]}
    assert not _row().fails and _row().cells()[-1] == "4.00 of 8.00, reached"
    assert _row(times=slow).fails
    assert not _row(times=slow, usual=True).fails and _row(times=slow, usual=True).cells()[-1].endswith(", usual")
    told = _row(times=slow, reason="links are full")
    assert not told.fails and told.cells()[-1].endswith(", missed")
    assert "- Missed, links are full: Zeppelin, mean, modelled.\n" in table([told])


def test_rows_by_the_clock_have_the_time_of_each_method(monkeypatch: pytest.MonkeyPatch) -> None:
    """The emulated cluster is replaced by times that name their method; the cluster has its own tests."""

    def measure_layers(stages: int, jobs: list, repeats: int, micro_batches: int = 8) -> list[float]:
        return [1.02 * cost.simulate(plan, micro_batches).step_time for cost, plan, _ in jobs]

    monkeypatch.setattr(layers_emulated, "measure", measure_layers)
    rows = list(_layers_emulated())
    assert {row.setting for row in rows} == {"L1", "L2"} and len(rows) == 13
    assert all(row.times["ours"] <= row.times["none"] and not row.fails for row in rows)

    seconds = {"ring": 12.0, "zones": 4.0, "all-gather": 6.0, "chunks": 3.0}

    def measure_sequences(job, **named) -> tuple[list[dict], None]:
        return [{"case": number, "method": method, "seconds": (1 + number) * seconds[method], "exposed": 0.0}
                for number in range(len(job.cases)) for method in job.methods], None  # fmt: skip

    monkeypatch.setattr(sequences_emulated, "measure", measure_sequences)
    rows = list(_sequences_emulated())
    assert [row.setting for row in rows] == ["S1", "S1", "S2", "S2", "S3"]
    for row in rows:
        assert row.gain() == pytest.approx(4) and row.gain("paper") == pytest.approx(3)
        assert row.gain("rival") == pytest.approx(2) and len(row.times["limit"]) == len(row.times["ours"])
    assert [row.reached for row in rows] == [True, False, True, False, False]

    steps = {"forced balance": 1.0, "none": 6.0, "quota": 1.5, "prophet": 3.0, "prophet, 8 slots": 2.0, "shadow": 4.0}

    def measure_experts(loads, scale, variants, **named) -> tuple[list, None]:
        found = steps | {"shadow, 8 slots": 5.0}
        return [experts_emulated.Row(scale.ranks, each.name, found[each.name], 0, 0, 0, 0, 0, 0, 1)
                for each in variants], None  # fmt: skip

    monkeypatch.setattr(experts_emulated, "measure", measure_experts)
    rows = list(_experts_emulated(None))
    assert [row.setting for row in rows] == ["E1", "E1", "E2", "E2", "E6"]
    faster = {"none": [6.0], "paper": [2.0], "rival": [4.0], "ours": [1.5], "limit": [1.0]}
    assert all(row.times == faster for row in rows)
