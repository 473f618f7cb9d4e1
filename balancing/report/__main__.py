"""python -m balancing.report DIR: how long a step is, who is slow, what balancing would bring, and which flag."""

import argparse
import sys
from pathlib import Path

from balancing.command_line import Parser
from balancing.files import check_output
from balancing.report.history import read_history, report_files
from balancing.report.summary import summarize
from balancing.report.table import print_summary


def main(arguments: list[str] | None = None) -> int:
    """Run the command; returns the exit code, as `balancing.command_line` says."""
    parser = Parser(prog="python -m balancing.report", description=__doc__)
    parser.add_argument("directory", metavar="DIR", type=Path, help="the directory that --balance-report named")
    html = parser.add_mutually_exclusive_group()
    html.add_argument("--html", metavar="FILE", type=Path, help="where the page goes (default: DIR/report.html)")
    html.add_argument("--no-html", action="store_true", help="print the table only")
    return parser.run(_report, arguments)


def _report(options: argparse.Namespace) -> None:
    history = read_history(options.directory)
    path = options.html or options.directory / "report.html"
    if not options.no_html:
        check_output(path, report_files(options.directory))
    summary = summarize(history)
    print_summary(summary)
    if options.no_html:
        return
    from balancing_tools.report.page import write_page  # matplotlib takes a while to import: not for the table alone

    write_page(path, history, summary)
    print(f"figures: {path}")


if __name__ == "__main__":
    sys.exit(main())
