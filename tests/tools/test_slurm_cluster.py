"""The SLURM that tests start on this machine leaves nothing behind."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.support.patience import PATIENCE
from tests.support.slurm_cluster import wait_until, why_not


@pytest.mark.parametrize("ending", ["stopped", "owner killed"])
def test_nothing_survives_the_cluster(ending: str) -> None:
    """Neither a daemon nor a process of a running job outlives the cluster, even when its owner is killed outright."""
    reason = why_not()
    if reason is not None:
        pytest.skip(reason)
    inside = "echo $SLURM_CONF; sbatch --nodes=1 --output=/dev/null --wrap 'sleep 301 & sleep 301' >&2; cat >&2"
    command = [sys.executable, "-m", "tests.support.slurm_cluster", "bash", "-c", inside]
    owner = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    assert owner.stdin is not None and owner.stdout is not None
    directory = Path(owner.stdout.readline().strip()).parent
    try:

        def processes() -> dict[psutil.Process, str]:
            """Their names. Slurm starts short ones, which may end meanwhile."""
            found = {}
            for process in psutil.Process(owner.pid).children(recursive=True):
                with contextlib.suppress(psutil.NoSuchProcess):
                    if process.name() != "bash" or process.ppid() != owner.pid:
                        found[process] = process.name()
            return found

        wait_until(lambda: [*processes().values()].count("sleep") == 2, lambda: str(processes()))
        alive = processes()
        assert {"munged", "slurmctld", "slurmd", "sleep"} <= {*alive.values()}
        if ending == "owner killed":
            owner.kill()
        owner.stdin.close()  # ends the command in the cluster
        owner.wait(timeout=PATIENCE)
        survivors = psutil.wait_procs([*alive], timeout=PATIENCE)[1]
        assert not survivors
        assert directory.exists() == (ending == "owner killed")
    finally:
        owner.kill()
        owner.stdout.close()
        shutil.rmtree(directory, ignore_errors=True)
