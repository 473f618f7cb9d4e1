"""What the balancers ask of the host: processor time, launches and messages of one layer, forward and backward.

    python -m benchmarks.host [--quick] [--only attention|experts|report] [--json FILE]

Kernels return at once, torch's fake process group carries no message, and tensors are empty or tiny, so no GPU is
needed and what is left is the host's part: Python, autograd and torch's dispatch, without what a launch costs CUDA's
driver, Triton or NCCL. Times are processor times of the quickest of several runs, given in additions of 8 x 8 numbers
on the same processor (`torch.add`, about a microsecond). That multiple can be compared between machines.

- attention: the engine on a rank's part of real plans, the rank with most steps. Rounds: transfers that bring it keys,
  forward. Launches: of kernels and of every other operation that writes memory. Messages: sends and receives, and
  collectives, each as one. Calls: functions of Python that are entered.
- experts: a balanced MoE layer beside Megatron-LM's own.
- report: the hooks of `--balance-report` on a transformer layer, and the wrapper around a schedule.

Goals stand in parentheses. Exit code 1 if one is missed. Takes a minute on one core.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from balancing.files import write_text
from benchmarks.host import attention, layers

__all__ = ["main"]


def _attention(quick: bool, console: Console) -> list[dict[str, Any]]:
    """Rows of attention, printed as a table. Each has its goals, and whether they are met."""
    table = Table(title="attention, a layer, forward and backward", title_justify="left", box=None, pad_edge=False)
    for head in ("planner", "ranks", "shape", "rounds", "ms", "additions", "launches", "messages", "calls"):
        table.add_column(head, justify="left" if head in ("planner", "shape") else "right", no_wrap=True)
    rows = []
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
        table.add_row(
            case.method, str(case.ranks), case.shape, str(rounds), f"{measured.seconds * 1e3:.2f}", *cells,
            str(counted.calls),
        )  # fmt: skip
    console.print(table, "")
    return rows


def _others(rows: list[dict[str, Any]], title: str, console: Console) -> list[dict[str, Any]]:
    """Print rows of `layers`."""
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    for head in ("case", "ms", "additions", "launches", "messages", "calls", "ratio"):
        table.add_column(head, justify="left" if head == "case" else "right", no_wrap=True)
    for row in rows:
        ratio, goal = row["ratio"]
        said = "" if ratio is None else f"{ratio:.3f}" + (f" ({goal})" if goal else "")
        table.add_row(
            row["case"], f"{row['seconds'] * 1e3:.3f}", f"{row['additions']:.0f}", str(row["launches"]),
            str(row["messages"]), str(row["calls"]), said,
        )  # fmt: skip
    console.print(table, "")
    return rows


def _missed(rows: Sequence[dict[str, Any]]) -> int:
    """Number of goals that are missed."""
    pairs = (value for row in rows for value in row.values() if isinstance(value, list))
    return sum(goal is not None and found is not None and found > goal for found, goal in pairs)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.host", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="up to 16 ranks")
    parser.add_argument("--only", choices=("attention", "experts", "report"), help="one of the tables")
    parser.add_argument("--json", metavar="FILE", help="write the rows to FILE")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    console = Console(width=max(140, Console().width))
    rows: list[dict[str, Any]] = []
    try:
        if options.only in (None, "attention"):
            rows += _attention(options.quick, console)
        if options.only in (None, "experts"):
            rows += _others(layers.experts(options.quick), "an MoE layer, forward and backward", console)
        if options.only in (None, "report"):
            rows += _others(layers.report(), "the report's hooks, and the wrapper of a schedule", console)
        if options.json:
            write_text(options.json, json.dumps(rows, indent=1) + "\n")
    except OSError as error:
        print(f"host: {error}", file=sys.stderr)
        return 2
    return 1 if _missed(rows) else 0


if __name__ == "__main__":
    sys.exit(main())
