"""A stalled job: one line says what each rank does, and the job goes on."""

import math
import os
import re
import time
from pathlib import Path
from typing import Any

from megatron.balanced.trainer.watchdog.stall import name_ranks
from tests.support.patience import PATIENCE
from tests.support.training import MOCK_DATA, MODEL, RankRun, train_rank

STOPPED_AT = 2  # iteration


def _stops(argv: list[str], folder: Path) -> RankRun:
    """Rank 1 does nothing in an iteration until the stall is reported."""
    from megatron.balanced.shared.callbacks import StepCallback
    from megatron.balanced.trainer.watchdog import stall

    stopped, report = folder / "stopped", folder / "reported"

    class Stop(StepCallback):
        def begin_step(self, iteration: int, config: Any) -> None:
            while iteration == STOPPED_AT and stall._pending():  # of a collective that has ended, until torch notes it
                time.sleep(0.01)
            if iteration == STOPPED_AT and os.environ["RANK"] == "1":
                stopped.touch()
                while not report.exists():
                    time.sleep(0.05)

    def limit(watch: Any, timeout: float) -> float:
        """Rank 0 counts its step as stalled once it waits in a collective that rank 1, which stopped, does not enter.

        Other waits end by themselves, on a busy machine later than this looks.
        """
        in_turn = os.environ["RANK"] == "0" and watch._moment == (STOPPED_AT, True) and stopped.exists()
        return 0.0 if in_turn and stall._pending() else math.inf

    answers = stall.ask_all

    def ask_all() -> dict[int, str]:
        try:
            return answers()
        finally:
            report.touch()

    stall._LOOK_SECONDS, stall._ANSWER_SECONDS = 0.05, PATIENCE  # and all ranks answer
    stall.Watch._limit = limit  # type: ignore[method-assign]
    stall.ask_all = ask_all
    watch = stall.Watch()
    try:
        return train_rank(argv, False, callbacks=[Stop()])
    finally:
        watch.end()


def test_a_rank_that_stops_is_told(pool, tmp_path):
    ranks = pool.run(2, _stops, [*MODEL, *MOCK_DATA], tmp_path)
    assert all(len(rank.losses) == 4 for rank in ranks), "the job goes on undisturbed"
    told = [line for output in pool.output for line in output.splitlines() if "has made no progress" in line]
    (line,) = told
    assert line.startswith("> iteration 3 has made no progress for ")
    assert re.search(r"rank 0: \S+\.py:\d+ in \w+, waits in gloo:\w+ #\d+ of \S+; ", line), line
    assert re.search(r"rank 1: \S*test_stall.py:\d+ in begin_step$", line), line


def test_names_of_ranks():
    assert name_ranks([3]) == "rank 3"
    assert name_ranks({7, 0, 1, 2, 4}) == "ranks 0-2, 4, 7"
