"""The parts of the acceptance run on the CPU device, so that on a GPU nothing but the GPU is new."""

import json
import subprocess
import sys

import pytest

from tests.gpu.__main__ import run_part
from tests.gpu.parts import PARTS
from tests.gpu.trial import Machine, Notes
from tests.support.patience import PATIENCE
from tests.support.pool import REPOSITORY


@pytest.mark.exhaustive
@pytest.mark.parametrize("part", PARTS, ids=lambda part: part.name)
def test_a_part_on_the_cpu_device(part, request, tmp_path):
    """te-context needs Transformer Engine's own Python over stand-ins for its kernels."""
    pool = request.getfixturevalue("engine" if part.name == "te-context" else "pool")
    results = tmp_path / "results.jsonl"
    word, said, runs = run_part(part, pool, Machine(), Notes(part.name, results), 3 * PATIENCE)
    lines = [json.loads(line) for line in results.read_text().splitlines()] if results.exists() else []
    if word == "not run":
        pytest.skip(said)
    assert word == "passed", "\n".join([said, *(line["detail"] for line in lines if "detail" in line)])
    assert any("figure" in line for line in lines) and runs <= sum("at" in line for line in lines)


def test_what_starts_the_parts_does_not_import_torch():
    """Which takes long beside a GPU, and the server that ranks are forks of has it."""
    modules = sorted({f"tests.gpu.{part.test.partition('.')[0]}" for part in PARTS if ":" not in part.test})
    modules += ["tests.gpu.__main__", "tests.gpu.machine"]
    code = f"import importlib, sys\nfor name in {modules}: importlib.import_module(name)\n"
    code += "sys.exit(' '.join({'torch', 'megatron.core', 'pytest'} & {*sys.modules}) or 0)"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, timeout=PATIENCE
    )
    assert done.returncode == 0, done.stderr
