"""What command lines of benchmarks share: their options, errors in one line, rows in a table and in a file."""

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, is_dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from balancing.files import write_text
from benchmarks.emulated.processes import RankFailed, RunTimeout

__all__ = ["Row", "exit_code", "load_before", "parser", "show_methods", "show_rows", "show_table", "write_rows"]


def parser(module: str, doc: str | None, quick: str = "") -> argparse.ArgumentParser:
    """The options of `python -m module`: --json, and --quick if there is a help text for it. doc: of the module."""
    about = (doc or "").partition("\n")[0]
    made = argparse.ArgumentParser(prog=f"python -m benchmarks.{module}", description=about)
    if quick:
        made.add_argument("--quick", action="store_true", help=quick)
    made.add_argument("--json", metavar="FILE", help="write the rows to FILE")
    return made


def load_before() -> str:
    """The cores of this machine, and what it does beside the benchmark."""
    return f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f} before the start"


def exit_code(name: str, action: Callable[[], int]) -> int:
    """What `action` returns; with an error in one line 2 for bad input, and 1 where ranks fail, with what they said."""
    try:
        return action()
    except (RankFailed, RunTimeout) as error:
        print(f"{name}: {error}", *getattr(error, "tail", ()), sep="\n", file=sys.stderr)
        return 1
    except (ValueError, OSError) as error:
        print(f"{name}: {error}", file=sys.stderr)
        return 2


def write_rows(path: str | None, rows: Iterable[Any], *properties: str, **about: Any) -> None:
    """Write what a machine reads: rows (dataclasses with these properties, or dicts), and `about`. Raises ValueError in
    one line where that is not possible. path: None for nothing."""
    if path is not None:
        table = [
            asdict(row) | {name: getattr(row, name) for name in properties} if is_dataclass(row) else row
            for row in rows
        ]  # fmt: skip
        write_text(path, json.dumps({**about, "rows": table}, indent=1) + "\n")


def show_table(title: str, heads: Sequence[str], lines: Iterable[Sequence[str]], width: int = 160) -> None:
    """Print a table; figures stand to the right."""
    console = Console(width=max(width, Console().width))
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    for head in heads:
        left = head in ("case", "method", "target", "planner", "shape")
        table.add_column(head, justify="left" if left else "right", no_wrap=True)
    for line in lines:
        table.add_row(*line)
    console.print(table, "")


def show_rows(columns: str, rows: Iterable[Mapping[str, Any]]) -> None:
    """Print rows as a table. columns: "head=key:format; ...", or a key alone."""
    parts = [column.partition("=") for column in columns.split("; ")]
    keys = [(key or head).partition(":")[::2] for head, _, key in parts]
    cells = [["" if row.get(key) is None else format(row[key], form) for key, form in keys] for row in rows]
    show_table("", [head for head, *_ in parts], cells)


@dataclass(frozen=True)
class Row:
    """One measurement; less is better.

    section, case, method: of the table.
    figure: of it; a mean, a median, or the worst of several.
    to_baseline, to_limit: over that of the first method, and over the least possible one.
    target: bound of `most`; None for none.
    most: of the worst batch; None if it is the figure.
    """

    section: str
    case: str
    method: str
    figure: float
    to_baseline: float | None
    to_limit: float
    target: float | None = None
    most: float | None = None

    @property
    def met(self) -> bool:
        return self.target is None or (self.figure if self.most is None else self.most) <= self.target + 1e-9


def show_methods(rows: Sequence[Row], digits: Callable[[str], int], shows_most: Callable[[Row], bool]) -> None:
    """A table a section: a line a case, a column a method. digits: of the figures of a section. shows_most: whether the
    worst batch stands beside a figure."""
    for section in dict.fromkeys(row.section for row in rows):
        own = [row for row in rows if row.section == section]
        methods = list(dict.fromkeys(row.method for row in own))
        lines = []
        for case in dict.fromkeys(row.case for row in own):
            line = {row.method: row for row in own if row.case == case}
            cells = []
            for row in map(line.get, methods):
                most = f" ({row.most:.3f})" if row is not None and shows_most(row) else ""
                cells.append("" if row is None else f"{row.figure:.{digits(section)}f}{most}")
            promised = [row for row in line.values() if row.target is not None]
            said = ", ".join("met" if row.met else f"{row.method} MISSED" for row in promised)
            lines.append((case, *cells, said))
        show_table(section, ("case", *(name.replace(" + ", "\n+ ") for name in methods), "target"), lines)
