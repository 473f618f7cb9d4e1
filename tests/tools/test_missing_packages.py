"""A Python without torch and numpy gets one line, not a traceback."""

import sys
from pathlib import Path

import pytest

from tests.support.command import run_python

ROOT = Path(__file__).parents[2]
COMMANDS = [[ROOT / "pretrain_gpt.py"], *(["-m", f"balancing.{name}"] for name in ("report", "layers", "experts"))]


@pytest.mark.parametrize("command", COMMANDS, ids=["pretrain_gpt.py", "report", "layers", "experts"])
def test_a_missing_package_is_one_line(command):
    done = run_python("-S", *command)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    name = "torch" if len(command) == 1 else "numpy"
    assert f": error: {name} is not installed for {sys.executable}; pip install -e . " in line
