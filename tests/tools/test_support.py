"""The page of what works: cells say tested, not run or which GPU; what is refused is what the table of checks has, each
row of which refuses its values alone. The tiers of tests name what there is."""

import argparse
import re
from pathlib import Path

import pytest

from examples.dynamic_models import checks
from megatron.balanced.shared.incompatible import (
    INCOMPATIBLE,
    LOOPS,
    ON,
    TRAINER,
    IncompatibleError,
    Values,
    check_compatible,
    one_of,
    other_than,
    refused,
    shown,
    switch_off,
)
from tests.support import tiers
from tests.support.limits import BALANCERS, DOCS, FEATURES, PAGES, written

PAGE = (DOCS / "support.md").read_text()


def _rows(heading: str) -> list[list[str]]:
    """Cells of the table under a heading, without its first row and rows that name a group."""
    part = PAGE.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in part.splitlines() if line[:2] == "| "]
    return [row for row in rows[1:] if not (row[0].startswith("**") and not any(row[1:]))]


def test_every_row_says_what_was_seen():
    shown, tested = _rows("Shown on a GPU"), _rows("Tested on CPUs, not run on a GPU")
    assert len(shown) > 15 and len(tested) > 6
    for name, ran in shown:
        assert re.match(r"one H[12]00(,|:|;|$)", ran), name
    for name, *ways in tested:
        assert len(ways) == 2 and any(ways), name
    assert PAGE.count("not run") < 10, "a group says it once"


def test_what_is_refused_is_listed():
    """On both pages, as the table says it."""
    assert {feature for row in INCOMPATIBLE for feature in row.features} == {*FEATURES, *BALANCERS}
    for page in PAGES:
        assert (DOCS / page).read_text() == written(page), "run python -m tests.support.limits"


def test_values_of_lists():
    """A flag that takes several values is off if all are off, and has a value if one is it."""
    assert 0.1 in ON and [0.0, 0.1] in ON and [0.0] not in ON and None not in ON
    assert ["aux_loss", "sinkhorn"] in one_of("sinkhorn") and ["aux_loss"] not in one_of("sinkhorn")
    assert [1, 0] in other_than(1) and 1 not in other_than(1) and None not in other_than(1)


def _example(values: Values) -> object:
    """One of these values."""
    return "another" if values.others and values.named else values.named[0] if values.named else True


@pytest.mark.parametrize("table", [INCOMPATIBLE, checks.INCOMPATIBLE], ids=["balancers", "dynamic models"])
def test_every_row_refuses_its_values_alone(table):
    """In one line: the feature, the flag as it was given, the reason and the way out, and the flags of other rows. Or
    `pretrain_gpt.py` switches the flag off, and a line says so."""
    for row in table:
        beside = {name: _example(values) for name, values in row.only_with.items()}
        wrong = beside | {row.flag: _example(row.values)}
        for feature in row.features:
            for where in (TRAINER, LOOPS):
                counts = row.where in (None, where) and not (row.switches_off and where == TRAINER)
                assert (row in refused(wrong, feature, where, table)) == counts, row
            assert row not in refused(wrong, "another feature", row.where or TRAINER, table)
        assert all(not row.refuses(wrong | {name: None}) for name in wrong), row
        right = row.values.named if row.values.others else ("another",)
        assert not any(row.refuses(beside | {row.flag: value}) for value in (*right, None, False, 0, "", [])), row
        if row.where == LOOPS:
            continue
        if row.switches_off:
            args = argparse.Namespace(**wrong)
            note = f"--it switches {shown(row.flag, wrong[row.flag])} off: {row.why}"
            assert switch_off(args, row.features[0], "--it") == [note] and not row.refuses(vars(args))
            assert switch_off(args, row.features[0], "--it") == []
            continue
        with pytest.raises(IncompatibleError) as error:
            check_compatible(argparse.Namespace(**wrong), row.features[0], "--it", [("--more", "", "")], table=(row,))
        said = f"--it is incompatible with {shown(row.flag, wrong[row.flag])}: {row.why}; {row.instead}"
        assert str(error.value) == f"{said} (also incompatible: --more)" and "\n" not in said


def test_the_tiers_name_files_that_are_there():
    tests = Path(__file__).parents[1]
    listed = {f"{folder}/test_{name}.py" for folder, names in tiers._FILES.items() for name in names.split()}
    listed |= {f"{folder}/{name}.py" for folder, names in tiers._FOLDERS.items() for name in names}
    assert not [name for name in listed if not (tests / name).exists()]
    assert all((tests / folder).is_dir() for folder in tiers._FOLDERS)


def test_the_first_tier_has_what_tells_most():
    kept = (
        "experts/test_plan experts/test_training sequences/test_plan sequences/test_training layers/test_plan "
        "layers/test_move layers/test_checkpoints together/test_all_balancers loops/test_contract megatron/test_parity "
        "megatron/test_bad_input tools/test_docs tools/test_arrows"
    )
    for name in kept.split():
        assert not tiers.is_thorough(*name.split("/")), name
