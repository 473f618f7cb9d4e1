"""python -m tests.gpu: run the acceptance on the GPUs of this machine; `scripts/gpu_check.sh` prepares and starts it.

Each part is a pytest process of its own with its own time limit. Exit code 0 when all parts that ran passed, 1 when one
failed or none ran, 2 where nothing can run.
"""

import contextlib
import os
import signal
import subprocess
import sys
import time
from datetime import date
from pathlib import Path
from typing import Any

from tests.gpu.parts import PARTS, Part

REPOSITORY = Path(__file__).resolve().parents[2]
_GRACE = 20.0  # seconds in which pytest ends what it started


def main(argv: list[str]) -> int:
    if argv == ["--dry-run"]:
        print("\n".join(_listed()))
        return 0
    if argv:
        print(f"gpu_check.sh: cannot make sense of '{' '.join(argv)}'; it takes --dry-run or nothing", file=sys.stderr)
        return 2
    from tests.gpu import machine

    facts = machine.look()
    if (reason := machine.problem(facts)) is not None:
        print(f"gpu_check.sh: {reason}", file=sys.stderr)
        return 2
    for number in (signal.SIGTERM, signal.SIGHUP):  # so that the daemon is stopped
        signal.signal(number, lambda got, frame: sys.exit(128 + got))
    return _accept(facts, REPOSITORY / "benchmarks" / "log")


def _listed() -> list[str]:
    rows = [f"{n:2}. {p.name:<20}{p.seconds:>4} s  {p.ranks} rank(s)  {p.shows}" for n, p in enumerate(PARTS, 1)]
    return [*rows, f"At most {sum(part.seconds for part in PARTS) / 60:.0f} minutes in all."]


def _accept(facts: dict[str, Any], log: Path) -> int:
    from tests.gpu import machine
    from tests.gpu.mps import private_mps
    from tests.gpu.verdicts import Verdict, table, write_entry

    gpus = facts["torch"]["gpus"]
    device = f"{len(gpus)} x {gpus[0]['name']}"
    remarks = machine.notes(facts)
    print(f"Acceptance on {device}, driver {facts['driver']['version'] or 'unknown'}", *remarks, sep="\n", flush=True)
    folder = REPOSITORY / "runs" / "gpu_check"
    folder.mkdir(parents=True, exist_ok=True)
    verdicts: list[Verdict] = []
    failed: set[str] = set()
    with private_mps() as mps:
        if any(part.ranks > len(gpus) for part in PARTS):
            shared = "at the same time, through MPS" if mps else "in turns, for there is no MPS daemon"
            remarks.append(f"Ranks that share a GPU run {shared}.")
            print(remarks[-1], flush=True)
        for number, part in enumerate(PARTS, 1):
            print(f"[{number}/{len(PARTS)}] {part.name}, at most {part.seconds} s: ", end="", flush=True)
            if (reason := machine.obstacle(part, facts, failed)) is not None:
                verdict = Verdict(part, "not run", 0.0, reason)
            else:
                verdict = run_part(part, folder, mps if part.ranks > len(gpus) else {})
            verdicts.append(verdict)
            if verdict.word != "passed":
                failed.add(part.name)
            print(f"{verdict.word} after {verdict.seconds:.0f} s. {verdict.said}", flush=True)
    print(f"\n{table(verdicts)}\n")
    entry = write_entry(verdicts, log, date.today().isoformat(), device, _about(facts, device, remarks))
    print(f"Written to {entry.relative_to(REPOSITORY)} and listed in its README.md; output of the parts: {folder}")
    words = {verdict.word for verdict in verdicts}
    return 0 if "passed" in words and "failed" not in words else 1


def _about(facts: dict[str, Any], device: str, remarks: list[str]) -> list[str]:
    torch = facts["torch"]
    described = subprocess.run(
        ["git", "describe", "--always", "--dirty"], cwd=REPOSITORY, capture_output=True, text=True
    )
    machine = f"{device}, driver {facts['driver']['version'] or 'unknown'}, {facts['cores']} CPU cores"
    versions = f"torch {torch['version']}, CUDA {torch['cuda']}, NCCL {torch['nccl']}, Python {facts['python']}"
    return [
        f"- Commit: {described.stdout.strip() or 'unknown'}",
        f"- Machine: {machine}; {versions}",
        "- Command: `scripts/gpu_check.sh`",
        "- Baseline: each part's own reference: float64, NumPy, or the run without balancing on the same GPUs",
        *(f"- {remark}" for remark in remarks),
    ]


def run_part(part: Part, folder: Path, environment: dict[str, str], device: str = "cuda") -> Any:
    """Run one part's test. Its output and its report are left in `folder`."""
    from tests.gpu.verdicts import Verdict, read_report

    name = part.name.replace(" ", "_").replace(",", "")
    report, output = folder / f"{name}.xml", folder / f"{name}.log"
    report.unlink(missing_ok=True)
    command = [sys.executable, "-m", "pytest", "--exhaustive", f"{Path(__file__).parent / part.test}[{device}]"]
    command += ["-p", "no:cacheprovider", "-rs", f"--junitxml={report}"]
    begin = time.monotonic()
    with output.open("wb") as file:
        process = subprocess.Popen(
            command,
            cwd=REPOSITORY,
            env=os.environ | environment,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            start_new_session=True,
        )
        try:
            process.wait(part.seconds)
        except subprocess.TimeoutExpired:
            return Verdict(
                part, "failed", time.monotonic() - begin, f"it did not end within {part.seconds} s: {output}"
            )
        finally:
            _end(process)
    return read_report(part, report, time.monotonic() - begin)


def _end(process: subprocess.Popen) -> None:
    """Let pytest end its ranks, then end whatever is left."""
    if process.poll() is None:
        process.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_GRACE)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
