"""The entry point that verl loads: nothing unless asked for, and never silently unbalanced."""

import os
import re
import subprocess
import sys
from pathlib import Path

MODULE = "megatron.balanced.loops.verl_plugin"


def _load(**variables: str) -> subprocess.CompletedProcess:
    program = f"import sys; import {MODULE}; print('torch' in sys.modules)"
    return subprocess.run(
        [sys.executable, "-c", program], env=os.environ | variables, capture_output=True, text=True, timeout=300
    )


def test_the_package_has_the_entry_point():
    setup = (Path(__file__).resolve().parents[2] / "setup.py").read_text()
    assert re.findall(r'"verl\.plugins": \["balanced = (.+)"\]', setup) == [MODULE]


def test_it_does_nothing_for_another_vendor():
    done = _load(VERL_ENGINE_VENDOR="nvidia", MEGATRON_BALANCE="no JSON")
    assert (done.returncode, done.stdout.strip()) == (0, "False"), done.stderr


def test_what_is_wrong_ends_the_process_in_one_line():
    """Whatever is wrong with the settings, which `test_settings.py` has."""
    done = _load(VERL_ENGINE_VENDOR="balanced", MEGATRON_BALANCE='{"experts": {"slots": 1}}')
    assert done.returncode == 1
    line = done.stderr.strip().splitlines()[-1]
    assert line.startswith("megatron-balance: ") and "has a setting of experts that" in line
