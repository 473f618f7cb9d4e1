"""A slow rank changes nothing: the job goes on with the losses and parameters of a run that nobody disturbed."""

import os
import time
from typing import Any

import pytest

from tests.support.corpus import heavy_tailed, write_documents
from tests.support.sampled import sampled
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


@pytest.mark.parametrize("name", sampled(["pipeline", "all balancers"], "all balancers"))
def test_a_slow_rank_changes_no_number(pool, tmp_path, name):
    """Layers stay: the rank is slow between its layers, which nobody measures."""
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
