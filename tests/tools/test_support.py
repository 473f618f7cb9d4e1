"""The page of what works: each cell says tested, refused or not run, and nothing else."""

from pathlib import Path

# Of the first table. The others are compared in tests/tools/test_recipe.py and tests/megatron/test_functional.py.
MATRIX = (Path(__file__).parents[2] / "docs/support.md").read_text().partition("\n## ")[0]
ROWS = [line.strip("|").split(" | ") for line in MATRIX.splitlines() if line.startswith("| ")]


def test_every_cell_says_what_was_seen():
    assert len(ROWS) > 30
    for row in ROWS[1:]:
        assert len(row) == 3, row
        assert all(cell.strip().startswith(("tested", "refused", "not run")) for cell in row[1:]), row
