"""Probes of installed packages, each imported in a process of its own.

A package can be absent, present but broken, or another project of the same name. Megatron's own parts and Apex are told
by their files. Packages whose import may fail, hang or crash are imported in a process of their own, with the very
imports that Megatron tries: what these find is what Megatron will use.
"""

from __future__ import annotations

import importlib.machinery
import importlib.metadata
import importlib.util
import json
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

__all__ = ["PROBES", "apex_state", "find_apex", "find_megatron", "probe", "version_of"]

_PROBE_SECONDS = 120

PROBES = {
    "torch": """
import torch, torch.distributed as dist
gpu = torch.cuda.is_available()
cards = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())] if gpu else []
found = dict(version=torch.__version__, cuda=torch.version.cuda, gloo=dist.is_gloo_available(),
    nccl=".".join(map(str, torch.cuda.nccl.version())) if dist.is_nccl_available() else None,
    gpus=[dict(name=card.name, memory=card.total_memory) for card in cards],
    cuda_flash=gpu and torch.backends.cuda.is_flash_attention_available(),
    cpu_flash=hasattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu"),
    grouped_mm=hasattr(torch.nn.functional, "grouped_mm"))
""",
    "transformer_engine": """
import transformer_engine
from transformer_engine.pytorch.fp8 import FP8GlobalStateManager, fp8_autocast, fp8_model_init
found = dict(version=str(getattr(transformer_engine, "__version__", "")))
""",
    "flash_attn": """
import flash_attn
from flash_attn import flash_attn_varlen_func
found = dict(version=str(getattr(flash_attn, "__version__", "")))
""",
}


def probe(name: str) -> dict[str, Any]:
    """Try one of `PROBES` in a process of its own, for at most 2 minutes.

    Returns state "ok" with what it found, "missing", or "broken" with error, one line.
    """
    if importlib.util.find_spec(name) is None:
        return {"state": "missing"}
    code = PROBES[name] + "\nimport json; print('\\n' + json.dumps(found), flush=True)"
    try:
        done = subprocess.run(
            [sys.executable, "-c", code],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_PROBE_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return {"state": "broken", "error": f"its import hangs, {_PROBE_SECONDS} s passed"}
    if done.returncode < 0:
        return {"state": "broken", "error": f"its import crashes: {signal.strsignal(-done.returncode)}"}
    if done.returncode:
        lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
        return {"state": "broken", "error": lines[-1][:200] if lines else f"exit code {done.returncode}"}
    answers = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if not answers:
        return {"state": "broken", "error": "its import ends the process"}
    return {"state": "ok", **json.loads(answers[-1])}


def find_megatron() -> dict[str, Any]:
    """Which megatron-core an import would take: the wheel, or a checkout that comes before it on the path.

    Returns version (None when there is no core), core (its folder), training (whether `megatron.training` is there) and
    dataset_helper: "compiled", "compiles at start" or "absent".
    """
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


def find_apex() -> dict[str, Any]:
    """The package `apex`: its state (see `apex_state`) and version."""
    spec = importlib.util.find_spec("apex")
    folders = list(spec.submodule_search_locations or []) if spec else []
    built = any(importlib.util.find_spec(name) for name in ("amp_C", "fused_layer_norm_cuda"))
    return {"state": apex_state(folders[0] if folders else None, built), "version": version_of("apex")}


def apex_state(folder: str | None, built: bool) -> str:
    """Tell NVIDIA's Apex from PyPI's `apex`, an unrelated web toolkit.

    `folder`: of the package `apex`, None where there is none. `built`: whether a module `amp_C` or
    `fused_layer_norm_cuda` exists, which only a build with the CUDA extensions makes.
    Returns "missing", "unrelated", "without kernels" or "ok".
    """
    if folder is None:
        return "missing"
    if not ((Path(folder) / "optimizers").is_dir() and (Path(folder) / "normalization").is_dir()):
        return "unrelated"
    return "ok" if built else "without kernels"


def version_of(distribution: str) -> str | None:
    """The installed version of a distribution, None when it is not installed."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None
