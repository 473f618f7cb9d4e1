"""A job that is started again goes on from its last checkpoint, in folders that nobody tidies up.

It ends with the losses and parameters of a run that nobody disturbed. torchrun starts it again, on one node or on two,
or somebody starts a new job.
"""

import os
import pickle
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.emulated.ports import reserved_ports
from tests.support.patience import PATIENCE, PATIENT_LAUNCHER
from tests.support.pool import REPOSITORY, single_threaded
from tests.support.sampled import sampled
from tests.support.training import EXACT, MOCK_DATA, MODEL, Run, assert_close, join

FLAGS = "--pipeline-model-parallel-size 2 --balance-layers --overlap-grad-reduce --ddp-bucket-size 2000"
ARGV = [*MODEL, *MOCK_DATA, *EXACT, *FLAGS.split(), "--train-iters", "8"]
# A rank of pretrain_gpt.py. Rank 0 is killed in the sixth iteration of the first start, when the other one waits there,
# too: in the fifth one it would miss rank 0 and fail by itself.
# What writes checkpoints is spawned, and runs this file under another name.
PROGRAM = """
import os, pickle, runpy, signal, time
from functools import partial
from pathlib import Path

folder, rank = Path(__file__).parent, os.environ["RANK"]
if __name__ == "__main__":
    from megatron.balanced.cpu.device import use_cpu

    use_cpu()

    from megatron.balanced.shared.callbacks import StepCallback
    from megatron.balanced.trainer import train
    from tests.support.training import watch

    class Die(StepCallback):
        def begin_step(self, iteration, config):
            if iteration == 5 and not (folder / f"died-{rank}").exists():
                (folder / f"died-{rank}").touch()
                if rank == "0":
                    while not (folder / "died-1").exists():
                        time.sleep(0.01)
                    os.kill(os.getpid(), signal.SIGKILL)
                time.sleep(3600)

    train.train = partial(train.train, callbacks=[Die()])
    finish = watch(True)
runpy.run_path("pretrain_gpt.py", run_name=__name__)
if __name__ == "__main__":
    (folder / f"ended-{rank}").write_bytes(pickle.dumps((finish(), os.environ["TORCHELASTIC_RESTART_COUNT"])))
"""


def _nodes(way: str, port: int) -> list[list[str]]:
    """torchrun's flags on each node. port: where two nodes meet."""
    if way == "two nodes":
        meet = f"--rdzv-backend c10d --rdzv-endpoint 127.0.0.1:{port} --rdzv-id 1 {PATIENT_LAUNCHER}"
        return [f"--nnodes 2 --nproc-per-node 1 --max-restarts 1 {meet}".split()] * 2
    restarts = int(way == "one node")
    return [f"--standalone --nproc-per-node 2 --max-restarts {restarts} {PATIENT_LAUNCHER}".split()]


def _launch(folder: Path, way: str, *more: str) -> list[int]:
    """Train. Returns the exit code of torchrun on each node; "log" has what they said."""
    (folder / "program.py").write_text(PROGRAM)
    with open(folder / "log", "a") as log:
        # As with `| tee log`, which ends when nothing has the pipe any more: no process outlives its rank.
        tee = subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=log)
    jobs = []
    with reserved_ports(1) as (port,):
        for flags in _nodes(way, port):
            command = [sys.executable, "-m", "torch.distributed.run", *flags, folder / "program.py", *ARGV, *more]
            environment = single_threaded()
            jobs.append(subprocess.Popen(command, cwd=REPOSITORY, env=environment, stdout=tee.stdin, stderr=tee.stdin))
        tee.stdin.close()
        try:
            codes = [job.wait(2 * PATIENCE) for job in jobs]
            tee.wait(PATIENCE)
            return codes
        finally:
            for job in (*jobs, tee):
                job.terminate()  # and its ranks
                job.wait(PATIENCE)


def _ended(folder: Path) -> tuple[Run, list[str]]:
    """What the last start's ranks saw, and torchrun's count of restarts on each."""
    ends = [pickle.loads((folder / f"ended-{rank}").read_bytes()) for rank in range(2)]
    return join([run for run, _ in ends]), [count for _, count in ends]


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Run:
    """The run that nobody disturbed."""
    folder = tmp_path_factory.mktemp("whole")
    for rank in range(2):
        (folder / f"died-{rank}").touch()
    assert _launch(folder, "a new job") == [0], (folder / "log").read_text()
    return _ended(folder)[0]


COUNTS = {"two nodes": ["1", "0"], "one node": ["1", "1"], "a new job": ["0", "0"]}


@pytest.mark.parametrize("way", sampled(COUNTS, "two nodes"))
def test_a_job_that_is_started_again_goes_on(whole, tmp_path, way):
    saved = tmp_path / "saved"
    more = ["--save", str(saved), "--load", str(saved), "--save-interval", "2", "--balance-report", str(saved)]
    codes = _launch(tmp_path, way, *more)
    if way == "a new job":
        assert codes != [0]
        codes = _launch(tmp_path, way, *more)
    assert not any(codes), (tmp_path / "log").read_text()
    assert (tmp_path / "died-0").exists(), "the first start was not killed"
    again, counts = _ended(tmp_path)
    assert counts == COUNTS[way]
    assert len(again.losses) == 4, "it did not go on from iteration 4"
    assert_close(replace(again, losses=[*whole.losses[:4], *again.losses]), whole)
    left = [name for _, _, names in os.walk(saved) for name in names]
    assert not [name for name in left if name.endswith(".part") or name == ".balance-lock"], left
