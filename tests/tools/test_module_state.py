"""No variable of a module holds state of a run (`megatron.balanced.run.Run` does), so that a process may have several.

What may stay is of the process, and is listed here with its reason.
"""

import ast
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
OF_THE_PROCESS = {
    "balancing/clock.py": {"_paced"},  # a benchmark's pace, by thread
    "balancing/experts/split/launching.py": {"_compiled"},  # kernels
    "balancing/files.py": {"_swept"},
    "balancing/kernels/choice.py": {"_chosen"},  # measured once on a device
    "balancing/kernels/rows.py": {"_launched"},  # compiled kernels
    "balancing/messages.py": {"_connected", "_options", "_starting"},  # of process groups
    "balancing/ranges.py": {"_on"},  # whether a profiler reads the names
    "balancing/threads.py": {"_code", "_ends"},  # of the exit of the process
    "megatron/balanced/cpu/device.py": {"_active"},  # patches of torch
    "megatron/balanced/experts/known_counts.py": {"_share"},  # a context of the call in progress
    "megatron/balanced/loops/slime.py": {"before_step"},
    "megatron/balanced/loops/verl.py": {"_registered"},
    "megatron/balanced/trainer/agreement.py": {"_comparisons"},  # keys of the job's store
    "megatron/balanced/trainer/dry_run.py": {"_assumed"},  # patches of torch
    "megatron/balanced/trainer/patches.py": {"_installed"},  # patches of Megatron-LM
    "megatron/balanced/trainer/rendezvous.py": {"_asking", "_exits", "_hosted", "_joined", "_start"},
    "megatron/balanced/trainer/watchdog/failure.py": {"_program"},
}


def _variables(path: Path) -> set[str]:
    """Names of a module that are written as variables are, but for types, functions and loggers."""
    found = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        names = {target.id for target in targets if isinstance(target, ast.Name)}
        found |= {name for name in names if name.islower() and not name.startswith("__")} - {"logger"}
    return found


def test_variables_of_modules_are_of_the_process():
    files = [path for folder in ("balancing", "megatron") for path in sorted((REPOSITORY / folder).rglob("*.py"))]
    found = {str(path.relative_to(REPOSITORY)): _variables(path) for path in files}
    assert {name: variables for name, variables in found.items() if variables} == OF_THE_PROCESS
