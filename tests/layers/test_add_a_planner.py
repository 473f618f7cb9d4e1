"""docs/add-a-planner.md, step by step in a copy of the repository: its code plans, and passes the tests it names."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
PAGE = REPOSITORY / "docs/add-a-planner.md"


def _apply(diff: str, text: str) -> str:
    """`text` with each hunk of `diff` applied, whose old lines must occur exactly once."""
    for hunk in re.split(r"^@@\n", diff, flags=re.M):
        lines = hunk.splitlines(keepends=True)
        old = "".join(line[1:] for line in lines if line[0] in " -")
        assert text.count(old) == 1, f"{PAGE.name} changes lines that are not there, or not once:\n{old}"
        text = text.replace(old, "".join(line[1:] for line in lines if line[0] in " +"))
    return text


def _follow_the_page(folder: Path) -> None:
    for name in ("balancing", "benchmarks", "tests"):
        shutil.copytree(REPOSITORY / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(REPOSITORY / "pyproject.toml", folder)
    blocks = re.findall(r"^```(python|diff) file=(\S+)\n(.*?)^```", PAGE.read_text(), re.M | re.S)
    assert {kind for kind, *_ in blocks} == {"python", "diff"}
    for kind, name, content in blocks:
        path = folder / name
        assert path.exists() == (kind == "diff"), name
        path.write_text(content if kind == "python" else _apply(content, path.read_text()))


def _run(folder: Path, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, *arguments], cwd=folder, env={"PYTHONPATH": str(folder)}, capture_output=True, text=True,
        timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


def test_a_planner_from_its_file_to_its_benchmark(tmp_path):
    _follow_the_page(tmp_path)
    (command,) = re.findall(r"^python (-m pytest .*)$", PAGE.read_text(), re.M)
    assert " passed" in _run(tmp_path, *command.split(), "-q", "-p", "no:cacheprovider")
    use = """
from balancing.layers import plan_stages
from balancing.layers.config import LayerConfig
from benchmarks.layers.plans import times

assert plan_stages([1, 1, 1, 1, 3, 3, 1, 1], 4, head=2.0, method="greedy").layers == 8
assert "greedy" in LayerConfig.__dataclass_fields__["layer_planner"].metadata["choices"]
assert "greedy" in {row.method for row in times(1)}
"""
    _run(tmp_path, "-c", use)
