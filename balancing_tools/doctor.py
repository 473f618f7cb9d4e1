"""python -m balancing.doctor: can this machine train, and with which kernels?

Megatron-LM falls back silently: without Transformer Engine it uses other modules for attention, norms and experts. A
package that is installed but broken counts as absent, or ends the run later with an unrelated error. This command
imports the packages, and prints their versions or errors, the kernels that will run, and missing packages. The exit
code is 0 if training can run, else 2 after one line with the reason.

`--need train|test|gpu` only checks whether this Python has the packages for that task, without importing them. It
prints the path of the interpreter and the folder of megatron-core that MEGATRON_CORE names.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from balancing import __version__
from balancing.command_line import Parser
from balancing.doctor.broken import TITLES, broken, version
from balancing.doctor.installed import (
    MEGATRON_CORE,
    NEEDS,
    TORCH,
    find_apex,
    find_flash_attention_4,
    find_megatron,
    lacks,
    numbers,
    use_megatron_core,
)

__all__ = ["examine", "kernels", "main", "missing", "problem"]

_PROBE_SECONDS = 600  # a busy machine may take minutes
# Packages that Megatron-LM or this package imports. Each is probed in a process of its own, since an import may fail,
# hang or crash. As in training, torch comes first: which libraries a package finds depends on it.
_NCCL = """
import ctypes, os
def nccl():
    number = ctypes.c_int()
    try:  # the library that torch has loaded, which need not be the one that it was built with
        ctypes.CDLL("libnccl.so.2", mode=os.RTLD_NOLOAD | os.RTLD_NOW).ncclGetVersion(ctypes.byref(number))
    except (OSError, AttributeError):
        return None  # part of torch, or none
    return f"{number.value // 10000}.{number.value // 100 % 100}.{number.value % 100}"
"""
PROBES = {
    "torch": f"""
import torch, torch.distributed as dist
{_NCCL}
cards = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
built = ".".join(map(str, torch.cuda.nccl.version())) if dist.is_nccl_available() else None
found = dict(version=torch.__version__, cuda=torch.version.cuda, nccl=nccl() or built, built=built,
    gpus=[dict(name=card.name, memory=card.total_memory) for card in cards])
""",
    "transformer_engine": """
import torch, transformer_engine.pytorch
found = dict(version=str(getattr(transformer_engine, "__version__", "")))
""",
    "flash_attn": """
import torch, flash_attn
from flash_attn import flash_attn_varlen_func
found = dict(version=str(getattr(flash_attn, "__version__", "")))
""",
    "apex": """
import torch, amp_C, apex.multi_tensor_apply, apex.normalization, apex.optimizers
found = {}
""",
    "triton": "import triton; found = dict(version=triton.__version__)",
}
# With a GPU. Without one, runs do not import packages for GPUs.
GPU_PROBES = {
    "triton": """
import torch, triton, warnings
from balancing.kernels.merging import choose_merge
warnings.simplefilter("error")  # of a kernel that does not compile, or computes something else
choose_merge(torch.device("cuda"))
found = dict(version=triton.__version__)
""",
    "megatron": """
import torch
from balancing.doctor.broken import broken_import
try:
    import megatron.core
except Exception as error:
    raise SystemExit(broken_import(error) or f"megatron-core: broken, {type(error).__name__}: {error}")
found = {}
""",
}


def probe(name: str, code: str) -> dict[str, Any]:
    """Import package `name` by the `code` of its probe. Returns state "ok" with the found facts, "missing", or "broken"
    with `error`, one line."""
    if importlib.util.find_spec(name) is None:
        return {"state": "missing"}
    if name == "apex" and (found := find_apex())["state"] != "ok":
        return found
    code += "\nimport json; print('\\n' + json.dumps(found), flush=True)"
    try:
        done = subprocess.run(
            [sys.executable, "-c", code],
            stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", timeout=_PROBE_SECONDS,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return {"state": "broken", "error": f"its import hangs for more than {_PROBE_SECONDS} s"}
    answers = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode == 0 and answers:
        return {"state": "ok", "version": version(name), **json.loads(answers[-1])}
    said = [line.strip() for line in done.stderr.splitlines() if line.strip()] if done.returncode > 0 else []
    return {"state": "broken", "error": (said or [f"its import ends with exit code {done.returncode}"])[-1][:400]}


def _line(facts: dict[str, Any], name: str) -> str:
    """What is wrong with a broken package, in one line. megatron-core has that of the package at fault."""
    error = str(facts[name]["error"])
    return error if name == "megatron" else broken(name, error)


def examine() -> dict[str, Any]:
    """Examine this machine. Returns the facts that `kernels`, `missing` and `problem` judge."""
    use_megatron_core()
    facts: dict[str, Any] = {"torch": probe("torch", PROBES["torch"]), "megatron": {}}
    probes = {**PROBES, **(GPU_PROBES if facts["torch"].get("gpus") else {})}
    del probes["torch"]
    with ThreadPoolExecutor() as pool:
        facts.update(zip(probes, pool.map(probe, probes, probes.values())))  # noqa: B905  (strict= is Python 3.10's)
    return {
        **facts,
        "flash_attention_4": find_flash_attention_4(),
        "lacks": lacks("train"),
        "python": ".".join(map(str, sys.version_info[:3])),
        "megatron": {**facts["megatron"], **find_megatron()},
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "nvidia_driver": Path("/dev/nvidiactl").exists() or Path("/dev/dxg").exists(),
        "compiler": os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang"),
    }


def problem(facts: dict[str, Any]) -> str | None:
    """Why training cannot run here, and the remedy, in one line; None if it can run."""
    if facts["lacks"]:
        return f"missing: {', '.join(facts['lacks'])}; 'pip install -e .' in Megatron-Balance's folder installs all"
    # Without a GPU the run hides the packages for GPUs.
    names = ("torch", *(("transformer_engine", "megatron") if facts["torch"].get("gpus") else ()))
    return next((_line(facts, name) for name in names if facts[name].get("state") == "broken"), None)


def kernels(facts: dict[str, Any]) -> dict[str, str]:
    """The kernels that `pretrain_gpt.py` runs by default, by part of the model; empty if training cannot run."""
    if problem(facts) is not None:
        return {}
    gpu, apex = bool(facts["torch"]["gpus"]), facts["apex"]["state"] == "ok"
    if gpu and facts["transformer_engine"]["state"] == "ok":
        choice = "flash-attn, cuDNN" if facts["flash_attn"]["state"] == "ok" else "cuDNN"
        return {
            "attention": f"TEDotProductAttention ({choice} or the unfused kernel, chosen by shape); "
            f"with --balance-sequences {_measured(facts)}",
            "experts": "TEGroupedMLP with --moe-grouped-gemm, else SequentialMLP",
            "norm, optimizer": "Transformer Engine's, fused",
        }
    flash = _measured(facts) if gpu else "torch's attention for CPUs"
    return {
        "attention": "DotProductAttention: matmul, softmax, matmul; its memory grows with sequence length squared; "
        f"with --balance-sequences {flash}",
        "experts": "SequentialMLP, one expert after the other",
        "norm, optimizer": "Apex's LayerNorm; Apex FusedAdam" if apex and gpu else "torch's; torch AdamW",
    }


def _measured(facts: dict[str, Any]) -> str:
    """The kernels on a GPU among which `--balance-sequences` chooses."""
    names = ["cuDNN"] if facts["transformer_engine"]["state"] == "ok" else []
    if facts["flash_attention_4"]["version"] and not facts["flash_attention_4"]["lacks"]:
        names.append("FlashAttention 4 (on Hopper and Blackwell)")
    names += ["flash-attn"] if facts["flash_attn"]["state"] == "ok" else []
    rest = f"the fastest of {', '.join(names)} and " if names else ""
    return f"{rest}torch's flash attention" + (", measured at the start" if names else "")


def missing(facts: dict[str, Any]) -> dict[str, str]:
    """Packages that are absent or wrong but do not stop a run: name -> the effect and the remedy."""
    torch, apex, flash = facts["torch"], facts["apex"]["state"], facts["flash_attn"]
    if problem(facts) is not None:
        return {}
    gpu, engine = bool(torch["gpus"]), facts["transformer_engine"]["state"] == "ok"
    found: dict[str, str] = {}
    if facts["nvidia_driver"] and not gpu:
        built = f"CUDA {torch['cuda']}" if torch["cuda"] else "the CPU only"
        found["GPU"] = f"there is an NVIDIA driver, but torch (built for {built}) sees no GPU; runs use the CPU"
    if apex == "unrelated":
        found["apex"] = "PyPI's web toolkit, which Megatron may mistake for NVIDIA's Apex: pip uninstall apex"
    elif apex == "without kernels":
        found["Apex"] = "built without CUDA (no amp_C), so its optimizer stops the run: rebuild or uninstall it"
    if not engine:
        how = "pip install -e '.[gpu]'" if gpu else "it needs a GPU"
        found["Transformer Engine"] = f"no FP8, no fused attention, slower norms and optimizer ({how})"
    if gpu and flash["state"] != "ok":
        why = f"installed but broken ({flash['error']}); " if "error" in flash else ""
        found["flash-attn"] = why + ("only cuDNN's is used" if engine else "torch's own flash attention is used")
    if gpu and (lacking := facts["flash_attention_4"]["lacks"]):
        found["FlashAttention 4"] = f"does not run without its packages: pip install {' '.join(lacking)}"
    if gpu and facts["triton"]["state"] != "ok":
        why = f"installed but broken ({facts['triton']['error']}); " if "error" in facts["triton"] else ""
        found["Triton"] = f"{why}attention results are merged and tokens split by operations of torch, which are slower"
    if gpu and not facts["compiler"]:
        found["C compiler"] = "Triton cannot compile kernels: apt-get install gcc, or name a compiler in CC"
    if not TORCH[0] <= numbers(torch["version"])[:2] <= TORCH[1]:
        tested = " to ".join(".".join(map(str, version)) for version in TORCH)
        found["torch"] = f"{torch['version']} is not tested; {tested} are"
    return found


def _found(facts: dict[str, Any], name: str) -> str:
    """The version or the state of a package; what is wrong with it if it is broken."""
    fact = facts[name]
    if fact["state"] == "broken":
        return _line(facts, name).removeprefix(TITLES[name]).strip(" :")
    return fact.get("version") or fact["state"]


def _rows(facts: dict[str, Any]) -> list[tuple[str, str]]:
    torch, megatron = facts["torch"], facts["megatron"]
    built = [f"CUDA {torch['cuda']}"] if torch.get("cuda") else []
    if torch.get("nccl"):
        other = f" (built for {torch['built']})" if torch["built"] != torch["nccl"] else ""
        built.append(f"NCCL {torch['nccl']}{other}")
    device = f"CPU, {facts['cores']} cores"
    if torch.get("gpus"):
        first = torch["gpus"][0]
        device = f"{len(torch['gpus'])} x {first['name']}, {first['memory'] / 1e9:.0f} GB each; {device}"
    packages = ("transformer_engine", "apex", "flash_attn", "triton")
    return [
        ("Python", f"{facts['python']}, {sys.executable}"),
        ("torch", ", ".join([_found(facts, "torch"), *built])),
        ("megatron-core", f"{megatron['version'] or 'missing'}, {megatron['core']} (supported: {MEGATRON_CORE})"),
        ("device", device),
        *((TITLES[name], _found(facts, name)) for name in packages),
        *kernels(facts).items(),
        ("dataset helper", megatron["dataset_helper"]),
    ]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command. Returns an exit code of `balancing.command_line`."""
    parser = Parser(prog="python -m balancing.doctor", description="Can this machine train, and with which kernels?")
    needs = "only check whether this Python has the packages for training, tests or scripts/gpu_check.sh"
    parser.add_argument("--need", choices=NEEDS, help=needs)
    return parser.run(_report, argv)


def _report(options: argparse.Namespace) -> None:
    if options.need:
        folder, absent = use_megatron_core(), lacks(options.need)
        if absent:
            raise ValueError(f"{sys.executable} lacks {', '.join(absent)}")
        print(sys.executable, folder or "", sep="\n")
        return
    facts = examine()
    reason = problem(facts)
    print(f"Megatron-Balance {__version__}: this machine {'can train' if reason is None else 'cannot train'}")
    for name, text in _rows(facts):
        print(f"  {name:<20}{text}")
    for name, text in missing(facts).items():
        print(f"  missing or wrong: {name}: {text}")
    if reason is not None:
        raise ValueError(reason)
