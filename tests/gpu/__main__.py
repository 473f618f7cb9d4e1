"""python -m tests.gpu: run the acceptance on the GPUs of this machine; `scripts/gpu_check.sh` prepares and starts it.

Megatron-LM is imported once, by the server of a pool, and each rank of each part is a fork of it. Parts that only check
numbers run side by side, each stream on a branch of the server; costs run alone after them. Exit code 0 when all parts,
or those that were named, passed, 1 when one failed, 3 when none failed but not all ran, 2 where nothing can run.
"""

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import date
from pathlib import Path
from typing import Any

from tests.gpu.parts import IMPORT_SECONDS, MINUTES, PARTS, STREAMS, Part, choose, listed

REPOSITORY = Path(__file__).resolve().parents[2]


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> Any:
        print(f"gpu_check.sh: {message}; --help tells more", file=sys.stderr)
        sys.exit(2)


def main(argv: list[str]) -> int:
    parser = _Parser(prog="scripts/gpu_check.sh", description="The acceptance on GPUs, part by part.")
    parser.add_argument(
        "parts", nargs="*", metavar="PART", help="by default all that have not run yet and fit the time"
    )
    parser.add_argument(
        "--minutes", type=float, default=MINUTES, help="at most; parts are chosen by worth (%(default)g)"
    )
    parser.add_argument("--out", metavar="DIR", default=REPOSITORY / "runs" / "gpu_check", help="default: %(default)s")
    parser.add_argument("--dry-run", action="store_true", help="list the parts and what each shows")
    parser.add_argument(
        "--rehearse", action="store_true", help="on the CPU device, where an import takes as long as beside a GPU"
    )
    options = parser.parse_args(argv)
    if unknown := [name for name in options.parts if name not in [part.name for part in PARTS]]:
        parser.error(f"there is no part {unknown[0]!r}; parts are {', '.join(part.name for part in PARTS)}")
    if not 1 <= options.minutes <= 1000:
        parser.error(f"--minutes {options.minutes:g}: from 1 to 1000")
    if options.dry_run:
        print("\n".join(listed(options.minutes)))
        return 0
    begin = time.monotonic()
    out = Path(os.environ.get("GPU_CHECK_FROM", "."), options.out).absolute()
    try:
        out.mkdir(parents=True, exist_ok=True)
        (out / "results.jsonl").open("a").close()
    except OSError as error:
        print(f"gpu_check.sh: cannot write to {out} ({error.strerror}); name a folder with --out DIR", file=sys.stderr)
        return 2
    for number in (signal.SIGTERM, signal.SIGHUP):  # so that what was started is stopped
        signal.signal(number, lambda got, frame: sys.exit(128 + got))
    return _accept(out, options, begin)


def _accept(out: Path, options: argparse.Namespace, begin: float) -> int:
    from tests.gpu import machine
    from tests.gpu.mps import private_mps
    from tests.gpu.trial import Machine
    from tests.gpu.verdicts import read_results

    with _imported(out, options.rehearse) as pool, private_mps() as mps:
        facts = machine.look()  # while the server imports
        if not options.rehearse and (reason := machine.problem(facts)) is not None:
            print(f"gpu_check.sh: {reason}", file=sys.stderr)
            return 2
        results = out / "results.jsonl"
        about = _about(facts, options.rehearse)
        head = out / "about.txt"
        if not head.exists() or head.read_text() != "\n".join(about):  # what ran was of another commit or machine
            results.rename(out / "results-before.jsonl")
            results.touch()
            head.write_text("\n".join(about))
        print(*about, *machine.notes(facts), sep="\n", flush=True)
        chosen = [part for part in PARTS if part.name in options.parts]
        if not options.parts:
            have_run = [verdict.part.name for verdict in read_results(results) if verdict.word != "not run"]
            chosen = choose(options.minutes, have_run)
            left = [part.name for part in PARTS if part not in chosen and part.name not in have_run]
            print(
                f"{len(have_run)} parts have run before; {len(chosen)} run now in at most {options.minutes:g} minutes"
            )
            if left:
                print(f"Without those that do not fit: {', '.join(left)}")
        pool.start()
        print(f"Megatron-LM is imported after {time.monotonic() - begin:.0f} s, once for all ranks", flush=True)
        torch = facts["torch"]
        gpus = 0 if options.rehearse else len(torch["gpus"])
        if gpus and any(part.ranks > gpus for part in chosen):
            shared = "at the same time, through MPS" if mps else "in turns, for there is no MPS daemon"
            print(f"Ranks that share a GPU run {shared}.", flush=True)
        nccl = tuple(int(number) for number in (torch["nccl"] or "0").split("."))
        runner = Runner(pool, Machine(gpus, nccl, mps), facts, out, begin + 60 * options.minutes)
        runner.run(chosen)
        spent = time.monotonic() - begin
        print(
            f"{runner.started} parts in {spent:.0f} s: {runner.runs} runs, {runner.ranks} ranks, all forks, one import"
        )
    return _conclude(read_results(results), options, about, out)


@contextlib.contextmanager
def _imported(out: Path, rehearse: bool) -> Iterator[Any]:
    """A pool whose server starts to import what ranks need."""
    from tests.gpu.trial import FP32
    from tests.support.pool import Pool

    environment = {
        "TRITON_CACHE_DIR": os.environ.get("TRITON_CACHE_DIR", str(out / "triton")),
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTORCH_NVML_BASED_CUDA_CHECK": "1",  # asks the driver for GPUs without initializing CUDA
        "TORCHINDUCTOR_COMPILE_THREADS": "1",  # or it starts processes that import torch
        **{name: value for name, value in FP32.items() if value is not None},
    }
    if rehearse:
        environment["POOL_IMPORT_SECONDS"] = str(IMPORT_SECONDS)
    pool = Pool("cpu" if rehearse else "cuda", environment=environment)
    pool.launch()
    try:
        yield pool
    finally:
        pool.stop()


class Runner:
    """Runs parts and notes what came of them.

    deadline: by time.monotonic(), when everything is cut. runs, ranks: of all parts so far. started: parts.
    """

    def __init__(self, pool: Any, machine: Any, facts: dict[str, Any], out: Path, deadline: float) -> None:
        self._pool, self._machine, self._facts, self._out, self._deadline = pool, machine, facts, out, deadline
        self._results = out / "results.jsonl"
        self.runs = self.ranks = self.started = 0
        self._again: list[Part] = []  # failed while others ran, which may have been the reason
        self._lock = threading.Lock()

    def run(self, parts: Sequence[Part]) -> None:
        """First whether ranks talk, on which others depend; then streams, for which the time of costs is kept; then
        costs; then what is left of the streams, and what failed in them once more, alone."""
        beside = deque(part for part in parts if not part.alone)
        alone = [part for part in parts if part.alone]
        if beside and beside[0].name == "nccl-2":
            self._part(beside.popleft(), self._pool, self._deadline, True)
        kept = sum(part.seconds for part in alone)
        self._streams(beside, self._deadline - kept)
        for part in alone:
            self._part(part, self._pool, self._deadline, True)
        self._streams(beside, self._deadline)
        for part in self._again:
            if time.monotonic() + part.seconds < self._deadline:
                self._part(part, self._pool, self._deadline, True)

    def _streams(self, parts: deque[Part], deadline: float) -> None:
        """Run parts side by side until the deadline, and leave those that there is no time for."""

        def stream() -> None:
            branch = self._pool.branch()
            try:
                while True:
                    with self._lock:
                        if not parts or time.monotonic() + parts[0].seconds > deadline:
                            return
                        part = parts.popleft()
                    self._part(part, branch, self._deadline, False)
            finally:
                branch.stop()

        if parts:
            with ThreadPoolExecutor(STREAMS) as threads:
                for done in [threads.submit(stream) for _ in range(min(STREAMS, len(parts)))]:
                    done.result()

    def _part(self, part: Part, pool: Any, deadline: float, alone: bool) -> None:
        from tests.gpu import machine
        from tests.gpu.trial import Notes
        from tests.gpu.verdicts import note, read_results

        words = {verdict.part.name: verdict.word for verdict in read_results(self._results)}
        if (why := machine.obstacle(part, self._facts, words, self._machine)) is not None:
            note(self._results, part.name, word="not run", said=why)
            self._say(part)
            return
        failed = (
            next((verdict for verdict in read_results(self._results) if verdict.part is part), None) if alone else None
        )
        note(self._results, part.name, began=date.today().isoformat())
        begin = time.monotonic()
        notes = Notes(part.name, self._results)
        if part in self._again and failed is not None:
            notes.figure(f"failed beside others: {failed.said}")
        staged = bool(self._machine.gpus) and part.ranks > 1 and not part.name.startswith("nccl")
        staged = staged and not self._talks(part, words)
        if staged:
            notes.figure("over gloo, tensors staged through the host, since NCCL did not talk")
        seconds = min(part.limit, deadline - begin)
        word, said, runs, ranks = run_part(part, pool, self._machine, notes, seconds, staged)
        if word == "failed" and not alone:
            self._again.append(part)
        with self._lock:
            self.runs += runs
            self.ranks += ranks
            self.started += 1
        note(self._results, part.name, word=word, said=said, seconds=time.monotonic() - begin)
        self._say(part)

    def _talks(self, part: Part, words: dict[str, str]) -> bool:
        asked = ["nccl-2"] if part.ranks == 2 else ["nccl-2", "nccl-4"]
        return bool(self._machine.nccl > (0,)) and all(words.get(a, "passed") in ("passed", "not run") for a in asked)

    def _say(self, part: Part) -> None:
        from tests.gpu.verdicts import read_results

        verdict = next(verdict for verdict in read_results(self._results) if verdict.part is part)
        print(f"{part.name}: {verdict.word} after {verdict.seconds:.0f} s. {verdict.said}", flush=True)


def run_part(
    part: Part, pool: Any, machine: Any, notes: Any, seconds: float, staged: bool = False
) -> tuple[str, str, int, int]:
    """Run one part. Returns its verdict, why it is no better one, and how many runs and ranks."""
    import dataclasses

    from tests.gpu.trial import Cut, Skipped, Trial

    with tempfile.TemporaryDirectory(prefix="gpu-check-", ignore_cleanup_errors=True) as folder:
        trial = Trial(pool, dataclasses.replace(machine, staged=staged), notes, Path(folder), seconds)
        try:
            trial.work(part.test)
        except Skipped as why:
            return "not run", str(why), trial.runs, trial.ranks
        except Cut as why:
            return "stopped", str(why), trial.runs, trial.ranks
        except Exception as error:
            at = traceback.extract_tb(error.__traceback__)[-1]
            said = f"{type(error).__name__}: {error or at.line}"
            notes.detail(" ".join([said, *getattr(error, "__notes__", ())]))
            return "failed", said, trial.runs, trial.ranks
    return "passed", "", trial.runs, trial.ranks


def _write(verdicts: list[Any], about: list[str], out: Path, rehearse: bool) -> str:
    """Write the table to OUT/acceptance.md and to docs/support.md. Returns where it went, in words."""
    from balancing.files import write_text
    from tests.gpu.verdicts import details, table, title, write_section

    text = "\n".join(
        [title(verdicts, about[0]), "", *(f"- {line}" for line in (*about, date.today())), "", table(verdicts)]
    )
    behind = "\n".join(details(out / "results.jsonl"))
    write_text(out / "acceptance.md", f"# {text}\n\n## Iteration by iteration\n\n{behind}\n")
    page = REPOSITORY / "docs" / "support.md"
    if rehearse:
        return str(out / "acceptance.md")
    try:
        write_section(page, text)
    except ValueError as error:
        return f"{out / 'acceptance.md'}; {error}"
    return f"{out / 'acceptance.md'} and {page.relative_to(REPOSITORY)}"


def _conclude(verdicts: list[Any], options: argparse.Namespace, about: list[str], out: Path) -> int:
    """Print the table, and return the exit code by the parts that count."""
    from tests.gpu.verdicts import table, title

    print(f"\n{table(verdicts)}\n\n{title(verdicts, about[0])}")
    print(f"Written to {_write(verdicts, about, out, options.rehearse)}")
    words = {verdict.word for verdict in verdicts if not options.parts or verdict.part.name in options.parts}
    return 0 if words == {"passed"} else 1 if words & {"failed", "stopped"} else 3


def _about(facts: dict[str, Any], rehearse: bool) -> list[str]:
    """Device, machine, versions and commit, one line each."""
    torch, gpus = facts["torch"], facts["torch"]["gpus"]
    commit = "unknown"
    with contextlib.suppress(OSError):  # git need not be installed
        commit = _git("describe", "--always") or commit
        # The page that the acceptance writes itself is no other code.
        commit += "-dirty" * bool(_git("diff", "--name-only", "HEAD", "--", ".", ":(exclude)docs/support.md"))
    return [
        f"the CPU device, where an import takes {IMPORT_SECONDS:.0f} s"
        if rehearse
        else f"{len(gpus)} x {gpus[0]['name']}",
        f"driver {facts['driver']['version'] or 'unknown'}, {facts['cores']} CPU cores, Python {facts['python']}",
        f"torch {torch['version']}, CUDA {torch['cuda']}, NCCL {torch['nccl']}, "
        f"Transformer Engine {facts['transformer_engine'].get('version') or facts['transformer_engine']['state']}",
        f"commit {commit}",
    ]


def _git(*words: str) -> str:
    return subprocess.run(["git", *words], cwd=REPOSITORY, capture_output=True, text=True).stdout.strip()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
