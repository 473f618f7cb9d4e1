"""What checking costs: each run of `RUNS`, with and without its operations noted and its accesses checked.

    python -m tests.support.checkers [--runs 3] [WORD]

Prints a line for each run whose name has WORD: medians of seconds, taken in turns, and their ratio.
"""

import argparse
import statistics
import time
from typing import Any

from tests.support.checkers.checked_runs import RUNS, arguments, noted_rank
from tests.support.checkers.collective_order import replay
from tests.support.pool import Pool


def _seconds(pool: Pool, name: str, checked: bool) -> float:
    run = RUNS[name]
    begin = time.perf_counter()
    ranks: list[Any] = pool.run(
        run.ranks, noted_rank, arguments(run), dict(run.plans), run.per_node, run.queues, checked, timeout=600
    )
    if checked:
        assert replay([rank.operations for rank in ranks]) is None
    return time.perf_counter() - begin


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("word", nargs="?", default="")
    parser.add_argument("--runs", type=int, default=3)
    asked = parser.parse_args()
    pool = Pool()
    pool.run(1, time.time)  # the pool's own start
    print("plain s  checked s  ratio  run")
    for name in (name for name in RUNS if asked.word in name):
        pairs = [[_seconds(pool, name, checked) for checked in (False, True)] for _ in range(asked.runs)]
        plain, checked = (statistics.median(column) for column in zip(*pairs, strict=True))
        print(f"{plain:7.2f}  {checked:9.2f}  {checked / plain:5.2f}  {name}", flush=True)
    pool.stop()


if __name__ == "__main__":
    main()
