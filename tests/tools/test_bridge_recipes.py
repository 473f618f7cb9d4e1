"""The page of recipes counts what the checks say of the recipes in the pinned Megatron-Bridge."""

import subprocess
import sys

import pytest

from tests.support.bridge_recipes import PAGE
from tests.support.packages_apart import why_missing
from tests.support.patience import PATIENCE

WRITE = "import sys; from tests.support.bridge_recipes import written; sys.stdout.write(written())"


def test_the_page_of_recipes_is_current():
    """To write it anew: python -m tests.support.bridge_recipes"""
    for name, title in (("transformer_engine", "Transformer Engine"), ("megatron_bridge", "Megatron-Bridge")):
        if why := why_missing(name, title):
            pytest.skip(why)
    done = subprocess.run(
        [sys.executable, "-c", WRITE], capture_output=True, text=True, timeout=2 * PATIENCE, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.endswith(PAGE.read_text()), "run python -m tests.support.bridge_recipes"
