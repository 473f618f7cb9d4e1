"""What the balancers ask of the host: processor time, launches and messages of one layer, forward and backward.

    python -m benchmarks.host [--quick] [--json FILE]

Kernels return at once, torch's fake process group carries no message, and tensors are empty or tiny, so no GPU is
needed and what is left is the host's part: Python, autograd and torch's dispatch, without what a launch costs CUDA's
driver, Triton or NCCL. Times are processor times of the quickest of several runs, given in additions of 8 x 8 numbers
on the same processor (`torch.add`, about a microsecond). That multiple can be compared between machines.

- attention: the engine on a rank's part of real plans, the rank with most steps. Rounds: transfers that bring it keys,
  forward. Launches: of kernels and of every other operation that writes memory. Messages: sends and receives, and
  collectives, each as one. Calls: functions of Python that are entered.
- experts: a balanced MoE layer beside Megatron-LM's own.
- preprocessing: the part `moe_preprocess` of such a layer, which balanced experts leave out of CUDA graphs.
- report: the hooks of `--balance-report` on a transformer layer, and the wrapper around a schedule.

Goals stand in parentheses. Exit code 1 if one is missed. Takes a minute on one core.
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import torch

from benchmarks.command import exit_code, parser, show_table, write_rows
from benchmarks.host import attention, layers

__all__ = ["main"]


def _attention(quick: bool) -> list[dict[str, Any]]:
    """Rows of attention, printed as a table. Each has its goals, and whether they are met."""
    heads = ("planner", "ranks", "shape", "rounds", "ms", "additions", "launches", "messages", "calls")
    rows, lines = [], []
    for case in attention.CASES:
        if quick and case.ranks > 16:
            continue
        measured, rounds = attention.measure_attention(case)
        counted = measured.counted
        found = {"additions": measured.additions, "launches": counted.launches, "messages": counted.messages}
        goals = {"additions": case.goal, "launches": case.launches, "messages": case.messages}
        rows.append(
            asdict(case)
            | {"rounds": rounds, "seconds": measured.seconds, "calls": counted.calls}
            | {what: [found[what], goals[what]] for what in found}
        )
        cells = [f"{found[what]:.0f}" + (f" ({goals[what]})" if goals[what] else "") for what in found]
        seconds = f"{measured.seconds * 1e3:.2f}"
        lines.append((case.method, str(case.ranks), case.shape, str(rounds), seconds, *cells, str(counted.calls)))
    show_table("attention, a layer, forward and backward", heads, lines, 140)
    return rows


def _others(rows: list[dict[str, Any]], title: str) -> list[dict[str, Any]]:
    """Print rows of `layers`."""
    lines = []
    for row in rows:
        ratio, goal = row["ratio"]
        said = "" if ratio is None else f"{ratio:.3f}" + (f" ({goal})" if goal else "")
        lines.append((
            row["case"], f"{row['seconds'] * 1e3:.3f}", f"{row['additions']:.0f}", str(row["launches"]),
            str(row["messages"]), str(row["calls"]), said,
        ))  # fmt: skip
    show_table(title, ("case", "ms", "additions", "launches", "messages", "calls", "ratio"), lines, 140)
    return rows


def _missed(rows: Sequence[dict[str, Any]]) -> int:
    """Number of goals that are missed."""
    pairs = (value for row in rows for value in row.values() if isinstance(value, list))
    return sum(goal is not None and found is not None and found > goal for found, goal in pairs)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns the exit code."""
    options = parser("host", __doc__, "up to 16 ranks").parse_args(arguments)
    return exit_code("host", lambda: _run(options))


def _run(options: argparse.Namespace) -> int:
    torch.set_num_threads(1)
    rows = _attention(options.quick)
    rows += _others(layers.experts(options.quick), "an MoE layer, forward and backward")
    rows += _others(layers.preprocessing(options.quick), "moe_preprocess of an MoE layer, forward and backward")
    rows += _others(layers.report(), "the report's hooks, and the wrapper of a schedule")
    write_rows(options.json, rows)
    return 1 if _missed(rows) else 0


if __name__ == "__main__":
    sys.exit(main())
