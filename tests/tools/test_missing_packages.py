"""A Python without torch and numpy gets one line, not a traceback."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.patience import PATIENCE

ROOT = Path(__file__).parents[2]
COMMANDS = [[ROOT / "pretrain_gpt.py"], *(["-m", f"balancing.{name}"] for name in ("report", "layers", "experts"))]


@pytest.mark.parametrize("command", COMMANDS, ids=["pretrain_gpt.py", "report", "layers", "experts"])
def test_a_missing_package_is_one_line(command):
    without_packages = [sys.executable, "-S", *command]
    done = subprocess.run(without_packages, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    name = "torch" if len(command) == 1 else "numpy"
    assert f": error: {name} is not installed for {sys.executable}; pip install -e . " in line
