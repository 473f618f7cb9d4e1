"""The support matrix claims nothing that no test shows. That its tests ran is checked at the end of a whole run."""

import os
import re
import subprocess
import sys
from pathlib import Path

from tests.mutants import node_id
from tests.support.claims import SUPPORT, Claim, claims, not_run

# Of the first table. The second, of recipes, is compared in tests/tools/test_recipe.py.
MATRIX = SUPPORT.read_text().partition("\n## ")[0]
ROWS = [line.strip("|").split(" | ") for line in MATRIX.splitlines() if line.startswith("| ")]


def test_every_cell_names_its_tests():
    assert len(ROWS) > 30
    for row in ROWS[1:]:
        assert len(row) == 3, row
        for cell in row[1:]:
            words = cell.strip()
            if words not in ("not run", "refused"):
                assert words.startswith(("tested", "refused")), words
                assert claims(words), f"'{row[0].strip()}' names no test"


def test_named_tests_exist():
    for claim in claims():
        node_id(claim.test)


def test_what_has_not_run_is_told():
    named = claims("`test_dense`, `test_layouts_agree[DP 2]` and `test_scripts_pass_shellcheck` (needs shellcheck)")
    assert named == [
        Claim("test_dense", ""),
        Claim("test_layouts_agree[DP 2]", ""),
        Claim("test_scripts_pass_shellcheck", "shellcheck"),
    ]
    ran = {"tests/megatron/test_parity.py::test_dense[PP 2]"}
    why = {"tests/tools/test_slurm.py::test_scripts_pass_shellcheck": "shellcheck is not installed"}
    left_out = {"tests/sequences/test_packed_documents.py::test_layouts_agree[DP 2]"}
    assert not_run(named, ran, why, left_out) == []
    assert not_run(named, set(), {}, set()) == [f"{claim.test} was not run" for claim in named]
    lines = not_run(
        named, ran, {next(iter(why)): "no time"}, {"tests/sequences/test_packed_documents.py::test_layouts_agree"}
    )
    assert [re.sub(":.*", "", line) for line in lines] == [
        "test_layouts_agree[DP 2] was not run",
        "test_scripts_pass_shellcheck was skipped",
    ]


def _run(folder: Path, *arguments: str) -> subprocess.CompletedProcess:
    """pytest with our check on two tests of its own, of which one is skipped."""
    (folder / "tests").mkdir(exist_ok=True)
    (folder / "pytest.ini").write_text("[pytest]\ntestpaths = tests\n")
    (folder / "tests" / "conftest.py").write_text(
        "from tests.support import claims\n"
        "claims.claims = lambda: [claims.Claim('test_dense', ''), claims.Claim('test_training_learns', '')]\n"
        "def pytest_configure(config):\n"
        "    claims.watch(config)\n"
    )
    (folder / "tests" / "test_parity.py").write_text(
        "import pytest\ndef test_dense(): pass\ndef test_training_learns(): pytest.skip('no time')\n"
    )
    path = str(SUPPORT.parents[1])
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments],
        cwd=folder, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, timeout=100,
    )  # fmt: skip


def test_a_whole_run_fails_where_a_claim_was_not_tested(tmp_path):
    whole = _run(tmp_path)
    assert whole.returncode == 1
    assert "docs/support.md claims what was not tested: test_training_learns was skipped: " in whole.stdout
    assert "no time" in whole.stdout and "1 passed, 1 skipped" in whole.stdout
    assert _run(tmp_path, "-k", "learns or dense").returncode == 1
    for part in (["tests/test_parity.py"], ["-k", "dense"], ["--collect-only"]):
        assert _run(tmp_path, *part).returncode == 0, part
