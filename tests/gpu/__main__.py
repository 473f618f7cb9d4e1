"""python -m tests.gpu: run the acceptance on the GPUs of this machine; `scripts/gpu_check.sh` prepares and starts it.

Each part is a pytest process of its own with its own time limit. Exit code 0 when all parts, or those that were named,
passed, 1 when one failed, 3 when none failed but not all ran, 2 where nothing can run.
"""

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import time
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any

from tests.gpu.parts import PARTS, Part, listed

REPOSITORY = Path(__file__).resolve().parents[2]
_GRACE = 20.0  # seconds in which pytest ends what it started
_START = "import torch, megatron.training.training; torch.zeros(1, device='cuda').sum().item()"


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> Any:
        print(f"gpu_check.sh: {message}; --help tells more", file=sys.stderr)
        sys.exit(2)


def main(argv: list[str]) -> int:
    parser = _Parser(prog="scripts/gpu_check.sh", description="The acceptance on GPUs, part by part.")
    parser.add_argument("parts", nargs="*", metavar="PART", help="by default all that have not run yet")
    parser.add_argument("--out", metavar="DIR", default=REPOSITORY / "runs" / "gpu_check", help="default: %(default)s")
    parser.add_argument("--dry-run", action="store_true", help="list the parts, what each shows and its limit")
    options = parser.parse_args(argv)
    if unknown := [name for name in options.parts if name not in [part.name for part in PARTS]]:
        parser.error(f"there is no part {unknown[0]!r}; parts are {', '.join(part.name for part in PARTS)}")
    if options.dry_run:
        print("\n".join(listed()))
        return 0
    from tests.gpu import machine

    facts = machine.look()
    reason = machine.problem(facts)
    out = Path(os.environ.get("GPU_CHECK_FROM", "."), options.out).absolute()
    try:
        out.mkdir(parents=True, exist_ok=True)
        (out / "results.jsonl").open("a").close()
    except OSError as error:
        reason = reason or f"cannot write to {out} ({error.strerror}); name a folder with --out DIR"
    if reason is not None:
        print(f"gpu_check.sh: {reason}", file=sys.stderr)
        return 2
    for number in (signal.SIGTERM, signal.SIGHUP):  # so that what was started is stopped
        signal.signal(number, lambda got, frame: sys.exit(128 + got))
    return _accept(facts, out, options.parts)


def _accept(facts: dict[str, Any], out: Path, chosen: list[str]) -> int:
    from tests.gpu import machine
    from tests.gpu.mps import private_mps
    from tests.gpu.verdicts import note, read_report, read_results

    gpus, results = facts["torch"]["gpus"], out / "results.jsonl"
    about = _about(facts)
    head = out / "about.txt"
    if not head.exists() or head.read_text() != "\n".join(about):  # what ran was of another commit or machine
        results.rename(out / "results-before.jsonl")
        results.touch()
        head.write_text("\n".join(about))
    print(*about, *machine.notes(facts), sep="\n", flush=True)
    parts = [part for part in PARTS if part.name in chosen]
    if not chosen:
        parts = [verdict.part for verdict in read_results(results) if verdict.word == "not run"]
        print(f"{len(PARTS) - len(parts)} parts have run before" * (len(parts) < len(PARTS)), flush=True)
    started = time.monotonic()
    subprocess.run([sys.executable, "-W", "ignore", "-c", _START], cwd=REPOSITORY, check=False, capture_output=True)
    start = time.monotonic() - started
    print(f"A process starts in {start:.0f} s; limits follow from that", flush=True)
    with private_mps() as mps:
        if any(part.ranks > len(gpus) for part in PARTS):
            shared = "at the same time, through MPS" if mps else "in turns, for there is no MPS daemon"
            print(f"Ranks that share a GPU run {shared}.", flush=True)
        for number, part in enumerate(parts, 1):
            words = {verdict.part.name: verdict.word for verdict in read_results(results)}
            print(f"[{number}/{len(parts)}] {part.name}, at most {part.limit(start):.0f} s: ", end="", flush=True)
            if (why := machine.obstacle(part, facts, words)) is not None:
                note(results, part.name, word="not run", said=why)
            else:
                note(results, part.name, began=date.today().isoformat())
                begin = time.monotonic()
                environment = (mps if part.ranks > len(gpus) else {}) | {"GPU_CHECK_START": f"{start:.1f}"}
                talks = words.get("nccl-2" if part.ranks == 2 else "nccl-4", "passed") in ("passed", "not run")
                if part.ranks > 1 and not part.name.startswith("nccl") and not (talks and facts["torch"]["nccl"]):
                    environment["GPU_CHECK_STAGED"] = "1"
                    note(
                        results, part.name, figure="over gloo, tensors staged through the host, since NCCL did not talk"
                    )
                over = run_part(part, out, environment, part.limit(start))
                word, said = read_report(out / f"{part.name}.xml") if over is None else ("failed", over)
                note(results, part.name, word=word, said=said, seconds=time.monotonic() - begin)
            verdict = next(verdict for verdict in read_results(results) if verdict.part is part)
            print(f"{verdict.word} after {verdict.seconds:.0f} s. {verdict.said}", flush=True)
            _write(read_results(results), about, out)
    return _conclude(read_results(results), chosen, about, out)


def _write(verdicts: list[Any], about: list[str], out: Path) -> str:
    """Write the table to OUT/acceptance.md and to docs/support.md. Returns where it went, in words."""
    from balancing.files import write_text
    from tests.gpu.verdicts import table, title, write_section

    text = "\n".join(
        [title(verdicts, about[0]), "", *(f"- {line}" for line in (*about, date.today())), "", table(verdicts)]
    )
    write_text(out / "acceptance.md", f"# {text}\n")
    page = REPOSITORY / "docs" / "support.md"
    try:
        write_section(page, text)
    except ValueError as error:
        return f"{out / 'acceptance.md'}; {error}"
    return f"{out / 'acceptance.md'} and {page.relative_to(REPOSITORY)}"


def _conclude(verdicts: list[Any], chosen: list[str], about: list[str], out: Path) -> int:
    """Print the table, and return the exit code by the parts that count."""
    from tests.gpu.verdicts import table, title

    print(f"\n{table(verdicts)}\n\n{title(verdicts, about[0])}")
    print(f"Written to {_write(verdicts, about, out)}; output of the parts: {out}")
    words = {verdict.word for verdict in verdicts if not chosen or verdict.part.name in chosen}
    return 0 if words == {"passed"} else 1 if words & {"failed", "stopped"} else 3


def _about(facts: dict[str, Any]) -> list[str]:
    """Device, machine, versions and commit, one line each."""
    torch, gpus = facts["torch"], facts["torch"]["gpus"]
    commit = "unknown"
    with contextlib.suppress(OSError):  # git need not be installed
        commit = _git("describe", "--always") or commit
        # The page that the acceptance writes itself is no other code.
        commit += "-dirty" * bool(_git("diff", "--name-only", "HEAD", "--", ".", ":(exclude)docs/support.md"))
    return [
        f"{len(gpus)} x {gpus[0]['name']}",
        f"driver {facts['driver']['version'] or 'unknown'}, {facts['cores']} CPU cores, Python {facts['python']}",
        f"torch {torch['version']}, CUDA {torch['cuda']}, NCCL {torch['nccl']}, "
        f"Transformer Engine {facts['transformer_engine'].get('version') or facts['transformer_engine']['state']}",
        f"commit {commit}",
    ]


def _git(*words: str) -> str:
    return subprocess.run(["git", *words], cwd=REPOSITORY, capture_output=True, text=True).stdout.strip()


def run_part(part: Part, out: Path, environment: dict[str, str], limit: float, device: str = "cuda") -> str | None:
    """Run one part's test. Its figures, report and output are left in `out`. Returns why it was ended, None if it ended
    by itself. It ends with this process, too, however that ends."""
    from tests.support.pool_server import die_with_parent

    report, output = out / f"{part.name}.xml", out / f"{part.name}.log"
    report.unlink(missing_ok=True)
    command = [sys.executable, "-m", "pytest", "--exhaustive", f"{Path(__file__).parent / part.test}[{device}]"]
    command += ["-p", "no:cacheprovider", "-rs", f"--junitxml={report}"]
    own = {
        "GPU_CHECK_RESULTS": str(out / "results.jsonl"),
        "GPU_CHECK_PART": part.name,
        "PYTHONDONTWRITEBYTECODE": "1",
        "TRITON_CACHE_DIR": os.environ.get("TRITON_CACHE_DIR", str(out / "triton")),
    }
    with output.open("wb") as file:
        process = subprocess.Popen(
            command,
            cwd=REPOSITORY,
            env=os.environ | own | environment,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            start_new_session=True,
            preexec_fn=partial(die_with_parent, os.getpid()),
        )
        try:
            process.wait(limit)
        except subprocess.TimeoutExpired:
            return f"it did not end within {limit:.0f} s: {output}"
        finally:
            _end(process)
    return None


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
