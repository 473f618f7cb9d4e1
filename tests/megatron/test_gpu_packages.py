"""A machine with packages for GPUs trains on the CPU as one without them, bit for bit, whether they work or not."""

import ast
import json
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from balancing.doctor.installed import find_megatron, find_torch
from megatron.balanced.cpu.packages import GPU_PACKAGES
from tests.support.command import run_python
from tests.support.packages_apart import folder, version, why_missing
from tests.support.pool import Pool
from tests.support.training import MOCK_DATA, MODEL, MOE, RankRun, assert_same, join, train, train_rank

# Imported by megatron-core and megatron.training, and chosen by flags or computing on no device.
OTHERS = set(
    "absl boto3 botocore cuda cupy datasets einops emerging_optimizers flask flask_restful hypercorn megatron modelopt "
    "msgpack multistorageclient nemo nixl numpy nvidia_resiliency_ext nvshmem omegaconf one_logger orjson packaging "
    "psutil pynvml quart sentencepiece tensorrt_llm tiktoken torch torch_memory_saver tqdm transformers triton "
    "typing_extensions userlib wandb wget workload_inspector yaml zmq zstandard".split()
)
# Norms, rotary embeddings, routers, permutations, softmax, clipping and a fused optimizer: what a GPU has kernels for.
FLAGS = "--bf16 --use-distributed-optimizer --normalization RMSNorm --moe-aux-loss-coeff 1e-2 --qk-layernorm"
ARGV = [*MODEL, *MOCK_DATA, *MOE, *FLAGS.split()]


def _imported(megatron: Path, harmless: set[str]) -> set[str]:
    """The packages that files below `megatron` import, besides Python's own and the harmless."""
    names: set[str] = set()
    for file in (each for part in ("core", "training") for each in (megatron / part).rglob("*.py")):
        text = file.read_text()
        seems = set(re.findall(r"^\s*(?:from|import)\s+(\w+)", text, re.M)) - sys.stdlib_module_names - harmless - names
        if seems:  # or a line of prose
            for node in ast.walk(ast.parse(text)):
                if isinstance(node, ast.Import):
                    names |= seems & {alias.name.split(".")[0] for alias in node.names}
                elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                    names |= seems & {node.module.split(".")[0]}
    return names


@pytest.mark.filterwarnings("ignore::SyntaxWarning")
@pytest.mark.parametrize("release", ["installed", "megatron_core", "megatron_core_0_18"])
def test_each_package_that_megatron_imports_is_hidden_or_known_to_be_harmless(release):
    """A new release may choose by another package for GPUs: then it is to be hidden, too."""
    if release == "installed":
        place = Path(find_megatron()["core"]).parent
    else:
        if why := why_missing(release, "megatron-core", "megatron_core"):
            pytest.skip(why)
        place = folder(release) / "megatron"
    found = _imported(place, OTHERS)
    assert {"transformer_engine", "apex"} <= found
    assert found <= {*GPU_PACKAGES}, "hide these on the CPU device, or add them to OTHERS"
    if release == "installed":
        assert found == {*GPU_PACKAGES}, "no longer imported"


@pytest.fixture(scope="module")
def broken(tmp_path_factory) -> str:
    """A folder with every package for GPUs, none of which can be imported."""
    place = tmp_path_factory.mktemp("broken")
    for name in GPU_PACKAGES:
        (place / name).mkdir()
        (place / name / "__init__.py").write_text(f"raise OSError('{name} was looked for')\n")
    return str(place)


def test_packages_are_hidden_until_the_device_is_released(broken, tmp_path):
    """Also what was imported before, and where a part of it is imported by its full name."""
    (tmp_path / "apex").mkdir()
    (tmp_path / "apex/__init__.py").write_text("")
    (tmp_path / "apex/optimizers.py").write_text("")
    code = """
        import importlib.util, json, sys
        import apex.optimizers
        from balancing.doctor.installed import find_apex
        from megatron.balanced.cpu import device, packages
        def outcomes():
            found = {}
            for name in [*packages.GPU_PACKAGES, "apex.optimizers", "transformer_engine.pytorch"]:
                try:
                    __import__(name)
                    found[name] = "imported"
                except Exception as error:
                    found[name] = type(error).__name__
            return found
        before, first = outcomes(), sys.modules["apex.optimizers"]
        device.use_cpu()
        device.use_cpu()
        hidden = outcomes()
        specs = [importlib.util.find_spec(name) for name in packages.GPU_PACKAGES]
        state = find_apex()["state"]
        device.release_cpu()
        same = sys.modules["apex.optimizers"] is first
        print(json.dumps(dict(before=before, hidden=hidden, specs=specs, state=state, same=same, after=outcomes())))
    """
    paths = os.pathsep.join([str(tmp_path), broken, os.environ.get("PYTHONPATH", "")])
    done = run_python("-W", "ignore", "-c", re.sub(r"^ {8}", "", code, flags=re.M), PYTHONPATH=paths)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert set(found["hidden"].values()) == {"ModuleNotFoundError"}
    assert found["before"] == found["after"] and found["same"]
    assert found["before"]["apex.optimizers"] == "imported" and found["before"]["transformer_engine"] == "OSError"
    assert not any(found["specs"]) and found["state"] == "missing"


def test_training_does_not_look_for_packages_that_are_broken(pool, broken):
    own = Pool(first=[broken])
    try:
        assert_same(train(own, 1, base=ARGV, parameters=True), train(pool, 1, base=ARGV, parameters=True))
    finally:
        own.stop()


# As on a machine whose torch finds a GPU.
ON_A_GPU = """
import torch
from megatron.balanced.trainer import arguments
arguments.choose_device = lambda requested: "cuda"
torch.cuda.get_device_name = lambda: "a GPU"
import pretrain_gpt
pretrain_gpt.main()
"""


def test_a_run_on_gpus_says_which_package_is_broken(broken):
    paths = os.pathsep.join([broken, os.environ.get("PYTHONPATH", "")])
    done = run_python("-W", "ignore", "-c", ON_A_GPU, *ARGV, PYTHONPATH=paths)
    line = (
        r"pretrain_gpt.py: error: (Transformer Engine|Apex): broken, OSError: \w+ was looked for; reinstall or unin.+\n"
    )
    assert done.returncode == 2 and re.fullmatch(line, done.stderr)


def test_so_does_one_whose_transformer_engine_megatron_takes_for_missing(tmp_path, monkeypatch):
    from megatron.balanced.trainer.checks.machine import _without_transformer_engine

    assert "not installed" in str(_without_transformer_engine())
    (tmp_path / "transformer_engine").mkdir()
    (tmp_path / "transformer_engine/__init__.py").write_text("raise ImportError('undefined symbol: _ZN2at')\n")
    monkeypatch.syspath_prepend(tmp_path)
    line = str(_without_transformer_engine())
    assert line.startswith("Transformer Engine: broken, ImportError: undefined symbol: _ZN2at; reinstall or uninstall")
    assert line.endswith(", or use --transformer-impl local")


@pytest.fixture(scope="module")
def real() -> Iterator[tuple[Pool, Pool]]:
    """Ranks that could import a Transformer Engine with its libraries, and ranks of the same PyTorch that could not."""
    place, own = os.environ.get("REAL_TRANSFORMER_ENGINE"), find_torch()["version"] or ""
    torch = [] if own.startswith(version("torch_2_11", "torch")) else [str(folder("torch_2_11"))]
    if not place:
        pytest.skip("no real Transformer Engine: REAL_TRANSFORMER_ENGINE names none")
    if torch and (why := why_missing("torch_2_11", "torch", "torch")):
        pytest.skip(f"no real Transformer Engine: {why}")
    with_it = Pool(first=[place, *torch, str(folder("transformer_engine"))])
    without = Pool(first=torch)
    yield with_it, without
    with_it.stop()
    without.stop()


def _train_beside_it(argv: list[str]) -> tuple[RankRun, str]:
    """The run, and the version of Transformer Engine that the rank can import once the device is released."""
    run = train_rank(argv, True, True)
    assert not [name for name, module in sys.modules.items() if module and name.split(".")[0] in GPU_PACKAGES]

    from megatron.balanced.cpu.device import release_cpu

    release_cpu()
    import transformer_engine.pytorch
    import transformer_engine_torch

    assert transformer_engine_torch.__file__.endswith(".so"), "a stand-in"
    return run, transformer_engine.__version__


def _loop(folder: Path) -> list[float]:
    from tests.support.plain_loop import train

    folder.mkdir(exist_ok=True)
    return train(2, folder)[0]


def test_training_beside_a_real_transformer_engine(real, tmp_path):
    """By command line and in a plain loop."""
    with_it, without = real
    found: list[tuple[RankRun, Any]] = with_it.run(2, _train_beside_it, ARGV)
    assert all(re.match(r"2\.\d+\.\d+", seen) for _, seen in found)
    assert_same(join([run for run, _ in found]), join(without.run(2, train_rank, ARGV, True, True)))
    losses = [each.run(4, _loop, tmp_path / name) for name, each in (("with", with_it), ("without", without))]
    assert losses[0] == losses[1] and any(losses[0])
