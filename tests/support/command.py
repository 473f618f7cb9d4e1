"""`pretrain_gpt.py` on a rank of the pool, with what it says."""

import contextlib
import io
import sys

__all__ = ["run_command"]


def run_command(argv: list[str]) -> tuple[object, str]:
    """Run the command on this rank. Returns its exit code and stderr."""
    import pretrain_gpt

    sys.argv[1:] = argv
    stderr = io.StringIO()
    with contextlib.redirect_stderr(stderr):
        try:
            pretrain_gpt.main()
        except SystemExit as stop:
            return stop.code, stderr.getvalue()
    return 0, stderr.getvalue()
