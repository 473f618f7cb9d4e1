"""Whether this machine can run the acceptance, and which of its parts cannot, by what the doctor found and the driver
says. One line each, with the way out."""

import os
import subprocess
from typing import Any

from tests.gpu.parts import Part
from tests.gpu.trial import Machine

__all__ = ["look", "notes", "obstacle", "problem"]


def look() -> dict[str, Any]:
    """The doctor's facts, and of the driver: its version and the GPUs it lists."""
    from balancing_tools.doctor import examine

    return examine() | {"driver": _driver(), "visible": os.environ.get("CUDA_VISIBLE_DEVICES")}


def _driver() -> dict[str, Any]:
    command = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return {"gpus": [], "version": None}
    rows = [line.split(", ") for line in done.stdout.splitlines() if done.returncode == 0 and ", " in line]
    return {"gpus": [row[0] for row in rows], "version": rows[0][-1] if rows else None}


def problem(facts: dict[str, Any]) -> str | None:
    """Why nothing can run here; None where something can."""
    from balancing_tools.doctor import problem as cannot_train

    torch, driver = facts["torch"], facts["driver"]
    if (reason := cannot_train(facts)) is not None:
        return reason
    if torch["gpus"]:
        return None
    if not driver["gpus"]:
        return "no GPU: neither torch nor nvidia-smi finds one; --dry-run lists what would run"
    seen = f"nvidia-smi lists {len(driver['gpus'])} GPU(s), but torch {torch['version']} finds none"
    if facts["visible"] is not None:
        return f"{seen}: CUDA_VISIBLE_DEVICES={facts['visible']!r} hides them; unset it"
    if not torch["cuda"]:
        return f"{seen}: it is built for the CPU only; install PyPI's wheel for Linux, which carries CUDA"
    return (
        f"{seen}: driver {driver['version']} is too old for its CUDA {torch['cuda']}; update the driver, or install a "
        "torch wheel of an older CUDA from https://pytorch.org/get-started/locally"
    )


def notes(facts: dict[str, Any]) -> list[str]:
    """What is missing or broken without stopping the acceptance."""
    from balancing_tools.doctor import missing

    return [f"{name}: {cost}" for name, cost in missing(facts).items()]


def obstacle(part: Part, facts: dict[str, Any], words: dict[str, str], machine: Machine) -> str | None:
    """Why a part cannot run; None where it can. words: the verdicts of parts that have one."""
    if part.after and words.get(part.after, "passed") not in ("passed", "not run"):
        return f"it needs '{part.after}', which did not pass"
    if part.needs == "compiler" and not facts["compiler"]:
        return "no C compiler for Triton: install gcc, or name one in CC"
    if not machine.gpus:
        return "on the CPU device it needs stand-ins, which tests have" if part.name == "te-context" else None
    if part.needs == "engine" and facts["transformer_engine"]["state"] != "ok":
        return f"Transformer Engine is {facts['transformer_engine']['state']}"
    if part.needs == "mps" and machine.gpus < part.ranks and not machine.mps:
        return "there is no MPS daemon, which gives each rank a share of the GPU"
    return None
