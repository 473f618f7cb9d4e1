"""What to say of a package that is installed and cannot be imported: version, error and remedy in one line."""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import re
from pathlib import Path

from balancing.doctor.installed import find_torch

__all__ = ["TITLES", "broken", "broken_import", "version"]

# Modules that an import of megatron-core may load, and the package that a user installed.
TITLES = {
    "transformer_engine": "Transformer Engine", "transformer_engine_torch": "Transformer Engine",
    "flash_attn": "flash-attn", "apex": "Apex", "triton": "Triton", "torch": "torch",
}  # fmt: skip
_OF_TORCH = re.compile(r"undefined symbol: \S*(c10|2at\d|5torch)")  # its namespaces, mangled


def version(name: str) -> str | None:
    """The version by the metadata of a package, which need not be importable."""
    for distribution in (name, name.replace("_", "-")):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return importlib.metadata.version(distribution)
    return None


def broken(name: str, error: str) -> str:
    """One line on package `name`, whose import ends in `error`, a type and a message."""
    title = " ".join(filter(None, (TITLES.get(name, name), version(name))))
    return f"{title}: broken, {error}; {_remedy(error)}"


def broken_import(error: BaseException) -> str | None:
    """One line on the package of `TITLES` in whose files an import raised `error`; None if it was in none."""
    name, trace = None, error.__traceback__
    while trace is not None:
        package = str(trace.tb_frame.f_globals.get("__name__")).split(".")[0]
        name = package if package in TITLES else name  # the innermost, which others may import
        trace = trace.tb_next
    if name is None or name == "torch":
        return None
    return broken(name, " ".join(f"{type(error).__name__}: {error}".split()))


def _remedy(error: str) -> str:
    loaded = re.search(r"(/\S*)/libcudnn\w*\.so", error)
    cudnn = next((folder.parent for folder in _libraries("libcudnn*") if folder.parent.name == "cudnn"), None)
    if loaded and cudnn and Path(loaded[1]).resolve() != (cudnn / "lib").resolve():
        return f"two cuDNNs are installed: set CUDNN_HOME={cudnn} and put {cudnn}/lib first in LD_LIBRARY_PATH"
    absent = re.search(r"(lib[\w.+-]+\.so[\w.]*): cannot open shared object file", error)
    if absent and (folders := _libraries(absent[1])):
        return f"add {folders[0]} to LD_LIBRARY_PATH"
    if absent:
        return f"install the package that has {absent[1]}, or add its folder to LD_LIBRARY_PATH"
    if _OF_TORCH.search(error):
        return f"it is built for another torch than {find_torch()['version']}: install the build for this one"
    return "reinstall or uninstall it"


def _libraries(pattern: str) -> list[Path]:
    """The folders of NVIDIA's wheels that have a library of that name."""
    spec = importlib.util.find_spec("nvidia")
    places = [Path(each) for each in (spec.submodule_search_locations if spec else None) or ()]
    return sorted({file.parent for place in places for file in place.glob(f"*/lib/{pattern}")})
