"""python -m balancing.sequences: not a command; it names the commands that forecast and show the gain."""

import sys

from balancing.command_line import Parser


def main(arguments: list[str] | None = None) -> int:
    """Returns 2 after one line on standard error."""
    parser = Parser(prog="python -m balancing.sequences", description=__doc__)

    def work(options: object) -> None:
        raise ValueError(
            "balanced sequences have no command of their own; python -m balancing.whatif forecasts their gain from "
            "--lengths, and python -m balancing.report DIR shows what they gained in a run"
        )

    return parser.run(work, arguments)


if __name__ == "__main__":
    sys.exit(main())
