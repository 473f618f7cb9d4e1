"""The doctor must name what is there, what will run and what is wrong, and survive every broken package."""

import ast
import contextlib
import importlib
import importlib.machinery
import importlib.metadata
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

from balancing.doctor import installed
from balancing.doctor.broken import broken, broken_import
from balancing.doctor.installed import find_apex, find_megatron, find_torch, lacks, use_megatron_core
from balancing_tools import doctor
from balancing_tools.doctor import PROBES, kernels, missing, probe, problem
from tests.support.patience import PATIENCE

REPOSITORY = Path(__file__).parents[2]
TORCH_HERE = find_torch()["version"]
ERROR = "python -m balancing.doctor: error: "


def _facts(**changes: Any) -> dict[str, Any]:
    """A healthy node with 8 GPUs and every package, with `changes`."""
    card = {"name": "NVIDIA H200", "memory": 141 << 30}
    facts: dict[str, Any] = {
        "python": "3.12.1",
        "torch": {
            "state": "ok",
            "version": "2.15.0+cu132",
            "cuda": "13.2",
            "nccl": "2.30.7",
            "built": "2.30.7",
            "gpus": [card] * 8,
        },
        "transformer_engine": {"state": "ok", "version": "2.19.0"},
        "flash_attn": {"state": "ok", "version": "2.8.3"},
        "flash_attention_4": {"version": "4.0.0b36", "lacks": []},
        "apex": {"state": "ok", "version": "0.1"},
        "triton": {"state": "ok", "version": "3.8.0"},
        "megatron": {"version": "0.19.2", "core": "/x/megatron/core", "training": True, "dataset_helper": "compiled"},
        "lacks": [],
        "cores": 192,
        "nvidia_driver": True,
        "compiler": "/usr/bin/gcc",
    }
    return {**facts, **changes}


def _without_engine(**changes: Any) -> dict[str, Any]:
    return _facts(transformer_engine={"state": "missing"}, apex={"state": "missing", "version": None}, **changes)


def test_a_complete_gpu_node_lacks_nothing():
    assert problem(_facts()) is None
    assert missing(_facts()) == {}
    runs = kernels(_facts())
    assert "TEDotProductAttention (flash-attn, cuDNN" in runs["attention"]
    assert runs["attention"].endswith(
        "; with --balance-sequences the fastest of cuDNN, FlashAttention 4 (on Hopper and Blackwell), flash-attn and "
        "torch's flash attention, measured at the start"
    )
    assert "TEGroupedMLP" in runs["experts"]


def test_what_flash_attention_4_lacks_is_named(tmp_path, monkeypatch):
    """Its packages are those of the extra [gpu]."""
    asked = (Path(__file__).parents[2] / "setup.py").read_text()
    assert all(f'"{name}"' in asked for name in installed.FLASH_ATTENTION_4)
    monkeypatch.syspath_prepend(tmp_path)
    assert installed.find_flash_attention_4() == {"version": None, "lacks": []}
    for name in ("flash-attn-4", "quack-kernels", "nvidia-cutlass-dsl", "apache-tvm-ffi", "torch-c-dlpack-ext"):
        folder = tmp_path / f"{name.replace('-', '_')}-4.0.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Name: {name}\nVersion: 4.0\n")
    found = installed.find_flash_attention_4()
    names = "nvidia-cutlass-dsl-libs-core nvidia-cutlass-dsl-libs-base nvidia-cutlass-dsl-libs-cu13"
    assert found == {"version": "4.0", "lacks": names.split()}
    told = missing(_facts(flash_attention_4=found))
    assert told == {"FlashAttention 4": f"does not run without its packages: pip install {names}"}
    assert "FlashAttention 4" not in kernels(_facts(flash_attention_4=found))["attention"]
    assert missing(_facts(flash_attention_4={"version": None, "lacks": []})) == {}


@pytest.mark.parametrize(
    ("facts", "what", "cost"),
    [
        (_without_engine(), "Transformer Engine", "no FP8"),
        (_facts(apex={"state": "unrelated", "version": "0.9.10"}), "apex", "pip uninstall apex"),
        (_facts(apex={"state": "without kernels", "version": "0.1"}), "Apex", "amp_C"),
        (_facts(flash_attn={"state": "missing"}), "flash-attn", "cuDNN"),
        (_facts(flash_attn={"state": "broken", "error": "undefined symbol"}), "flash-attn", "undefined symbol"),
        (
            _facts(triton={"state": "broken", "error": "no compiler"}),
            "Triton",
            "broken (no compiler); attention results",
        ),
        (_facts(compiler=None), "C compiler", "Triton"),
        (_facts(torch=_facts()["torch"] | {"version": "2.16.0a0"}), "torch", "not tested; 2.10 to 2.15 are"),
        (_facts(torch=_facts()["torch"] | {"gpus": []}), "GPU", "sees no GPU"),
    ],
)
def test_what_does_not_stop_a_run_is_named_with_its_cost(facts, what, cost):
    assert problem(facts) is None
    assert list(missing(facts)) == [what] and cost in missing(facts)[what]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"lacks": ["torch>=2.10", "numpy"]}, "missing: torch>=2.10, numpy; 'pip install -e .'"),
        (
            {"torch": {"state": "broken", "error": "libcudart.so.13"}},
            ": broken, libcudart.so.13; reinstall or uninstall",
        ),
        (
            {"transformer_engine": {"state": "broken", "error": "Aborted"}},
            "Transformer Engine: broken, Aborted; reinst",
        ),
        ({"megatron": _facts()["megatron"] | {"state": "broken", "error": "Apex 0.1: broken"}}, "Apex 0.1: broken"),
    ],
)
def test_what_stops_a_run_is_one_line(changes, reason):
    line = problem(_facts(**changes))
    assert line is not None and reason in line and "\n" not in line
    assert kernels(_facts(**changes)) == {}, "nothing runs"


def test_without_a_gpu_a_broken_package_for_gpus_stops_no_run():
    facts = _facts(transformer_engine={"state": "broken", "error": "Aborted"})
    facts["torch"]["gpus"], facts["nvidia_driver"] = [], False
    assert problem(facts) is None
    assert kernels(facts)["attention"].startswith("DotProductAttention")


def _package(folder: Path, body: str = "") -> None:
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text(body + "\n")


CUDNN = (
    "OSError: {}/libcudnn_heuristic.so.9: undefined symbol: "
    "_ZNK5cudnn7backend23PagedCacheLoadOperation16get_kPageTableIDEv, version libcudnn_graph.so.9"
)
OF_TORCH = "ImportError: /x/y.so: undefined symbol: _ZN3c104cuda29c10_cuda_check_implementationEiPKcS2_jb"


@pytest.mark.parametrize(
    ("error", "remedy"),
    [
        (CUDNN.format("/lib/x86_64-linux-gnu"), "two cuDNNs are installed: set CUDNN_HOME={0}/cudnn and put "
         "{0}/cudnn/lib first in LD_LIBRARY_PATH"),
        (CUDNN.format("{0}/cudnn/lib"), "reinstall or uninstall it"),
        ("OSError: libnccl.so.2: cannot open shared object file: No such file", "add {0}/nccl/lib to LD_LIBRARY_PATH"),
        ("OSError: libmpi.so.40: cannot open shared object file", "install the package that has libmpi.so.40, or add "),
        (OF_TORCH, f"it is built for another torch than {TORCH_HERE}: install the build for this one"),
        ("its import ends with exit code -6", "reinstall or uninstall it"),
    ],
)  # fmt: skip
def test_a_broken_package_has_a_remedy(error, remedy, tmp_path, monkeypatch):
    for file in ("cudnn/lib/libcudnn_graph.so.9", "nccl/lib/libnccl.so.2"):
        (tmp_path / file).parent.mkdir(parents=True)
        (tmp_path / file).write_text("")
    spec = importlib.machinery.ModuleSpec("nvidia", None, is_package=True)
    spec.submodule_search_locations = [str(tmp_path)]
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec if name == "nvidia" else found(name))
    line = broken("flash_attn", error.format(tmp_path))
    assert line.startswith(f"flash-attn: broken, {error.format(tmp_path)}; {remedy.format(tmp_path)}")


def test_an_error_of_an_import_is_of_the_innermost_package(tmp_path, monkeypatch):
    _package(tmp_path / "apex", "import flash_attn.part")
    _package(tmp_path / "flash_attn")
    (tmp_path / "flash_attn/part.py").write_text("import ctypes; ctypes.CDLL('/no/such/libx.so')\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(OSError) as caught:
        importlib.import_module("apex")
    told = "flash-attn: broken, OSError: /no/such/libx.so: cannot open shared object file: No such file or directory; "
    assert (broken_import(caught.value) or "").startswith(told)
    for name in ("apex", "flash_attn", "flash_attn.part"):
        sys.modules.pop(name, None)
    assert broken_import(OSError("from elsewhere")) is None


def test_pypis_apex_is_not_nvidias(tmp_path, monkeypatch):
    assert find_apex()["state"] == "missing"
    _package(tmp_path / "apex", "raise RuntimeError('must not be imported')")
    monkeypatch.syspath_prepend(tmp_path)
    assert find_apex()["state"] == "unrelated"
    for name in ("optimizers", "normalization"):
        (tmp_path / "apex" / name).mkdir()
    assert find_apex()["state"] == "without kernels"
    (tmp_path / "amp_C.py").write_text("")
    importlib.invalidate_caches()
    assert find_apex()["state"] == "ok"


@pytest.mark.parametrize(
    ("body", "error"),
    [
        ("raise ImportError('libcublas.so.13: cannot open')", "ImportError: libcublas.so.13: cannot open"),
        ("import os; os.abort()", "exit code -6"),
        ("import sys; sys.exit(0)", "exit code 0"),
        ("import sys; sys.stderr.buffer.write(b'\\xff\\xfe'); sys.exit(3)", "\ufffd"),
        ("import time; time.sleep(3600)", "hangs"),
        ("__version__ = '2.19'", "No module named 'transformer_engine.pytorch'"),
    ],
)
def test_a_broken_package_is_reported(body, error, tmp_path, monkeypatch):
    monkeypatch.setattr(doctor, "_PROBE_SECONDS", 2 if "sleep" in body else PATIENCE)
    _package(tmp_path / "transformer_engine", body)
    _package(tmp_path / "torch")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    found = probe("transformer_engine", PROBES["transformer_engine"])
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


COMPILED = f"core/datasets/helpers_cpp{importlib.machinery.EXTENSION_SUFFIXES[0]}"


def test_a_checkout_on_the_path_goes_before_the_wheel(tmp_path, monkeypatch):
    core = _fake_megatron(tmp_path, "0.18.3", "core/datasets/Makefile", "training/__init__.py")
    monkeypatch.syspath_prepend(tmp_path)
    found = {"version": "0.18.3", "core": str(core), "training": True, "dataset_helper": "compiles at start"}
    assert find_megatron() == found
    (tmp_path / "megatron" / COMPILED).write_text("")
    assert find_megatron()["dataset_helper"] == "compiled"
    assert lacks("train") == [f"megatron-core=={installed.MEGATRON_CORE} (0.18.3 is in {core})"]


@pytest.mark.parametrize("given", ["wheel", "folder of the wheel", "checkout"])
def test_megatron_core_of_the_environment_goes_before_what_is_installed(given, tmp_path, monkeypatch):
    source, wheels = tmp_path / "source", tmp_path / "wheels"
    _fake_megatron(source, "0.19.7", COMPILED, "training/__init__.py")
    wheels.mkdir()
    wheel = wheels / "megatron_core-0.19.7-cp312-cp312-linux_x86_64.whl"
    with zipfile.ZipFile(wheel, "w") as packed:
        for file in sorted(source.rglob("*")):
            packed.write(file, file.relative_to(source))
    place = {"wheel": wheel, "folder of the wheel": wheels, "checkout": source}[given]
    monkeypatch.setenv("MEGATRON_CORE", str(place))
    monkeypatch.setenv("PYTHONPATH", "/theirs")
    monkeypatch.setattr(installed.tempfile, "gettempdir", lambda: str(tmp_path))
    monkeypatch.setattr(sys, "path", list(sys.path))
    for _ in range(2):  # the second time it is unpacked
        folder = use_megatron_core()
        assert folder is not None and sys.path[0] == folder
        assert os.environ["PYTHONPATH"] == f"{folder}:/theirs"
    assert find_megatron()["core"] == f"{folder}/megatron/core"
    assert find_megatron()["version"] == "0.19.7" and find_megatron()["dataset_helper"] == "compiled"


def test_megatron_core_of_the_environment_must_be_one(tmp_path, monkeypatch):
    broken = tmp_path / "megatron_core-1.whl"
    broken.write_text("no zip")
    monkeypatch.setattr(installed.tempfile, "gettempdir", lambda: str(tmp_path))
    for place, words in ((tmp_path / "nowhere", "is no wheel"), (broken, "is damaged")):
        done = _doctor("--need", "train", MEGATRON_CORE=str(place), TMPDIR=str(tmp_path))
        assert (done.returncode, done.stdout) == (2, "")
        assert done.stderr.startswith(f"{ERROR}MEGATRON_CORE=") and done.stderr.count("\n") == 1
        assert words in done.stderr


def test_what_a_task_needs_is_told_without_importing_it(tmp_path, monkeypatch):
    """The names of setup.py, of those whose modules are not there; torch by its version and what it is built for."""
    assert lacks("test") == [] and find_torch()["cuda"]
    for name in ("torch", "einops", "yaml", "xdist"):
        _package(tmp_path / name, "raise RuntimeError('must not be imported')")
    for version, words in (
        ("2.8.1+cpu", "torch>=2.10 (2.8.1+cpu is installed)"),
        ("2.12.0+cpu", "a torch with CUDA (2.12.0+cpu is for CPUs)"),
    ):
        (tmp_path / "torch/version.py").write_text(f"__version__ = '{version}'\ncuda: Optional[str] = None\n")
        done = _doctor("--need", "gpu", PYTHONPATH=str(tmp_path))
        assert (done.returncode, done.stdout) == (2, "")
        assert done.stderr.endswith(f" lacks {words}\n") and done.stderr.count("\n") == 1
    assert _doctor("--need", "train", PYTHONPATH=str(tmp_path)).returncode == 0
    found = installed.importlib.util.find_spec
    gone = ("yaml", "xdist")
    monkeypatch.setattr(installed.importlib.util, "find_spec", lambda name: None if name in gone else found(name))
    assert lacks("test") == ["pyyaml", "pytest-xdist"]


def test_the_needs_are_those_of_the_package():
    text = (REPOSITORY / "setup.py").read_text().partition("extras_require")[0]
    wanted = set(re.findall(r'^        "([\w-]+)[^"]*",', text, re.M)) - {"torch", "megatron-core"}
    train = {installed._DISTRIBUTIONS.get(name, name) for name in installed.NEEDS["train"]}
    assert train - {"packaging"} == wanted, "megatron-core asks for packaging"
    assert f"torch>={installed._dotted(installed.TORCH[0])}.0a0,<2.{installed.TORCH[1][1] + 1}" in text


def _doctor(*arguments: str, python: tuple[str, ...] = (), **environ: str) -> subprocess.CompletedProcess:
    """Run the doctor. PYTHONPATH: folders before those that tests have, in which megatron-core may lie."""
    paths = [environ.get("PYTHONPATH"), os.environ.get("PYTHONPATH")]
    environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    return subprocess.run(
        [sys.executable, *python, "-m", "balancing.doctor", *arguments],
        cwd=REPOSITORY, env={**os.environ, **environ}, capture_output=True, text=True, timeout=PATIENCE,
    )  # fmt: skip


def test_this_machine_can_train():
    done = _doctor()
    assert (done.returncode, done.stderr) == (0, "")
    assert "this machine can train" in done.stdout and installed.MEGATRON_CORE in done.stdout
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):  # of a torch that has another NCCL
        nccl = importlib.metadata.version(f"nvidia-nccl-cu{str(find_torch()['cuda'])[:2]}")
        assert f", NCCL {nccl}\n" in done.stdout
    assert max(map(len, done.stdout.splitlines())) < 200 and len(done.stdout.splitlines()) < 25
    assert _doctor("--need", "test").stdout.splitlines()[0] == sys.executable


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
    runs = kernels(_without_engine())
    assert runs["attention"].startswith(attention + ":")
    assert runs["experts"].startswith(experts + ",")
    assert adam in runs["norm, optimizer"]


# What the doctor asks a torch on a node with one GPU.
TORCH_WITH_A_GPU = """
import sys, types
__version__ = "2.12.0"
sys.modules["torch.distributed"] = distributed = types.SimpleNamespace(is_nccl_available=lambda: True)
version = types.SimpleNamespace(cuda="13.0")
card = types.SimpleNamespace(name="NVIDIA H100", total_memory=80e9)
cuda = types.SimpleNamespace(device_count=lambda: 1, get_device_properties=lambda i: card, is_available=lambda: True,
    nccl=types.SimpleNamespace(version=lambda: (2, 28, 9)))
"""


def test_a_gpu_node_whose_packages_are_broken(tmp_path):
    """Each is imported, and what came of it is told: a version alone says nothing."""
    errors = {
        "transformer_engine": f"raise OSError({CUDNN.format('/lib')[9:]!r})",
        "flash_attn": f"raise ImportError({OF_TORCH[13:]!r})",
        "amp_C": "raise OSError('libcudart.so.11.0: cannot open shared object file')",
        "triton": "import os; os.abort()",
    }
    for name, body in errors.items():
        _package(tmp_path / name, body)
    _package(tmp_path / "torch", TORCH_WITH_A_GPU)
    (tmp_path / "torch/version.py").write_text("__version__ = '2.12.0'\ncuda: Optional[str] = '13.0'\n")
    for name in ("optimizers", "normalization", "multi_tensor_apply"):
        _package(tmp_path / "apex" / name)
    (tmp_path / "transformer_engine-2.20.2.dist-info").mkdir()
    (tmp_path / "transformer_engine-2.20.2.dist-info/METADATA").write_text("Name: x\nVersion: 2.20.2\n")
    core = _fake_megatron(tmp_path / "source", installed.MEGATRON_CORE, COMPILED, "training/__init__.py")
    (core / "__init__.py").write_text("import transformer_engine\n")

    done = _doctor(PYTHONPATH=str(tmp_path), MEGATRON_CORE=str(tmp_path / "source"))
    told = dict(re.findall(r"^  ([\w-]+(?: Engine)?) +(.+)$", done.stdout, re.M))
    assert (done.returncode, told["torch"]) == (2, "2.12.0, CUDA 13.0, NCCL 2.28.9")
    assert "1 x NVIDIA H100" in told["device"]
    assert told["Transformer Engine"].startswith("2.20.2: broken, OSError: /lib/libcudnn_heuristic.so.9: undefined")
    assert told["flash-attn"].startswith("broken, ImportError: /x/y.so: undefined symbol")
    assert told["flash-attn"].endswith("; it is built for another torch than 2.12.0: install the build for this one")
    assert told["Apex"].startswith("broken, OSError: libcudart.so.11.0: cannot open shared object file; ")
    assert "broken, its import ends with exit code -6" in told["Triton"]
    assert done.stderr == f"{ERROR}Transformer Engine {told['Transformer Engine']}\n"

    (tmp_path / "transformer_engine/__init__.py").unlink()  # megatron-core alone is broken then
    (core / "__init__.py").write_text("import apex.optimizers\n")
    (tmp_path / "apex/optimizers/__init__.py").write_text("raise RuntimeError('no kernels')\n")
    _package(tmp_path / "transformer_engine/pytorch")
    done = _doctor(PYTHONPATH=str(tmp_path), MEGATRON_CORE=str(tmp_path / "source"))
    assert done.returncode == 2 and done.stderr.startswith(f"{ERROR}Apex: broken, RuntimeError: no kernels; reinstall")


def test_it_speaks_where_nothing_is_installed():
    done = _doctor(python=("-S",))  # no site-packages
    assert done.returncode == 2
    assert done.stderr.startswith(f"{ERROR}missing: torch>=2.10, ") and done.stderr.count("\n") == 1
    assert "this machine cannot train" in done.stdout


_OLD = ("__init__", "command_line", "doctor/__main__", "doctor/broken", "doctor/installed")


@pytest.mark.parametrize(
    "name", [*(f"balancing/{name}" for name in _OLD), "balancing_tools/__init__", "balancing_tools/doctor"]
)
def test_an_old_python_can_read_it(name):
    source = (REPOSITORY / f"{name}.py").read_text(encoding="utf-8")
    tree = ast.parse(source, feature_version=(3, 8))
    if "/doctor" in name and "__main__" not in name:
        assert any(isinstance(node, ast.ImportFrom) and node.module == "__future__" for node in tree.body)
