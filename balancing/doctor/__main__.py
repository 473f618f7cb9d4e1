"""python -m balancing.doctor: can this machine train, and with which kernels?

Megatron-LM falls back silently: without Transformer Engine it uses other modules for attention, norms and experts. A
package that is installed but broken counts as absent, or ends the run later with an unrelated error. This command
prints the installed packages, the kernels that will run, and missing packages. The exit code is 0 if training can run,
else 2 after one line with the reason.

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
from balancing.doctor.installed import (
    MEGATRON_CORE,
    NEEDS,
    TORCH,
    find_apex,
    find_megatron,
    lacks,
    numbers,
    use_megatron_core,
)

__all__ = ["examine", "kernels", "main", "missing", "problem"]

_PROBE_SECONDS = 120
# Packages that Megatron-LM tries to import. Each is probed in its own process, since an import may fail, hang or crash.
PROBES = {
    "torch": """
import torch, torch.distributed as dist
cards = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
found = dict(version=torch.__version__, cuda=torch.version.cuda,
    nccl=".".join(map(str, torch.cuda.nccl.version())) if dist.is_nccl_available() else None,
    gpus=[dict(name=card.name, memory=card.total_memory) for card in cards])
""",
    "transformer_engine": """
import transformer_engine.pytorch
found = dict(version=str(getattr(transformer_engine, "__version__", "")))
""",
    "flash_attn": """
import flash_attn
from flash_attn import flash_attn_varlen_func
found = dict(version=str(getattr(flash_attn, "__version__", "")))
""",
}


def probe(name: str) -> dict[str, Any]:
    """Run one of `PROBES`. Returns state "ok" with the found facts, "missing", or "broken" with `error`, one line."""
    if importlib.util.find_spec(name) is None:
        return {"state": "missing"}
    code = PROBES[name] + "\nimport json; print('\\n' + json.dumps(found), flush=True)"
    try:
        done = subprocess.run(
            [sys.executable, "-c", code],
            stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", timeout=_PROBE_SECONDS,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return {"state": "broken", "error": f"its import hangs for more than {_PROBE_SECONDS} s"}
    answers = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode == 0 and answers:
        return {"state": "ok", **json.loads(answers[-1])}
    said = [line.strip() for line in done.stderr.splitlines() if line.strip()] if done.returncode > 0 else []
    return {"state": "broken", "error": (said or [f"its import ends with exit code {done.returncode}"])[-1][:200]}


def examine() -> dict[str, Any]:
    """Examine this machine. Returns the facts that `kernels`, `missing` and `problem` judge."""
    use_megatron_core()
    with ThreadPoolExecutor() as pool:
        facts: dict[str, Any] = dict(zip(PROBES, pool.map(probe, PROBES)))  # noqa: B905  (strict= is Python 3.10's)
    return {
        **facts,
        "lacks": lacks("train"),
        "python": ".".join(map(str, sys.version_info[:3])),
        "megatron": find_megatron(),
        "apex": find_apex(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "nvidia_driver": Path("/dev/nvidiactl").exists() or Path("/dev/dxg").exists(),
        "compiler": os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang"),
    }


def problem(facts: dict[str, Any]) -> str | None:
    """Why training cannot run here, and the remedy, in one line; None if it can run."""
    if facts["lacks"]:
        return f"missing: {', '.join(facts['lacks'])}; 'pip install -e .' in Megatron-Balance's folder installs all"
    for name, title in (("torch", "torch"), ("transformer_engine", "Transformer Engine")):
        if facts[name]["state"] == "broken":
            return f"{title} is installed but does not start ({facts[name]['error']}); reinstall or uninstall it"
    return None


def kernels(facts: dict[str, Any]) -> dict[str, str]:
    """The kernels that `pretrain_gpt.py` runs by default, by part of the model; empty if training cannot run."""
    if problem(facts) is not None:
        return {}
    gpu, apex = bool(facts["torch"]["gpus"]), facts["apex"]["state"] == "ok"
    if gpu and facts["transformer_engine"]["state"] == "ok":
        choice = "flash-attn, cuDNN" if facts["flash_attn"]["state"] == "ok" else "cuDNN"
        return {
            "attention": f"TEDotProductAttention ({choice} or the unfused kernel, chosen by shape)",
            "experts": "TEGroupedMLP with --moe-grouped-gemm, else SequentialMLP",
            "norm, optimizer": "Transformer Engine's, fused",
        }
    flash = "torch's flash attention" if gpu else "torch's attention for CPUs"
    return {
        "attention": "DotProductAttention: matmul, softmax, matmul; its memory grows with sequence length squared; "
        f"with --balance-sequences {flash}",
        "experts": "SequentialMLP, one expert after the other",
        "norm, optimizer": "Apex's LayerNorm; Apex FusedAdam" if apex and gpu else "torch's; torch AdamW",
    }


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
        broken = f"installed but broken ({flash['error']}); " if "error" in flash else ""
        found["flash-attn"] = broken + ("only cuDNN's is used" if engine else "torch's own flash attention is used")
    if gpu and not facts["compiler"]:
        found["C compiler"] = "Triton cannot compile kernels: apt-get install gcc, or name a compiler in CC"
    if not TORCH[0] <= numbers(torch["version"])[:2] <= TORCH[1]:
        tested = " to ".join(".".join(map(str, version)) for version in TORCH)
        found["torch"] = f"{torch['version']} is not tested; {tested} are"
    return found


def _rows(facts: dict[str, Any]) -> list[tuple[str, str]]:
    torch, megatron = facts["torch"], facts["megatron"]
    built = [f"{name} {torch[key]}" for name, key in (("CUDA", "cuda"), ("NCCL", "nccl")) if torch.get(key)]
    device = f"CPU, {facts['cores']} cores"
    if torch.get("gpus"):
        first = torch["gpus"][0]
        device = f"{len(torch['gpus'])} x {first['name']}, {first['memory'] / 1e9:.0f} GB each; {device}"
    packages = {"Transformer Engine": "transformer_engine", "Apex": "apex", "flash-attn": "flash_attn"}
    return [
        ("Python", f"{facts['python']}, {sys.executable}"),
        ("torch", ", ".join([torch.get("version") or torch["state"], *built])),
        ("megatron-core", f"{megatron['version'] or 'missing'}, {megatron['core']} (supported: {MEGATRON_CORE})"),
        ("device", device),
        *((name, facts[key].get("version") or facts[key]["state"]) for name, key in packages.items()),
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


if __name__ == "__main__":
    sys.exit(main())
