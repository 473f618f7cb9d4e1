"""The installed packages, found by files and metadata, without importing them.

An import of torch takes seconds, and a package can be absent, of another version, or another project of the same name.
`lacks` checks in a fraction of a second whether this Python has the packages for a task. It also runs on old Pythons.
"""

from __future__ import annotations

import contextlib
import importlib.machinery
import importlib.metadata
import importlib.util
import os
import re
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

__all__ = [
    "FLASH_ATTENTION_4",
    "MEGATRON_CORE",
    "NEEDS",
    "TORCH",
    "find_apex",
    "find_flash_attention_4",
    "find_megatron",
    "find_torch",
    "lacks",
    "numbers",
    "use_megatron_core",
]

PYTHON = (3, 12)
MEGATRON_CORE = "0.19.2"  # tests need this release; training needs a release with the same first two numbers
# The oldest and the newest tested release. On Hopper and Blackwell, attention asks torch which flash kernels are
# active; torch 2.9 cannot say.
TORCH = ((2, 10), (2, 15))

_TRAIN = ("einops", "jinja2", "matplotlib", "numpy", "packaging", "psutil", "rich", "tensorboard", "yaml")
# What FlashAttention 4 (flash-attn-4) needs beside it, by the names to install.
FLASH_ATTENTION_4 = (
    "nvidia-cutlass-dsl", "nvidia-cutlass-dsl-libs-core", "nvidia-cutlass-dsl-libs-base",
    "nvidia-cutlass-dsl-libs-cu13", "apache-tvm-ffi", "quack-kernels", "torch-c-dlpack-ext",
)  # fmt: skip
# Modules that a task imports besides torch and Megatron-LM.
NEEDS = {
    "train": _TRAIN,
    "test": (*_TRAIN, "hypothesis", "pytest", "scipy", "xdist"),
    "gpu": (*_TRAIN, "hypothesis", "pytest", "triton"),
}
_DISTRIBUTIONS = {"yaml": "pyyaml", "xdist": "pytest-xdist"}


def lacks(need: str) -> list[str]:
    """The packages that a task needs and this Python lacks, by the names to install. need: a key of `NEEDS`."""
    if sys.version_info < PYTHON:
        return ["Python 3.12 or 3.13"]
    torch, megatron = find_torch(), find_megatron()
    wanted = []
    if torch["version"] is None:
        wanted.append(f"torch>={_dotted(TORCH[0])}")
    elif numbers(torch["version"])[:2] < TORCH[0]:
        wanted.append(f"torch>={_dotted(TORCH[0])} ({torch['version']} is installed)")
    elif need == "gpu" and not torch["cuda"]:
        wanted.append(f"a torch with CUDA ({torch['version']} is for CPUs)")
    agree = 3 if need == "test" else 2
    if megatron["version"] is None or numbers(megatron["version"])[:agree] != numbers(MEGATRON_CORE)[:agree]:
        found = f" ({megatron['version']} is in {megatron['core']})" if megatron["version"] else ""
        wanted.append(f"megatron-core=={MEGATRON_CORE}{found}")
    elif not megatron["training"]:
        wanted.append(f"megatron.training beside {megatron['core']}")
    elif megatron["dataset_helper"] == "absent":
        wanted.append(f"the dataset helper of megatron-core for Python {_dotted(sys.version_info[:2])}")
    missing = [name for name in NEEDS[need] if importlib.util.find_spec(name) is None]
    return wanted + [_DISTRIBUTIONS.get(name, name) for name in missing]


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))


def numbers(version: str) -> tuple[int, ...]:
    """The first three numbers of a version."""
    return tuple(map(int, re.findall(r"\d+", version)[:3]))


def find_torch() -> dict[str, str | None]:
    """`version` and `cuda` of the torch that an import would find; None each if there is none."""
    spec = importlib.util.find_spec("torch")
    file = Path(spec.origin).parent / "version.py" if spec and spec.origin else None
    text = file.read_text(encoding="utf-8") if file and file.is_file() else ""
    found = dict(re.findall(r"^(__version__|cuda)\b.*= '(.+)'$", text, re.M))
    return {"version": found.get("__version__"), "cuda": found.get("cuda")}


def use_megatron_core() -> str | None:
    """Put the megatron-core of the variable MEGATRON_CORE first on the path of this process and of its children.

    MEGATRON_CORE names a wheel, a checkout, an unpacked wheel, or a folder with the wheel. A wheel is unpacked once.
    Returns the folder on the path; None if the variable is not set. Raises ValueError for anything else.
    """
    given = os.environ.get("MEGATRON_CORE")
    if not given:
        return None
    place = Path(given).absolute()
    if place.is_dir() and not (place / "megatron" / "core").is_dir():
        place = max(place.glob("megatron_core-*.whl"), default=place)
    if place.suffix == ".whl" and place.is_file():
        place = _unpacked(place)
    if not (place / "megatron" / "core").is_dir():
        raise ValueError(f"MEGATRON_CORE={given} is no wheel of megatron-core and no folder with megatron/core")
    folder = str(place)
    if folder not in sys.path:
        sys.path.insert(0, folder)
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (folder, os.environ.get("PYTHONPATH"))))
    return folder


def _unpacked(wheel: Path) -> Path:
    """The folder of a wheel's unpacked files: one for each user and wheel, in the folder for temporary files."""
    about = wheel.stat()
    base = Path(tempfile.gettempdir()) / f"megatron-balance-{os.getuid()}"
    base.mkdir(mode=0o700, exist_ok=True)
    if base.stat().st_uid != os.getuid():
        raise ValueError(f"{base} belongs to another user; set TMPDIR to a folder of your own")
    folder = base / f"{wheel.stem}-{about.st_size}-{about.st_mtime_ns}"
    if not folder.is_dir():
        with tempfile.TemporaryDirectory(dir=base) as made:  # several ranks may unpack at once
            try:
                zipfile.ZipFile(wheel).extractall(made)
            except zipfile.BadZipFile as error:
                raise ValueError(f"MEGATRON_CORE={wheel} is damaged: {error}") from error
            with contextlib.suppress(OSError):
                Path(made).rename(folder)
            Path(made).mkdir(exist_ok=True)
    return folder


def find_megatron() -> dict[str, Any]:
    """The megatron-core that an import would find: that of MEGATRON_CORE, else the first on the path.

    Returns version (None if there is no megatron-core), core (its folder), training (whether `megatron.training`
    exists) and dataset_helper: "compiled", "compiles at start" or "absent".
    """
    use_megatron_core()
    spec = importlib.util.find_spec("megatron")
    folders = [Path(location) for location in (spec.submodule_search_locations if spec else None) or ()]
    found: dict[str, Any] = {"version": None, "core": None, "dataset_helper": "absent"}
    found["training"] = any((folder / "training").is_dir() for folder in folders)
    core = next((folder / "core" for folder in folders if (folder / "core" / "package_info.py").is_file()), None)
    if core is None:
        return found
    text = (core / "package_info.py").read_text(encoding="utf-8")
    parts = dict(re.findall(r"^(MAJOR|MINOR|PATCH)\s*=\s*(\d+)", text, re.M))
    found["version"] = ".".join(parts.get(part, "?") for part in ("MAJOR", "MINOR", "PATCH"))
    found["core"] = str(core)
    suffixes = importlib.machinery.EXTENSION_SUFFIXES
    if any((core / "datasets" / f"helpers_cpp{suffix}").is_file() for suffix in suffixes):
        found["dataset_helper"] = "compiled"
    elif (core / "datasets" / "Makefile").is_file():
        found["dataset_helper"] = "compiles at start"
    return found


def find_flash_attention_4() -> dict[str, Any]:
    """The package `flash-attn-4`: version (None if it is missing), and `lacks`, the packages that it needs and this
    Python lacks."""

    def has(name: str) -> bool:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            importlib.metadata.version(name)
            return True
        return False

    if not has("flash-attn-4"):
        return {"version": None, "lacks": []}
    lacking = [name for name in FLASH_ATTENTION_4 if not has(name)]
    return {"version": importlib.metadata.version("flash-attn-4"), "lacks": lacking}


def find_apex() -> dict[str, Any]:
    """The package `apex`: version, and state "missing", "unrelated" (PyPI's web toolkit of that name, not NVIDIA's),
    "without kernels" (built without CUDA) or "ok"."""
    spec = importlib.util.find_spec("apex")
    folders = list(spec.submodule_search_locations or []) if spec else []
    state = "missing"
    if folders:
        parts = all((Path(folders[0]) / part).is_dir() for part in ("optimizers", "normalization"))
        built = any(importlib.util.find_spec(name) for name in ("amp_C", "fused_layer_norm_cuda"))
        state = "unrelated" if not parts else "ok" if built else "without kernels"
    version = None
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        version = importlib.metadata.version("apex")
    return {"state": state, "version": version}
