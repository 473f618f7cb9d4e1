"""The doctor must name what is there, what will run and what is wrong, and survive every broken package."""

import ast
import importlib.machinery
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from balancing.doctor import diagnosis, installed
from balancing.doctor.diagnosis import kernels, missing, problem
from balancing.doctor.installed import apex_state, find_apex, find_megatron, probe
from tests.support.patience import PATIENCE

REPOSITORY = Path(__file__).parents[2]
GIB = 2**30


def _facts(**changes: Any) -> dict[str, Any]:
    """A healthy node with 8 GPUs and every package, with `changes`."""
    facts: dict[str, Any] = {
        "python": "3.12.1",
        "torch": {
            "state": "ok",
            "version": "2.15.0+cu132",
            "cuda": "13.2",
            "nccl": "2.30.7",
            "gloo": True,
            "gpus": [{"name": "NVIDIA H200", "memory": 141 * GIB}] * 8,
            "cuda_flash": True,
            "cpu_flash": True,
            "grouped_mm": True,
        },
        "transformer_engine": {"state": "ok", "version": "2.19.0"},
        "flash_attn": {"state": "ok", "version": "2.8.3"},
        "apex": {"state": "ok", "version": "0.1"},
        "megatron": {"version": "0.19.2", "core": "/x/megatron/core", "training": True, "dataset_helper": "compiled"},
        "numpy": "2.5.5",
        "psutil": "7.2.2",
        "cores": 192,
        "memory": 2048 * GIB,
        "nvidia_driver": True,
        "compiler": "/usr/bin/gcc",
        "slurm": {"installed": True, "job": "42"},
        "launch": {"nodes": 4, "ranks_per_node": 8, "source": "torchrun"},
        "nics": [{"name": f"mlx5_{i}", "line_rate": 50e9, "kind": "InfiniBand or RoCE"} for i in range(12)],
    }
    return {**facts, **changes}


def _cpu(facts: dict[str, Any]) -> dict[str, Any]:
    torch = {**facts["torch"], "gpus": [], "cuda_flash": False}
    absent = {"state": "missing"}
    return {**facts, "torch": torch, "nvidia_driver": False, "transformer_engine": absent, "flash_attn": absent}


def _costs(facts: dict[str, Any]) -> dict[str, str]:
    return dict(missing(facts))


def test_a_complete_gpu_node_lacks_nothing():
    assert problem(_facts()) is None
    assert missing(_facts()) == []
    runs = kernels(_facts())
    assert "TEDotProductAttention (flash-attn, cuDNN" in runs["attention"]
    assert "TEGroupedMLP" in runs["experts"]
    assert "Transformer Engine" in runs["norm, optimizer"]


def test_without_transformer_engine_the_fallbacks_and_their_cost_are_named():
    facts = _facts(transformer_engine={"state": "missing"}, apex={"state": "missing", "version": None})
    assert problem(facts) is None
    assert kernels(facts)["attention"].startswith("DotProductAttention")
    assert kernels(facts)["experts"].startswith("SequentialMLP")
    assert kernels(facts)["norm, optimizer"] == "torch's; torch AdamW"
    assert "no FP8" in _costs(facts)["Transformer Engine"]
    assert "context-parallel" in _costs(facts)["Transformer Engine"]
    assert "slower optimizer" in _costs(facts)["Apex"]
    assert "Apex FusedAdam" in kernels(_facts(transformer_engine={"state": "missing"}))["norm, optimizer"]


def test_a_cpu_is_not_scolded_for_packages_that_need_a_gpu():
    facts = _cpu(_facts(apex={"state": "missing", "version": None}))
    assert problem(facts) is None
    assert list(_costs(facts)) == ["Transformer Engine"]
    assert kernels(facts)["attention"].startswith("DotProductAttention")
    assert "flash attention on CPU;" in kernels(facts)["torch's own"]


def test_transformer_engine_does_not_run_without_a_gpu():
    facts = {**_cpu(_facts()), "transformer_engine": {"state": "ok", "version": "2.19.0"}}
    assert kernels(facts)["attention"].startswith("DotProductAttention")


@pytest.mark.parametrize(
    ("changes", "what", "cost"),
    [
        ({"apex": {"state": "unrelated", "version": "0.9.10"}}, "apex", "pip uninstall apex"),
        ({"apex": {"state": "without kernels", "version": "0.1"}}, "Apex", "amp_C"),
        ({"flash_attn": {"state": "missing"}}, "flash-attn", "cuDNN"),
        ({"flash_attn": {"state": "broken", "error": "undefined symbol"}}, "flash-attn", "undefined symbol"),
        ({"compiler": None}, "C compiler", "Triton"),
        ({"psutil": None}, "psutil", "checkpoint"),
        ({"launch_error": "WORLD_SIZE='x'", "launch": None}, "launch", "WORLD_SIZE='x'"),
        ({"torch": {**_facts()["torch"], "version": "2.6.0"}}, "torch", "2.11 to 2.15"),
        ({"torch": {**_facts()["torch"], "version": "2.16.0a0"}}, "torch", "not tested"),
        ({"torch": {**_facts()["torch"], "nccl": None}}, "NCCL", "gloo"),
        ({"torch": {**_facts()["torch"], "gpus": []}}, "GPU", "sees no GPU"),
        ({"megatron": {**_facts()["megatron"], "dataset_helper": "absent"}}, "dataset helper", "--data-path"),
    ],
)
def test_what_does_not_stop_a_run_is_named_with_its_cost(changes, what, cost):
    facts = _facts(**changes)
    assert problem(facts) is None
    assert list(_costs(facts)) == [what]
    assert cost in _costs(facts)[what]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"python": "3.11.9"}, "Python 3.11.9 is too old; megatron-core needs 3.12"),
        ({"torch": {"state": "missing"}}, "torch is not installed"),
        ({"torch": {"state": "broken", "error": "libcudart.so.13"}}, "does not start (libcudart.so.13)"),
        ({"numpy": None}, "numpy is not installed"),
        ({"megatron": {"version": None, "core": None, "training": False}}, "pip install megatron-core==0.19.2"),
        ({"megatron": {**_facts()["megatron"], "version": "0.18.0"}}, "megatron-core 0.18.0 in /x/megatron/core"),
        ({"megatron": {**_facts()["megatron"], "training": False}}, "megatron.training is missing"),
        ({"transformer_engine": {"state": "broken", "error": "Aborted"}}, "Transformer Engine is installed but"),
    ],
)
def test_what_stops_a_run_is_one_line(changes, reason):
    facts = _facts(**changes)
    line = problem(facts)
    assert line is not None and reason in line and "\n" not in line
    assert kernels(facts) == {}, "nothing runs"


@pytest.mark.parametrize("worst", [False, True])
def test_one_screen(worst, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    facts = _facts()
    if worst:
        long = "ImportError: " + "x" * 187
        facts = _facts(
            transformer_engine={"state": "missing"},
            flash_attn={"state": "broken", "error": long},
            apex={"state": "unrelated", "version": "0.9"},
            torch={**facts["torch"], "version": "2.6.0+cu124", "nccl": None},
            megatron={**facts["megatron"], "dataset_helper": "absent"},
            psutil=None,
            launch_error="WORLD_SIZE=16 does not say how many ranks a node runs; start with torchrun",
        )
    monkeypatch.setattr(diagnosis, "examine", lambda: facts)
    assert diagnosis.main([]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert 15 <= len(lines) <= 40
    assert max(map(len, lines)) <= 100
    text = " ".join(" ".join(lines).split())
    for name, cost in missing(facts):
        assert name in text and " ".join(cost.split()[:4]) in text


def test_pypis_apex_is_not_nvidias(tmp_path, monkeypatch):
    folder = tmp_path / "apex"
    (folder / "lib").mkdir(parents=True)
    (folder / "__init__.py").write_text("raise RuntimeError('must not be imported')\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert find_apex()["state"] == "unrelated"
    for name in ("optimizers", "normalization"):
        (folder / name).mkdir()
    assert find_apex()["state"] == "without kernels"
    (tmp_path / "amp_C.py").write_text("")
    importlib.invalidate_caches()
    assert find_apex()["state"] == "ok"
    assert apex_state(None, built=False) == "missing"


@pytest.mark.parametrize(
    ("body", "error"),
    [
        ("raise ImportError('libcublas.so.13: cannot open')", "ImportError: libcublas.so.13: cannot open"),
        ("import os; os.abort()", "crashes: Aborted"),
        ("import sys; sys.exit(0)", "ends the process"),
        ("import sys; sys.stderr.buffer.write(b'\\xff\\xfe'); sys.exit(3)", "\ufffd"),
        ("import time; time.sleep(3600)", "hangs"),
        ("__version__ = '2.19'", "No module named 'transformer_engine.pytorch'"),
    ],
)
def test_a_broken_package_is_reported(body, error, tmp_path, monkeypatch):
    monkeypatch.setattr(installed, "_PROBE_SECONDS", 2 if "sleep" in body else PATIENCE)
    (tmp_path / "transformer_engine").mkdir()
    (tmp_path / "transformer_engine" / "__init__.py").write_text(body + "\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    found = probe("transformer_engine")
    assert found["state"] == "broken"
    assert error in found["error"] and "\n" not in found["error"]


def _fake_megatron(root: Path, version: str, *files: str) -> Path:
    core = root / "megatron" / "core"
    (core / "datasets").mkdir(parents=True)
    parts = zip(("MAJOR", "MINOR", "PATCH"), version.split("."), strict=True)
    (core / "package_info.py").write_text("".join(f"{name} = {number}\n" for name, number in parts))
    for name in files:
        (root / "megatron" / name).parent.mkdir(parents=True, exist_ok=True)
        (root / "megatron" / name).write_text("")
    return core


def test_a_checkout_on_the_path_goes_before_the_wheel(tmp_path, monkeypatch):
    core = _fake_megatron(tmp_path, "0.18.3", "core/datasets/Makefile", "training/__init__.py")
    monkeypatch.syspath_prepend(tmp_path)
    assert find_megatron() == {
        "version": "0.18.3",
        "core": str(core),
        "training": True,
        "dataset_helper": "compiles at start",
    }
    (core / "datasets" / f"helpers_cpp{importlib.machinery.EXTENSION_SUFFIXES[0]}").write_text("")
    assert find_megatron()["dataset_helper"] == "compiled"


def _doctor(*arguments: str, python: tuple[str, ...] = (), **environ: str) -> subprocess.CompletedProcess:
    clean = {key: value for key, value in os.environ.items() if not key.startswith(("SLURM_", "EMULATED_"))}
    for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        clean.pop(name, None)
    return subprocess.run(
        [sys.executable, *python, "-m", "balancing.doctor", *arguments],
        cwd=REPOSITORY,
        env={**clean, "COLUMNS": "100", **environ},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )


def test_this_machine_can_train():
    done = _doctor("--json", WORLD_SIZE="8", LOCAL_WORLD_SIZE="4", EMULATED_NICS_PER_NODE="2")
    facts = json.loads(done.stdout)
    assert done.returncode == 0, done.stderr
    assert facts["can_train"] and facts["problem"] is None
    assert facts["megatron"]["version"] == diagnosis.MEGATRON_CORE
    assert facts["torch"]["gloo"] is True
    assert facts["launch"] == {"nodes": 2, "ranks_per_node": 4, "source": "torchrun"}
    assert [nic["name"] for nic in facts["nics"]] == ["nic0", "nic1"]


def test_the_kernels_are_upstreams_own_choice():
    if importlib.util.find_spec("transformer_engine"):
        pytest.skip("with Transformer Engine upstream's choice needs a GPU to look at")
    code = """
import warnings; warnings.simplefilter("ignore")
from megatron.core.models.backends import LocalSpecProvider
from megatron.core import optimizer
local = LocalSpecProvider()
print(local.core_attention().__name__, local.grouped_mlp_modules(True).func.__name__, optimizer.Adam.__name__)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=PATIENCE, check=True)
    attention, experts, adam = done.stdout.split()[-3:]
    runs = kernels(_facts(transformer_engine={"state": "missing"}, apex={"state": "missing", "version": None}))
    assert runs["attention"].startswith(attention + ":")
    assert runs["experts"].startswith(experts + ",")
    assert adam in runs["norm, optimizer"]


def test_broken_surroundings_do_not_break_the_doctor(tmp_path):
    _fake_megatron(tmp_path, "0.18.0")
    for name, body in (("transformer_engine", "import os; os.abort()"), ("apex", ""), ("flash_attn", "1 / 0")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text(body + "\n")
    done = _doctor("--json", PYTHONPATH=str(tmp_path), SLURM_TASKS_PER_NODE="8(x3),4")
    facts = json.loads(done.stdout)
    assert done.returncode == 2 and not facts["can_train"]
    assert done.stderr.startswith("python -m balancing.doctor: error: megatron-core 0.18.0 in ")
    assert done.stderr.count("\n") == 1
    assert facts["transformer_engine"]["error"].endswith("Aborted")
    assert facts["flash_attn"]["error"] == "ZeroDivisionError: division by zero"
    assert facts["apex"]["state"] == "unrelated"
    assert "different numbers of tasks" in facts["launch_error"]


def test_it_speaks_where_nothing_is_installed():
    done = _doctor(python=("-S",))  # no site-packages: no torch, no rich
    assert done.returncode == 2
    assert (
        done.stderr.startswith("python -m balancing.doctor: error: torch is not installed")
        and done.stderr.count("\n") == 1
    )
    assert "cannot train yet" in done.stdout


@pytest.mark.parametrize("name", ["__init__", "launch", "doctor/diagnosis", "doctor/installed"])
def test_an_old_python_can_read_it(name):
    source = (REPOSITORY / "balancing" / f"{name}.py").read_text(encoding="utf-8")
    tree = ast.parse(source, feature_version=(3, 8))
    if name != "__init__":
        assert any(isinstance(node, ast.ImportFrom) and node.module == "__future__" for node in tree.body)
