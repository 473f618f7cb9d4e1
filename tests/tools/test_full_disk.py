"""On a full disk every writer says which path it could not write, and leaves nothing half-written.

The disk is a tmpfs. Where none can be mounted, commands of their own process have a limit on the size of files instead.
"""

import os
import resource
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.support.command import run_command
from tests.support.made_up_run import Job, write_run
from tests.support.patience import PATIENCE
from tests.support.training import MOCK_DATA, MODEL

REPOSITORY = Path(__file__).resolve().parents[2]
BASE = [*MODEL, *MOCK_DATA]
# flags of a command, and the files that it cannot write
WRITERS = {
    "page of a report": ("-m balancing.report {run} --html {disk}/page.html", "page.html"),
    "forecast": ("-m balancing.whatif {run} --json {disk}/forecast.json", "forecast.json"),
    "loads of experts": ("-m balancing.experts --from-report {run} --save {disk}/loads.npz", "loads.npz"),
    "cluster": ("-m balancing.cluster --preset h100-8x400g --json {disk}/cluster.json", "cluster.json"),
    "corpus": ("scripts/prepare_data.py --input {texts} --output-prefix {disk}/corpus", "corpus"),
}


@contextmanager
def _disk(folder: Path, size: str) -> Iterator[bool]:
    """A tmpfs. Gives whether it could be mounted."""
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", folder]
    try:
        is_mounted = subprocess.run(command, capture_output=True).returncode == 0
    except FileNotFoundError:
        is_mounted = False
    try:
        yield is_mounted
    finally:
        if is_mounted:
            # Lazily: what a rank started is killed with it, and may have files open until it has ended.
            subprocess.run(["umount", "--lazy", folder], check=True)


def _fill(folder: Path) -> None:
    with open(folder / "full", "wb", buffering=0) as file, pytest.raises(OSError, match="No space left"):
        while True:
            file.write(bytes(4096))


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """Of 1 MiB."""
    with _disk(tmp_path / "disk", "1M") as is_mounted:
        if not is_mounted:
            pytest.skip("needs to mount a tmpfs")
        yield tmp_path / "disk"


@pytest.fixture
def full_disk(small_disk: Path) -> Path:
    _fill(small_disk)
    return small_disk


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("run"), Job(), 4)


def _few_bytes() -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (64, 64))


@pytest.mark.parametrize("writer", WRITERS)
def test_a_command_names_what_it_cannot_write(run: Path, tmp_path: Path, writer: str) -> None:
    flags, name = WRITERS[writer]
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.txt").write_text("text " * 1000)
    disk = tmp_path / "disk"
    with _disk(disk, "64k") as is_mounted:
        if is_mounted:
            _fill(disk)
        before = sorted(os.listdir(disk))
        done = subprocess.run(
            [sys.executable, *flags.format(run=run, disk=disk, texts=tmp_path / "texts").split()],
            cwd=REPOSITORY, env={**os.environ, "PYTHONPATH": str(REPOSITORY)}, capture_output=True, text=True,
            timeout=PATIENCE, preexec_fn=None if is_mounted else _few_bytes,
        )  # fmt: skip
        assert done.returncode == 2, done.stderr
        (line,) = done.stderr.splitlines()
        assert ": error: cannot write " in line and f"{disk}/{name}" in line
        assert ("No space left on device" if is_mounted else "File too large") in line
        assert sorted(os.listdir(disk)) == before


def test_training_goes_on_without_its_report(pool, full_disk):
    """Its scalars and losses are not lost with it."""
    flags = ["--balance-report", str(full_disk / "report")]
    ((code, _),) = pool.run(1, run_command, [*BASE, *flags])
    assert code == 0
    told = [line for line in pool.output[0].splitlines() if "No space left on device" in line]
    assert len(told) == 2, told
    for name in ("events.jsonl", "trace.json"):
        assert sum(f"{full_disk}/report/{name}" in line for line in told) == 1
    assert "iteration        4/       4" in pool.output[0]
    assert os.path.getsize(full_disk / "report" / "events.jsonl") == 0


def _refusal(pool, argv: list[str], *flags: object, run: Callable = run_command) -> str:
    """The last line of a job that ends. run: on the rank, in place of `run_command`."""
    ((code, said),) = pool.run(1, run, [*argv, *map(str, flags)])
    assert code == 2, said
    (line,) = [line for line in said.splitlines() if line.startswith("pretrain_gpt.py")]
    assert said.splitlines()[-1] == line
    return line.removeprefix("pretrain_gpt.py: error: ")


def test_a_checkpoint_names_its_folder_and_iteration(pool, small_disk):
    assert _refusal(pool, BASE, "--save", small_disk, "--save-interval", 2) == (
        f"the checkpoint of iteration 2 cannot be written: no space is left on the disk of --save {small_disk}; free "
        "some, and start again"
    )


def _after_tensorboards_thread(argv: list[str]) -> tuple[object, str]:
    """`run_command`, where TensorBoard's thread has printed its own traceback before its error reaches training."""
    from tensorboard.summary.writer.event_file_writer import _AsyncWriter

    check = _AsyncWriter._check_worker_status

    def check_ended(self: Any) -> None:
        if self._worker.exception is not None:
            self._worker.join()
        check(self)

    _AsyncWriter._check_worker_status = check_ended
    return run_command(argv)


def test_tensorboard_names_its_folder(pool, full_disk):
    assert _refusal(pool, BASE, "--tensorboard-dir", full_disk / "board", run=_after_tensorboards_thread) == (
        f"no space is left on the disk of --tensorboard-dir {full_disk}/board; free some, and start again"
    )


def test_indices_of_a_corpus_name_their_folder(pool, corpus, full_disk):
    assert _refusal(pool, [*MODEL, *corpus], "--data-cache-path", full_disk) == (
        f"no space is left on the disk of --data-cache-path {full_disk}; free some, and start again"
    )
