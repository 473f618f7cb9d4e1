"""Commands as users give them: in a process of their own, or on a rank of the pool, with what they say."""

import contextlib
import io
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.support.patience import PATIENCE
from tests.support.pool import single_threaded
from tests.support.program import parse

__all__ = ["REPOSITORY", "plan_lines_of", "run_command", "run_python", "started"]

REPOSITORY = Path(__file__).resolve().parents[2]
_LAUNCHER = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def run_python(
    *words: object, cwd: Path = REPOSITORY, timeout: float = PATIENCE, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run this Python with these words, one thread and no launcher's environment, and wait for its end.

    cwd: the working directory. environment: variables beside those of this process.
    """
    inherited = {name: value for name, value in single_threaded().items() if name not in _LAUNCHER}
    return subprocess.run(
        [sys.executable, *map(os.fspath, words)],
        cwd=cwd, env=inherited | environment, capture_output=True, text=True, timeout=timeout,
    )  # fmt: skip


@contextlib.contextmanager
def started(*command: object, says: str, **environment: str) -> Iterator[subprocess.Popen[str]]:
    """A process that goes on after its first line, `says`, and is killed at the end if it still runs.

    Its standard input stays open. environment: variables beside those of this process.
    """
    with subprocess.Popen(
        [*map(os.fspath, command)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        cwd=REPOSITORY, env=os.environ | environment,
    ) as process:  # fmt: skip
        try:
            assert process.stdout and process.stdout.readline() == f"{says}\n"
            yield process
        finally:
            process.kill()


def run_command(argv: list[str]) -> tuple[object, str]:
    """Run the command on this rank. Returns its exit code and stderr."""
    import pretrain_gpt

    sys.argv[1:] = argv
    stderr = io.StringIO()
    with contextlib.redirect_stderr(stderr):
        try:
            pretrain_gpt.main()
        except SystemExit as stop:
            return stop.code, stderr.getvalue()
    return 0, stderr.getvalue()


def plan_lines_of(flags: list[str], environment: dict[str, str]) -> tuple[Any, str, list[str]]:
    """Dry-run a command line on this rank, as if its launcher had set `environment` alone.

    Returns the exit code, 0 where it is accepted, what was said, and the lines of its plan.
    """
    for name in _LAUNCHER:
        os.environ.pop(name, None)
    os.environ |= environment
    said = io.StringIO()
    with contextlib.redirect_stderr(said), contextlib.redirect_stdout(said):
        try:
            args, config, train = parse([*flags, "--balance-dry-run"])
        except SystemExit as stopped:
            return stopped.code, said.getvalue(), []

    from megatron.balanced.trainer.dry_run import plan_lines

    extension = train.keywords["extension"]
    return 0, said.getvalue(), plan_lines(args, config, 0 if extension is None else extension.frozen_layers(args))
