"""Report on whether this machine can train, with which kernels, and what each missing package costs.

Megatron-LM falls back silently: without Transformer Engine its attention, norms and experts are other modules, and a
package that is installed but broken counts as absent or ends the run far from its cause. This prints one screen that
says what is there, what will run as a result, and what is missing. Exit code 0 when training can run, else 2 and one
line that says why not.

It imports none of what it looks at, and it must also run on an old Python, to say so.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from balancing import __version__
from balancing.command_line import Parser
from balancing.doctor.installed import PROBES, find_apex, find_megatron, probe, version_of
from balancing.launch import detect_launch, detect_nics, host_memory

__all__ = ["examine", "kernels", "main", "missing", "problem"]

PYTHON = (3, 12)
MEGATRON_CORE = "0.19.2"
TORCH = ((2, 11), (2, 15))  # the oldest and newest release that the tests run on


def examine() -> dict[str, Any]:
    """Look at this machine. Returns plain facts (JSON types), judged by `kernels`, `missing` and `problem`."""
    with ThreadPoolExecutor() as pool:
        facts: dict[str, Any] = dict(zip(PROBES, pool.map(probe, PROBES)))  # noqa: B905  (strict= is Python 3.10's)
    facts.update(
        python=".".join(map(str, sys.version_info[:3])),
        megatron=find_megatron(),
        apex=find_apex(),
        numpy=version_of("numpy"),
        psutil=version_of("psutil"),
        cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        memory=host_memory(),
        nvidia_driver=Path("/dev/nvidiactl").exists(),
        compiler=os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang"),
        slurm={"installed": shutil.which("srun") is not None, "job": os.environ.get("SLURM_JOB_ID")},
    )
    try:
        launch = detect_launch()
        facts["launch"] = {"nodes": launch.nodes, "ranks_per_node": launch.ranks_per_node, "source": launch.source}
        facts["nics"] = [vars(nic) for nic in detect_nics()]
    except ValueError as error:
        facts["launch_error"] = str(error)
    return facts


def kernels(facts: dict[str, Any]) -> dict[str, str]:
    """What `pretrain_gpt.py` runs by default for attention, experts, norms and the optimizer; empty if it cannot."""
    if problem(facts) is not None:
        return {}
    torch, apex = facts["torch"], facts["apex"]["state"] == "ok"
    flash = [name for name, key in (("CUDA", "cuda_flash"), ("CPU", "cpu_flash")) if torch.get(key)]
    flash_text = f"flash attention on {' and '.join(flash)}" if flash else "no flash attention"
    grouped = "torch.nn.functional.grouped_mm" if torch.get("grouped_mm") else "no grouped_mm"
    at_hand = {"torch's own": f"{flash_text}; {grouped} (Megatron's training does not call them)"}
    if torch.get("gpus") and facts["transformer_engine"]["state"] == "ok":
        choice = "flash-attn, cuDNN" if facts["flash_attn"]["state"] == "ok" else "cuDNN"
        return {
            "attention": f"TEDotProductAttention ({choice} or its unfused one, chosen by shape)",
            "experts": "TEGroupedMLP with --moe-grouped-gemm, else SequentialMLP",
            "norm, optimizer": "Transformer Engine's, fused",
            **at_hand,
        }
    adam = "Apex FusedAdam" if apex and torch.get("gpus") else "torch AdamW"
    norm = "Apex's for LayerNorm, torch's for RMSNorm" if apex and torch.get("gpus") else "torch's"
    return {
        "attention": "DotProductAttention: matmul, softmax, matmul; its memory grows with sequence length squared",
        "experts": "SequentialMLP, one expert after the other; --moe-grouped-gemm changes nothing",
        "norm, optimizer": f"{norm}; {adam}",
        **at_hand,
    }


def missing(facts: dict[str, Any]) -> list[tuple[str, str]]:
    """What is absent or wrong without stopping a run: pairs of what, and what that costs with the way out."""
    torch, apex = facts["torch"], facts["apex"]["state"]
    if torch["state"] != "ok":
        return []  # that is the problem; nothing else can be found then
    gpu, engine = bool(torch.get("gpus")), facts["transformer_engine"]["state"] == "ok"
    costs = []
    if facts["nvidia_driver"] and not gpu:
        built = f"CUDA {torch['cuda']}" if torch.get("cuda") else "the CPU only"
        costs.append(("GPU", f"there is an NVIDIA driver, but torch (built for {built}) sees no GPU; runs use the CPU"))
    if apex == "unrelated":
        costs.append(
            (
                "apex",
                "this is PyPI's web toolkit, not NVIDIA's (no apex/optimizers, no amp_C), and Megatron may take it for "
                "the real one: pip uninstall apex; build NVIDIA's from github.com/NVIDIA/apex",
            )
        )
    elif apex == "without kernels":
        costs.append(
            (
                "Apex",
                "built without its CUDA extensions (no amp_C), so its optimizer stops the run: rebuild or uninstall",
            )
        )
    if facts["transformer_engine"]["state"] == "missing":
        where = "pip install -e '.[gpu]'" if gpu else "it needs a GPU"
        costs.append(
            (
                "Transformer Engine",
                "no FP8, no fused attention, no grouped experts, and upstream has no context-parallel attention "
                f"({where})",
            )
        )
    if gpu and facts["flash_attn"]["state"] != "ok":
        instead = (
            "cuDNN's attention is used alone" if engine else "nothing, until Transformer Engine is there to call it"
        )
        broken = f"installed but broken ({facts['flash_attn']['error']}); " if "error" in facts["flash_attn"] else ""
        costs.append(("flash-attn", broken + instead))
    if gpu and apex == "missing" and not engine:
        costs.append(("Apex", "slower optimizer steps and norms, and a separate pass to add each weight gradient"))
    if gpu and not torch.get("nccl"):
        costs.append(("NCCL", "this torch has none: GPUs would talk through gloo, by way of host memory"))
    if gpu and not facts["compiler"]:
        costs.append(("C compiler", "Triton cannot compile kernels: apt-get install gcc, or name a compiler in CC"))
    if facts["megatron"]["version"] and facts["megatron"]["dataset_helper"] == "absent":
        costs.append(("dataset helper", "--data-path cannot be read: reinstall megatron-core for this Python"))
    if facts["psutil"] is None:
        costs.append(("psutil", "no torch_dist checkpoint can be written: pip install psutil"))
    if not TORCH[0] <= _numbers(torch["version"])[:2] <= TORCH[1]:
        tested = " to ".join(".".join(map(str, version)) for version in TORCH)
        costs.append(("torch", f"{torch['version']} is not tested; {tested} are"))
    if "launch_error" in facts:
        costs.append(("launch", facts["launch_error"]))
    return costs


def problem(facts: dict[str, Any]) -> str | None:
    """Why training cannot run here, in one line with the way out; None when it can."""
    torch, megatron, engine = facts["torch"], facts["megatron"], facts["transformer_engine"]
    if _numbers(facts["python"])[:2] < PYTHON:
        wanted = ".".join(map(str, PYTHON))
        return f"Python {facts['python']} is too old; megatron-core needs {wanted} or newer: make a venv with that one"
    if torch["state"] == "missing":
        return "torch is not installed: pip install -e . in Megatron-Balance's folder brings it and all else"
    if torch["state"] == "broken":
        return f"torch is installed but does not start ({torch['error']}): reinstall it"
    if facts["numpy"] is None:
        return "numpy is not installed: pip install numpy"
    if megatron["version"] is None:
        return f"megatron-core is not installed: pip install megatron-core=={MEGATRON_CORE}"
    if megatron["version"] != MEGATRON_CORE:
        return (
            f"megatron-core {megatron['version']} in {megatron['core']} is not supported: "
            f"pip install megatron-core=={MEGATRON_CORE}, or put a checkout of that version on PYTHONPATH"
        )
    if not megatron["training"]:
        return f"megatron.training is missing beside {megatron['core']}: pip install megatron-core=={MEGATRON_CORE}"
    if engine["state"] == "broken":
        return f"Transformer Engine is installed but does not start ({engine['error']}): reinstall or uninstall it"
    return None


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit code, as `balancing.command_line` says."""
    parser = Parser(prog="python -m balancing.doctor", description="Can this machine train, and with what?")
    parser.add_argument("--json", action="store_true", help="print the same facts as JSON")
    return parser.run(_report, argv)


def _report(options: argparse.Namespace) -> None:
    facts = examine()
    reason = problem(facts)
    if options.json:
        verdict = {"can_train": reason is None, "problem": reason, "kernels": kernels(facts), "missing": missing(facts)}
        print(json.dumps({**verdict, **facts}, indent=2))
    else:
        title = "This machine can train." if reason is None else "This machine cannot train yet."
        _print(f"Megatron-Balance {__version__}: {title}", _rows(facts), missing(facts))
    if reason is not None:
        raise ValueError(reason)


def _rows(facts: dict[str, Any]) -> list[tuple[str, str]]:
    torch, megatron, nics = facts["torch"], facts["megatron"], facts.get("nics", [])
    libraries = [f"CUDA {torch['cuda']}"] if torch.get("cuda") else []
    libraries += [f"NCCL {torch['nccl']}"] if torch.get("nccl") else []
    built = f" ({', '.join(libraries)})" if libraries else ""
    device = f"CPU, {facts['cores']} cores, {facts['memory'] / 1e9:.0f} GB"
    if torch.get("gpus"):
        first = torch["gpus"][0]
        device = f"{len(torch['gpus'])} x {first['name']}, {first['memory'] / 1e9:.0f} GB each; {device}"
    nccl = "yes" if torch.get("nccl") and torch.get("gpus") else "no (no GPU)" if torch.get("nccl") else "no"
    slurm = facts["slurm"]
    seen = f"job {slurm['job']}" if slurm["job"] else "installed, no job" if slurm["installed"] else "not seen"
    launch = facts.get("launch")
    nodes = f"{launch['nodes']} x {launch['ranks_per_node']} ({launch['source']})" if launch else "unclear, see below"
    return [
        ("Python", facts["python"]),
        ("torch", (torch.get("version") or torch["state"]) + built),
        ("megatron-core", f"{megatron['version'] or 'missing'} (supported: {MEGATRON_CORE})"),
        ("numpy", facts["numpy"] or "missing"),
        ("device", device),
        ("backends", f"gloo {'yes' if torch.get('gloo') else 'no'}, nccl {nccl}"),
        ("Transformer Engine", _state(facts["transformer_engine"])),
        ("Apex", _state(facts["apex"])),
        ("flash-attn", _state(facts["flash_attn"])),
        *kernels(facts).items(),
        ("dataset helper", megatron["dataset_helper"]),
        ("nodes x ranks", f"{nodes}; SLURM {seen}"),
        ("NICs per node", f"{len(nics)}: {_nics(nics)}" if nics else "none found"),
    ]


def _nics(nics: list[dict[str, Any]]) -> str:
    names = ", ".join(nic["name"] for nic in nics[:8]) + (", ..." if len(nics) > 8 else "")
    rate = nics[0]["line_rate"]
    speed = f"{rate * 8 / 1e9:g} Gb/s each" if rate else "speed unknown"
    return f"{names} ({nics[0]['kind']}, {speed})"


def _state(package: dict[str, Any]) -> str:
    words = {"ok": "yes", "missing": "no", "broken": f"broken: {package.get('error', '')}"}
    text = words.get(package["state"], package["state"])
    return f"{package['version']}" if package["state"] == "ok" and package.get("version") else text


def _print(title: str, rows: list[tuple[str, str]], costs: list[tuple[str, str]]) -> None:
    try:
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text
    except ImportError:  # the doctor must still speak where nothing is installed
        print("\n".join([title, *(f"  {name:<20}{text}" for name, text in [*rows, *costs])]))
        return
    console = Console(highlight=False)
    console.print(title, style="bold", markup=False)
    for heading, lines in (("", rows), ("Missing or wrong, and what that costs", costs)):
        table = Table.grid(padding=(0, 2, 0, 0))
        table.add_column(style="cyan", no_wrap=True, min_width=18)
        for name, text in lines:
            table.add_row(f"  {name}", Text(text))
        if lines and heading:
            console.print(heading, style="bold yellow")
        console.print(table)


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", version)[:3]))
