"""What all commands share: flags, checks of their values, one-line error messages and exit codes.

Exit codes: 0 for success; 2 for bad input, after one line `PROGRAM: error: ...` on standard error; 130 after Ctrl-C;
141 after a closed pipe. This module imports neither torch nor numpy, so that a command can report that they are
missing.
"""

import argparse
import io
import math
import os
import sys
from typing import Any, Callable, NoReturn, Sequence  # noqa: UP035  (the doctor runs on old Pythons)

__all__ = ["Parser", "explain_in_one_line", "print_any_name", "real_number", "whole_number"]


class Parser(argparse.ArgumentParser):
    """Reports wrong flags in one line and exits with 2."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message} (see --help)\n")

    def refuse_unused(self, options: argparse.Namespace, why: str, *flags: str) -> None:
        """Exit with 2 if one of `flags` was given, although it has no effect. `why` gives the reason."""
        for flag in flags:
            name = flag.lstrip("-").replace("-", "_")
            if getattr(options, name) != self.get_default(name):
                value = getattr(options, name)
                self.error(f"{flag}{'' if value is True else f' {value}'} has no effect {why}; drop it")

    def run(self, work: Callable[[argparse.Namespace], None], arguments: Sequence[str] | None = None) -> int:
        """Parse the flags and call `work` with them. Returns the exit code.

        work: raises ValueError or OSError for bad input.
        arguments: by default those of the process.
        """
        print_any_name()
        try:
            work(self.parse_args(arguments))
            _flush()
        except KeyboardInterrupt:
            print(f"{self.prog}: interrupted", file=sys.stderr)
            return 130
        except BrokenPipeError:
            _print_nowhere()
            return 141
        except SystemExit as end:  # raised by argparse after its message, or by rich for a closed pipe
            return 141 if isinstance(end.__context__, BrokenPipeError) else int(end.code or 0)
        except MemoryError:
            return self._failed("there is not enough memory for this input; give a smaller one")
        except OSError as error:
            return self._failed(f"{error.filename or 'standard output'}: {error.strerror or error}")
        except ValueError as error:
            return self._failed(" ".join(str(error).split("\n")))
        return 0

    def _failed(self, line: str) -> int:
        try:
            _flush()
        except OSError:
            _print_nowhere()
        print(f"{self.prog}: error: {line}", file=sys.stderr, flush=True)
        return 2


def whole_number(least: int, most: int) -> Callable[[str], int]:
    """The type of a flag that takes whole numbers from `least` to `most`."""

    def read(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = least - 1
        if not least <= value <= most:
            raise argparse.ArgumentTypeError(f"{text:.40} must be a whole number from {least:,} to {most:,}")
        return value

    return read


def real_number(least: float, most: float, above: bool = False) -> Callable[[str], float]:
    """The type of a flag that takes numbers from `least` to `most`. With `above`, `least` itself is refused."""

    def read(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not (least < value if above else least <= value) or not value <= most:
            words = f"above {least:g}, at most {most:g}" if above else f"from {least:g} to {most:g}"
            raise argparse.ArgumentTypeError(f"{text:.40} must be a number {words}")
        return value

    return read


def print_any_name() -> None:
    """From now on, print characters that the terminal cannot encode as escapes, instead of raising an error."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def explain_in_one_line(program: str) -> None:
    """Make this process exit with one line and code 2 for a missing package, and code 130 for Ctrl-C during imports."""

    def report(kind: Any, error: BaseException, trace: Any) -> None:
        if issubclass(kind, KeyboardInterrupt):
            if os.environ.get("RANK", "0") == "0":
                print(f"{program}: interrupted", file=sys.stderr)
            raise SystemExit(130)
        name = (error.name or "").split(".")[0] if isinstance(error, ModuleNotFoundError) else ""
        if name not in ("", "balancing"):
            print(
                f"{program}: error: {name} is not installed for {sys.executable}; pip install -e . in "
                "Megatron-Balance's folder installs it",
                file=sys.stderr,
            )
            raise SystemExit(2)
        sys.__excepthook__(kind, error, trace)

    sys.excepthook = report


def _flush() -> None:
    if sys.stdout is not None:
        sys.stdout.flush()


def _print_nowhere() -> None:
    """Send what is still buffered for the closed standard output to /dev/null, so that Python's exit does not fail."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
