"""Run mutants, each in a copy of the tree, and print which test killed it. Exit code 1 when one survived.

A test that fails kills; where it failed because something did not end in its time, the table says so. When the time of
all tests of a mutant is over, it has survived: so long takes a machine that is too busy, and no fault.
"""

import argparse
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.mutants import REPOSITORY, Mutant, apply, find, node_id, read

_SECONDS = 1200.0  # of one mutant's tests; theirs are shorter, so that this ends what has stopped for another reason
_SHORT = 110  # characters of a reason in a table


def _copy(folder: Path) -> Path:
    ignored = shutil.ignore_patterns(".git", ".venv", "runs", "__pycache__", ".*_cache", "*.egg-info")
    return Path(shutil.copytree(REPOSITORY, folder / "tree", ignore=ignored))


def _run(tree: Path, tests: list[str]) -> tuple[int | None, str]:
    """Exit code of pytest on `tests` in `tree`, None when their time was over, and what it printed."""
    command = [sys.executable, "-m", "pytest", "--exhaustive", "-x", "-q", "-p", "no:cacheprovider", *tests]
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(
            command, cwd=tree, stdout=output, stderr=subprocess.STDOUT, start_new_session=True, env=_environment(tree)
        )
        code: int | None
        try:
            code = process.wait(_SECONDS)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        output.seek(0)
        return code, output.read()


def _environment(tree: Path) -> dict[str, str]:
    """Without what would let the checkout's own code be imported, and with whole lines of what failed."""
    return {**os.environ, "PYTHONPATH": str(tree), "COLUMNS": "400"}


def _killer(output: str) -> str:
    """The test that failed, by what pytest printed."""
    found = re.search(r"^(?:FAILED|ERROR) \S*?::(.+?)(?: - (.*))?$", output, re.M)
    if found is None:
        return "pytest itself, which printed no test"
    ended = re.match(r"\S*(?:Hang|Timeout|Tim\.\.\.)", found[2] or "") is None
    return found[1] if ended else f"{found[1]} (did not end)"


def _judge(mutant: Mutant) -> tuple[str, float]:
    """What killed the mutant, empty if it survived, and the seconds it took."""
    begin = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="mutant-") as folder:
        tree = _copy(Path(folder))
        apply(mutant, tree)
        code, output = _run(tree, [node_id(test) for test in mutant.killed_by])
    seconds = time.monotonic() - begin
    if code not in (0, 1, None):
        raise RuntimeError(f"pytest could not run the tests of '{mutant.name}', exit code {code}:\n{output[-3000:]}")
    killer = _killer(output) if code == 1 else ""
    print(f"{seconds:5.0f} s  {mutant.name}: {killer or 'SURVIVED'}", flush=True)
    return killer, seconds


def _table(mutants: list[Mutant], verdicts: list[tuple[str, float]]) -> str:
    lines = ["| file | mutant | what it does | killed by | s |", "|---|---|---|---|---|"]
    for mutant, (killer, seconds) in zip(mutants, verdicts, strict=True):
        where = find(mutant).relative_to(REPOSITORY)
        by = f"`{killer}`".replace("|", "\\|") if killer else "**survived**"
        lines.append(f"| {where} | {mutant.name} | {mutant.why} | {by} | {seconds:.0f} |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/mutants.sh", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="WORD", help="only mutants whose name or file has one of these")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="so many at a time (%(default)s)")
    parser.add_argument("--list", action="store_true", help="say what there is, and run nothing")
    asked = parser.parse_args()
    chosen = [
        mutant
        for mutant in read()
        if not asked.names or any(word in f"{mutant.name} {find(mutant)}" for word in asked.names)
    ]
    if not chosen:
        parser.error(f"no mutant has {' or '.join(asked.names)} in its name or file; --list shows all")
    if asked.list:
        for mutant in chosen:
            print(f"{find(mutant).relative_to(REPOSITORY)}: {mutant.name}: {mutant.why[:_SHORT]}")
        return 0
    tests = sorted({node_id(test) for mutant in chosen for test in mutant.killed_by})
    print(f"{len(chosen)} mutants, {len(tests)} tests, which must pass without any", flush=True)
    for first in range(0, len(tests), 20):
        with tempfile.TemporaryDirectory(prefix="mutant-") as folder:
            code, output = _run(_copy(Path(folder)), tests[first : first + 20])
        if code != 0:
            print(f"{_killer(output)} fails without a mutant:\n{output[-3000:]}", file=sys.stderr)
            return 2
    with ThreadPoolExecutor(max(1, asked.jobs)) as workers:
        verdicts = list(workers.map(_judge, chosen))
    print(f"\n{_table(chosen, verdicts)}")
    survivors = [mutant.name for mutant, (killer, _) in zip(chosen, verdicts, strict=True) if not killer]
    print(f"\n{len(chosen) - len(survivors)} of {len(chosen)} killed", *survivors, sep="\nsurvived: ")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
