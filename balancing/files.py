"""Reading and writing of files: atomic writes, checks of output paths, limits on what is read.

Every file that this package writes goes through `output`: after a killed command or a full disk, the old file or no
file has the name, never half of the new one. Only regular files are replaced. Files that are appended to, such as the
event log, are opened after `check_output`.

A process killed by SIGKILL leaves its temporary file behind. The file's name identifies the process, and the next
process that writes into the folder removes the file.
"""

import errno
import functools
import hashlib
import json
import os
import re
import stat
import sys
import uuid
import zipfile
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, BinaryIO

import numpy as np

from balancing.process import is_alive, process_space, start_time

__all__ = ["check_output", "create_text", "output", "parse_json", "read_arrays", "read_text", "write_text"]

MOST_BYTES = 256 << 20  # largest text file that `read_text` reads

_DAY_SECONDS = 86400.0
# Name of a temporary file: hash of the writer's process space, its process number, its start time, a random part.
_PART = re.compile(r"\.([0-9a-f]{8})-(\d+)-(\d*)-[0-9a-f]{8}\.part")
_swept: set[str] = set()  # folders from which left-over temporary files were removed
_NO_HARD_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS)

StrPath = str | os.PathLike[str]


def check_output(path: StrPath, inputs: Iterable[StrPath] = ()) -> str | None:
    """Check that `path` can be written. Returns the file to replace, with symlinks followed.

    Returns None if `path` is to be written directly: a character device, a FIFO, and the file that this process's
    standard output or standard error goes to.

    path: the output; it need not exist.
    inputs: files that the command reads or has already written.

    Raises ValueError, one line, if `path` is a folder, one of `inputs`, a block device or a socket, or if it cannot be
    written.
    """
    try:
        try:
            found = os.stat(path)
        except FileNotFoundError:
            target = os.path.realpath(path)
            folder = os.path.dirname(target)
            if not os.path.basename(os.fspath(path)) or not os.path.isdir(folder):
                raise _unwritable(path, f"there is no folder {folder}") from None
            if not os.access(folder, os.W_OK):
                raise _unwritable(path, f"the folder {folder} is not writable") from None
            return target
    except OSError as error:
        raise _unwritable(path, error.strerror) from error
    if stat.S_ISDIR(found.st_mode):
        raise _unwritable(path, "it is a folder")
    for name in inputs:
        with suppress(OSError):
            if os.path.samestat(os.stat(name), found) and not stat.S_ISCHR(found.st_mode):
                raise _unwritable(path, f"it is {os.fspath(name)}, which this command reads or writes")
    if not stat.S_ISREG(found.st_mode) and not stat.S_ISCHR(found.st_mode) and not stat.S_ISFIFO(found.st_mode):
        raise _unwritable(path, "it is neither a file nor a terminal, pipe or character device")
    if not os.access(path, os.W_OK):
        raise _unwritable(path, "it is read-only")
    return os.path.realpath(path) if stat.S_ISREG(found.st_mode) and _printed_to(path) is None else None


@contextmanager
def output(path: StrPath, inputs: Iterable[StrPath] = ()) -> Iterator[BinaryIO]:
    """A binary file to write in a `with` statement. At the end of the statement it replaces `path`. If the statement
    ends early, `path` stays as it was.

    The bytes go to a temporary file in the folder of `path`; `file.name` is its path. They are on the disk before the
    temporary file replaces `path`. A replaced file keeps its permissions, and a symlink its target.

    path, inputs: as for `check_output`.

    Raises ValueError, one line that names `path`, like `check_output`, and if writing fails.
    """
    target = check_output(path, inputs)
    name = os.fspath(path)
    part = name if target is None else f"{os.path.dirname(target)}/{_part_name()}"
    try:
        if target is None:
            with _through(name) as file:
                yield file
            return
        try:
            with open(part, "xb") as file:
                _remove_left_over(part, os.fstat(file.fileno()).st_mtime)
                yield file
                file.flush()
                with suppress(FileNotFoundError):
                    before = os.stat(target)
                    os.fchmod(file.fileno(), stat.S_IMODE(before.st_mode))
                    with suppress(PermissionError):
                        os.fchown(file.fileno(), before.st_uid, before.st_gid)
                os.fsync(file.fileno())
            os.replace(part, target)
        except BaseException:
            with suppress(OSError):
                os.unlink(part)
            raise
    except OSError as error:
        if error.filename not in (None, part):  # the error of another file, read while this one is written
            raise
        raise _unwritable(path, error.strerror or str(error)) from error


def write_text(path: StrPath, text: str, inputs: Iterable[StrPath] = ()) -> None:
    """Write `text` with `output`, in UTF-8. Characters that UTF-8 cannot encode, as in some file names, are escaped."""
    with output(path, inputs) as file:
        file.write(text.encode("utf-8", "backslashreplace"))


def create_text(path: StrPath, text: str) -> bool:
    """Create a file with `text`, atomically. Returns False and changes nothing if the file exists.

    If several processes try at once, on one machine or on several that mount the folder, only one succeeds: a hard link
    creates the file, as open(2) advises for NFS. On file systems without hard links it is opened exclusively.

    Raises OSError if the file cannot be created.
    """
    name = os.fspath(path)
    part = f"{os.path.dirname(name) or '.'}/{_part_name()}"
    try:
        with open(part, "x", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        try:
            os.link(part, name)
            return True
        except FileExistsError:
            return os.stat(part).st_nlink == 2  # this link was made: the server's answer was lost and NFS asked again
        except OSError as error:
            if error.errno not in _NO_HARD_LINKS:
                raise
        with suppress(FileExistsError), open(name, "x", encoding="utf-8") as file:
            file.write(text)
            return True
        return False
    finally:
        with suppress(OSError):
            os.unlink(part)


def read_text(path: StrPath) -> str:
    """The text of a regular file. Raises ValueError, one line without the path, if it cannot be read."""
    try:
        found = os.stat(path)
        if not stat.S_ISREG(found.st_mode):
            raise ValueError("cannot be read: it is no regular file; name a file")
        if found.st_size > MOST_BYTES:
            raise ValueError(f"has {found.st_size:,} bytes, more than the limit of {MOST_BYTES:,}; name another file")
        with open(path, encoding="utf-8") as file:
            return file.read()
    except OSError as error:
        raise ValueError(f"cannot be read: {error.strerror}; name a file that can") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"is no text in UTF-8: {error}") from error


def parse_json(text: str | bytes) -> Any:
    """`json.loads` that raises ValueError for any malformed text, including brackets nested too deeply."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("brackets are nested too deeply") from None


def read_arrays(path: StrPath) -> dict[str, np.ndarray]:
    """The arrays of an .npz file by name, or the array of an .npy file as "array". Pickles are refused.

    Raises ValueError, one line that names the file, if it is missing, truncated or of another format.
    """
    try:
        loaded = np.load(path, allow_pickle=False)
        if isinstance(loaded, np.ndarray):
            return {"array": loaded}
        with loaded:
            return {name: loaded[name] for name in loaded}
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror or error}; name a file that can") from error
    except MemoryError as error:
        raise ValueError(f"{path} has arrays larger than the free memory; name another file") from error
    except (ValueError, TypeError, SyntaxError, EOFError, NotImplementedError, zipfile.BadZipFile, zlib.error) as error:
        # NumPy takes any other file for a pickle and advises to allow pickles; this message must not.
        why = "holds Python objects" if "allow_pickle" in str(error) and _is_numpy(path) else "is cut short or no .npz"
        raise ValueError(f"{path} {why}; give an .npz or .npy file of numbers") from error


def _is_numpy(path: StrPath) -> bool:
    with open(path, "rb") as file:
        return file.read(6).startswith((b"\x93NUMPY", b"PK\x03\x04"))


@functools.cache
def _space() -> str:
    return hashlib.sha256(process_space().encode()).hexdigest()[:8]


def _part_name() -> str:
    return f".{_space()}-{os.getpid()}-{start_time(os.getpid())}-{uuid.uuid4().hex[:8]}.part"


def _remove_left_over(part: str, now: float) -> None:
    """Remove temporary files of killed writers from the folder of `part`. Each folder is cleaned once a process.

    A writer on another machine cannot be checked: its file is removed after a day without a write.

    now: creation time of `part`, by the clock of its file system, in seconds.
    """
    folder = os.path.dirname(part)
    if folder in _swept:
        return
    _swept.add(folder)
    with suppress(OSError), os.scandir(folder or ".") as entries:
        for entry in entries:
            if (found := _PART.fullmatch(entry.name)) is None:
                continue
            space, pid, started = found.groups()
            with suppress(OSError):
                if space == _space() and started != "":
                    is_left_over = not is_alive(pid, started)
                else:
                    is_left_over = now - entry.stat(follow_symlinks=False).st_mtime > _DAY_SECONDS
                if is_left_over:
                    os.unlink(entry.path)


def _unwritable(path: StrPath, why: str | None) -> ValueError:
    return ValueError(f"cannot write {os.fspath(path)}: {why}; name another file")


def _printed_to(path: StrPath) -> int | None:
    """The descriptor, 1 or 2, through which this process prints to `path`; None if it does not print there."""
    for descriptor in (1, 2):
        with suppress(OSError):
            if os.path.samestat(os.fstat(descriptor), os.stat(path)):
                return descriptor
    return None


def _through(path: str) -> BinaryIO:
    descriptor = _printed_to(path)
    if descriptor is None:
        return open(path, "wb")
    if sys.stdout is not None:
        sys.stdout.flush()
    return os.fdopen(os.dup(descriptor), "wb")
