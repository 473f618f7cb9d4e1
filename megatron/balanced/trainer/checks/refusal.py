"""Why Megatron-LM refuses a command line, in one line.

Its messages are shown unchanged. Of an assertion without a message, the source of its condition is shown. Our own
checks cover flags with which Megatron-LM would hang, fail late, or silently train wrongly.
"""

import errno
import linecache
import sys
import sysconfig
import traceback
from pathlib import Path

from megatron.balanced.trainer.checks.checkpoints import explain_checkpoint, full_folders, megatrons_arguments

__all__ = ["explain", "is_refusal", "is_training"]

_OURS = [Path(__file__).parents[2], *(Path(__file__).parents[4] / name for name in ("balancing", "balancing_tools"))]
_LIBRARIES = [sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")]
_MESSAGES = (ValueError, AssertionError, RuntimeError, ImportError, OSError)  # their text is enough for a user


def is_training() -> bool:
    """Whether the training loop has begun, which counts iterations in Megatron-LM's arguments."""
    return getattr(megatrons_arguments(), "curr_iteration", None) is not None


def _place_in_megatron(error: BaseException) -> traceback.FrameSummary | None:
    """The place in Megatron-LM that `error` comes from; None if this package or another program called the code that
    failed.

    Once training has begun, only errors that Megatron-LM raises or asserts itself have a place: any other is a fault of
    the run.
    """
    megatron = sys.modules.get("megatron.core")
    if megatron is None or megatron.__file__ is None:
        return None
    core = Path(megatron.__file__).parent
    frames = traceback.extract_tb(error.__traceback__)
    for frame in reversed(frames):
        path = Path(frame.filename)
        if path.is_relative_to(core) or path.is_relative_to(core.parent / "training"):
            deliberate = isinstance(error, AssertionError) or (frame.line or "").startswith("raise")
            return frame if not is_training() or (deliberate and frame is frames[-1]) else None
        if any(map(path.is_relative_to, _OURS)) or not any(map(path.is_relative_to, _LIBRARIES)):
            return None
    return None


def is_refusal(error: BaseException) -> bool:
    """Whether Megatron-LM refuses the command line, or a file (also of a checkpoint) cannot be read or written."""
    is_file = isinstance(error, OSError) and (error.filename is not None or error.errno == errno.ENOSPC)
    return is_file or explain_checkpoint(error) is not None or _place_in_megatron(error) is not None


def _is_of_disk(error: BaseException) -> bool:
    """Whether a file could not be written. NumPy's error has no errno, and Megatron-LM raises other errors from it."""
    cause = error if isinstance(error, OSError) else error.__cause__
    return isinstance(cause, OSError) and cause.errno in (None, errno.ENOSPC)


def explain(error: BaseException) -> str:
    """The message in one line; with the type and place of the error if the message alone says little."""
    if (text := explain_checkpoint(error)) is not None:
        return text
    message = " ".join(str(error).split())
    if _is_of_disk(error) and (full := full_folders(megatrons_arguments())):
        return f"no space is left on the disk of {' and '.join(full)}; free some, and start again"
    frame = _place_in_megatron(error)
    is_told = frame is None or isinstance(error, _MESSAGES) or (frame.line or "").startswith("raise")
    if message and is_told:
        return message
    if frame is None:
        return type(error).__name__
    place = f"({Path(frame.filename).parent.name}/{Path(frame.filename).name}, line {frame.lineno})"
    if isinstance(error, AssertionError):
        lines = range(frame.lineno or 1, (frame.end_lineno or frame.lineno or 1) + 1)
        condition = " ".join(linecache.getline(frame.filename, number).strip() for number in lines)
        return f"Megatron-LM demands: {condition.removeprefix('assert ')} {place}"
    return f"Megatron-LM fails with {type(error).__name__}{': ' * bool(message)}{message} {place}"
