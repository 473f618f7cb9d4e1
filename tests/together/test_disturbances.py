"""A rank stops or is slow: the job ends in one line, or goes on with the losses and parameters of a run that nobody
disturbed."""

import os
import signal
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from tests.support.command import run_command
from tests.support.corpus import heavy_tailed, write_documents
from tests.support.settings import settings
from tests.support.training import EXACT, MOCK_DATA, MODEL, MOE, RankRun, assert_close, join, train_rank

RANKS = 4
VICTIM = 1
PIPELINE = "--pipeline-model-parallel-size 2 --balance-layers --overlap-grad-reduce --ddp-bucket-size 2000".split()
ALL = (
    f"{' '.join(MOE)} --pipeline-model-parallel-size 2 --context-parallel-size 2 --expert-model-parallel-size 2 "
    "--moe-token-dispatcher-type alltoall --dataloader-inter-document-masking --balance-layers --balance-sequences "
    f"--balance-experts {settings('experts', min_gain=0)} --init-method-std 0.1"
).split()


def _stops(argv: list[str], folder: Path) -> tuple[object, str]:
    """Run the command on this rank, of which one stops in the third iteration as by SIGSTOP from outside.

    The others wait for seconds instead of minutes from then on. The first of them to end kills the one that stopped,
    as a launcher does.
    """
    import torch.distributed as dist
    from megatron.training import training

    step = training.train_step
    number = [0]

    def train_step(*args: Any, **kwargs: Any) -> Any:
        number[0] += 1
        if number[0] == 3:
            for process_group in dist.distributed_c10d._world.pg_map:
                dist.distributed_c10d._set_pg_timeout(timedelta(seconds=2), process_group)
            if dist.get_rank() == VICTIM:
                (folder / "pid.part").write_text(str(os.getpid()))
                (folder / "pid.part").rename(folder / "pid")
                os.kill(os.getpid(), signal.SIGSTOP)
        return step(*args, **kwargs)

    train_step.__wrapped__ = step  # type: ignore[attr-defined]
    training.train_step = train_step
    code, said = run_command(argv)
    print(f"exit code {code}\n{said}", flush=True)
    (folder / f"ended-{os.environ['RANK']}").touch()
    while len([*folder.glob("ended-*")]) < RANKS - 1:
        time.sleep(0.1)
    os.kill(int((folder / "pid").read_text()), signal.SIGKILL)
    return code, said


def test_a_rank_that_stops_is_named_and_the_others_end(pool, tmp_path):
    argv = [*MODEL, *MOCK_DATA, *PIPELINE, "--train-iters", "100"]
    with pytest.raises(RuntimeError, match=f"rank {VICTIM} of {RANKS} died"):
        pool.run(RANKS, _stops, argv, tmp_path)
    others = [said for rank, said in enumerate(pool.output) if rank != VICTIM]
    for said in others:
        assert "exit code 1" in said, said
    told = [line for said in others for line in said.splitlines() if "pretrain_gpt.py" in line]
    assert told == [
        f"pretrain_gpt.py: error: rank {VICTIM} died or stopped answering; the other ranks stop now. Look at the log "
        f"of rank {VICTIM}"
    ]


def _slow(argv: list[str], seconds: float) -> tuple[RankRun, list[float]]:
    """One rank of a run, of which one takes `seconds` longer for each step. Returns how long its own steps took,
    too."""
    from megatron.balanced.shared.callbacks import StepCallback

    class Slow(StepCallback):
        def __init__(self) -> None:
            self.began, self.took = 0.0, list[float]()

        def begin_step(self, iteration: int, config: Any) -> None:
            self.began = time.monotonic()
            if os.environ["RANK"] == str(VICTIM):
                time.sleep(seconds)

        def end_step(self) -> None:
            self.took.append(time.monotonic() - self.began)

    slow = Slow()
    return train_rank(argv, True, callbacks=[slow]), slow.took


@pytest.mark.parametrize("name", ["pipeline", "all balancers"])
def test_a_slow_rank_changes_no_number(pool, tmp_path, name):
    """Layers may move for it, and nothing else may happen."""
    if name == "pipeline":
        argv = [*MODEL, *MOCK_DATA, *EXACT, *PIPELINE]
    else:
        argv = [*MODEL, *write_documents(tmp_path / "documents", heavy_tailed(400)), *EXACT, *ALL]
    argv += ["--train-iters", "6"]
    whole = join([run for run, _ in pool.run(RANKS, _slow, argv, 0.0)])
    ranks = pool.run(RANKS, _slow, argv, 0.3)
    assert all(seconds >= 0.3 for seconds in ranks[VICTIM][1]) and len(ranks[VICTIM][1]) == 6
    assert "pretrain_gpt.py: error" not in "".join(pool.output)
    assert_close(join([run for run, _ in ranks]), whole)
