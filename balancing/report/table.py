"""The report in a terminal, at most 100 columns wide."""

from collections.abc import Sequence
from typing import TextIO

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from balancing.report.findings import (
    ACTIONS,
    FINDINGS,
    GAINS,
    PROSPECTS,
    action_rows,
    answers,
    basis,
    finding_rows,
    gain_rows,
    prospect_rows,
    shown_columns,
)
from balancing.report.summary import Summary

__all__ = ["WIDTH", "print_summary"]

WIDTH = 100


def print_summary(summary: Summary, file: TextIO | None = None) -> None:
    """Print the report to `file` (standard output if None): answers, findings, what perfect balance would give, what
    the balancers did, and what balancing gained."""
    console = Console(file=file, highlight=False, markup=False)
    if not console.is_terminal or console.width > WIDTH:
        console.width = WIDTH
    first = Table.grid(padding=(0, 2))
    for each in answers(summary):
        first.add_row(Text(each.about, style="dim"), Text(each.text, style="bold"))
    console.print(first)
    console.print(f"({basis(summary)})\n", style="dim")
    for head, rows in (
        (FINDINGS, finding_rows(summary)),
        (PROSPECTS, prospect_rows(summary)),
    ):
        _print_table(console, head, rows)
    if summary.estimates:
        console.print(
            "Typical: max / mean of the median step, whoever has most in it. Before: the same without the balancer "
            "that is on. Step times are estimates from measured device time. Gains overlap and must not be added. "
            '"At best" marks an upper bound of the gain.',
            style="dim",
        )
    _print_table(console, ACTIONS, action_rows(summary))
    _print_table(console, GAINS, gain_rows(summary), bold="after")


def _print_table(
    console: Console, head: Sequence[str], rows: Sequence[Sequence[str]], bold: Sequence[str] = ()
) -> None:
    names, cells = shown_columns(head, rows)
    if not cells:
        return
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for name in names:
        table.add_column(name, style="bold" if name == bold else None)
    for row in cells:
        table.add_row(*row)
    console.print(table)
