"""python -m balancing.report DIR: name who is slow in a run, and draw it."""

import sys
from pathlib import Path

from balancing.command_line import Parser
from balancing.report.history import read_history
from balancing.report.summary import summarize
from balancing.report.table import print_summary


def main(arguments: list[str] | None = None) -> int:
    """Run the command; returns 0, or 2 after one line on standard error if there is nothing to report."""
    parser = Parser(prog="python -m balancing.report", description=__doc__)
    parser.add_argument("directory", metavar="DIR", type=Path, help="the directory that --balance-report named")
    html = parser.add_mutually_exclusive_group()
    html.add_argument("--html", metavar="FILE", type=Path, help="where the page goes (default: DIR/report.html)")
    html.add_argument("--no-html", action="store_true", help="print the table only")
    options = parser.parse_args(arguments)
    try:
        history = read_history(options.directory)
    except ValueError as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 2
    summary = summarize(history)
    print_summary(summary)
    if options.no_html:
        return 0
    from balancing.report.page import write_page  # matplotlib takes a while to import: not for the table alone

    path = options.html or options.directory / "report.html"
    try:
        write_page(path, history, summary)
    except OSError as error:
        print(f"{parser.prog}: cannot write {path}: {error.strerror}; choose another with --html", file=sys.stderr)
        return 2
    print(f"figures: {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
