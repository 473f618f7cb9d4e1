"""The README's `pip install -e .` as in a container with PyTorch: with a file of constraints, and no package index."""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import distributions
from pathlib import Path

import pytest

from tests.support.patience import PATIENCE

REPOSITORY = Path(__file__).resolve().parents[2]
_BUILDS = "pip", "setuptools", "_distutils_hack"  # what builds a package, which a container has
Install = Callable[[str], "subprocess.CompletedProcess[str]"]


@pytest.fixture
def install(tmp_path: Path) -> Install:
    """Installs a copy of the checkout where all other packages are installed, PyTorch in the given version."""

    def run(torch: str) -> "subprocess.CompletedProcess[str]":
        checkout, container, machine = (tmp_path / name for name in ("checkout", "container", "machine"))
        for name in ("balancing", "balancing_tools", "megatron", "setup.py", "pyproject.toml", "README.md", "LICENSE"):
            source = REPOSITORY / name
            if source.is_dir():
                shutil.copytree(source, checkout / name, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy(source, checkout / name)
        shutil.copy(REPOSITORY / "pretrain_gpt.py", checkout)
        container.mkdir()
        constraints = []
        for each in distributions():
            if each.name.lower() == "megatron-balance":
                continue
            version = torch if each.name == "torch" else each.version
            folder = container / f"{each.name.replace('-', '_')}-{version}.dist-info"
            folder.mkdir(exist_ok=True)
            (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {each.name}\nVersion: {version}\n")
            (folder / "INSTALLER").write_text("pip\n")
            (folder / "entry_points.txt").write_text(each.read_text("entry_points.txt") or "")
            constraints.append(f"{each.name}=={version}\n")
            for name in _BUILDS:
                package = Path(str(each.locate_file(name)))
                if package.is_dir() and not (container / name).exists():
                    (container / name).symlink_to(package)
        (tmp_path / "constraint.txt").write_text("".join(sorted(set(constraints))))
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", machine], check=True, timeout=PATIENCE)
        (packages,) = machine.glob("lib/python*/site-packages")
        (packages / "container.pth").write_text(f"{container}\n")
        command = [machine / "bin/python", "-m", "pip", "install", "--no-build-isolation", "--no-index", "-e", checkout]
        environment = {"PATH": os.environ["PATH"], "HOME": str(tmp_path), "PIP_DISABLE_PIP_VERSION_CHECK": "1",
                       "PIP_CONSTRAINT": str(tmp_path / "constraint.txt")}  # fmt: skip
        return subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, env=environment, cwd=tmp_path)

    return run


@pytest.mark.parametrize("torch", ["2.10.0", "2.10.0a0+b4e4ee81d3.nv25.12", "2.11.0a0+eb65b36914.nv26.02", "2.15.1"])
def test_nothing_else_is_installed_where_the_rest_is_there(torch: str, install: Install) -> None:
    """NVIDIA's containers have builds of PyTorch before its release."""
    done = install(torch)
    assert done.returncode == 0, done.stdout + done.stderr
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("Successfully installed")]
    assert line.split()[2:] and all(name.startswith("megatron-balance-") for name in line.split()[2:])


@pytest.mark.parametrize("torch", ["2.9.1", "2.16.0"])
def test_pytorch_out_of_range_is_refused(torch: str, install: Install) -> None:
    done = install(torch)
    assert done.returncode != 0 and "Successfully" not in done.stdout
    assert f"torch=={torch}" in done.stdout, "the conflict is named"
