"""The report in a terminal, at most 100 columns wide."""

from typing import TextIO

from rich import box
from rich.console import Console
from rich.table import Table

from balancing.report.findings import action_rows, basis, finding_rows, prospect_rows, verdict
from balancing.report.summary import Summary

__all__ = ["WIDTH", "print_summary"]

WIDTH = 100


def print_summary(summary: Summary, file: TextIO | None = None) -> None:
    """Print verdict, findings and what perfect balance would give to `file` (standard output if None)."""
    console = Console(file=file, highlight=False, markup=False)
    if not console.is_terminal or console.width > WIDTH:
        console.width = WIDTH
    console.print(verdict(summary), style="bold")
    console.print(f"({basis(summary)})\n", style="dim")
    tables = (
        (("who is slow", "which", "how much", "over the others", "typical"), finding_rows(summary)),
        (("what perfect balance would give", "step", "saved"), prospect_rows(summary)),
        (("balancer", "actions", "max / mean", "planning", "applying", "moved"), action_rows(summary)),
    )
    for head, rows in tables:
        if rows:
            table = Table(*head, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
            for row in rows:
                table.add_row(*row)
            console.print(table)
    if summary.estimates:
        console.print(
            "Typical: max / mean of the median step, whoever has most in it. Step times are estimates from measured "
            'device time; gains overlap and must not be added, and "at best" marks the most that can be had.',
            style="dim",
        )
