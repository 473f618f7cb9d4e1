"""Files are written whole or not at all, and over nothing that is not meant."""

import errno
import os
import stat
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from balancing.files import check_output, create_text, output, parse_json, read_arrays, read_text, write_text
from tests.support.command import started
from tests.support.patience import PATIENCE

REPOSITORY = Path(__file__).resolve().parents[2]


def refused(path: Path | str, says: str, inputs: tuple[Path, ...] = ()) -> None:
    for write in (check_output, lambda path, inputs: write_text(path, "new", inputs)):
        with pytest.raises(ValueError, match="cannot write") as error:
            write(path, inputs)
        assert says in str(error.value) and str(path) in str(error.value) and "\n" not in str(error.value)


def test_a_file_is_made_and_replaced_with_its_permissions(tmp_path):
    path = tmp_path / "page.html"
    write_text(path, "old")
    assert stat.S_IMODE(path.stat().st_mode) == 0o666 & ~_umask()
    path.chmod(0o604)
    write_text(path, "new")
    assert path.read_text() == "new" and stat.S_IMODE(path.stat().st_mode) == 0o604
    assert os.listdir(tmp_path) == ["page.html"]


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def test_the_old_file_is_there_until_the_new_one_is_whole(tmp_path):
    path = tmp_path / "page.html"
    write_text(path, "old")
    with output(path) as file:
        file.write(b"half")
        file.flush()
        assert path.read_text() == "old"
    assert path.read_text() == "half"
    for error in (KeyboardInterrupt, ZeroDivisionError):
        with pytest.raises(error), output(path) as file:
            file.write(b"quarter")
            raise error
    assert path.read_text() == "half" and os.listdir(tmp_path) == ["page.html"]


def _no_hard_links(part: str, path: str) -> None:
    raise OSError(errno.EPERM, "Operation not permitted")


@pytest.mark.parametrize("links", [True, False])
def test_of_many_that_create_a_file_one_does(tmp_path, monkeypatch, links):
    """Whoever reads it meanwhile sees all of it. Without hard links it is still one."""
    path, text = tmp_path / "lock", "x" * 100_000
    if not links:
        monkeypatch.setattr(os, "link", _no_hard_links)
    start = threading.Barrier(8)

    def create(number: int) -> bool:
        start.wait(PATIENCE)
        made = create_text(path, f"{number}{text}")
        assert not links or len(path.read_text()) == 1 + len(text)
        return made

    with ThreadPoolExecutor(8) as threads:
        made = list(threads.map(create, range(8)))
    assert sum(made) == 1 and path.read_text() == f"{made.index(True)}{text}"
    assert os.listdir(tmp_path) == ["lock"]


def test_a_file_is_created_although_the_servers_answer_was_lost(tmp_path, monkeypatch):
    """A network mount asks again then, and the file is there."""
    link = os.link

    def link_twice(part: str, path: str) -> None:
        link(part, path)
        link(part, path)

    monkeypatch.setattr(os, "link", link_twice)
    assert create_text(tmp_path / "lock", "mine")
    assert not create_text(tmp_path / "lock", "another's")
    assert (tmp_path / "lock").read_text() == "mine" and os.listdir(tmp_path) == ["lock"]


def test_a_file_that_cannot_be_created_leaves_nothing(tmp_path, monkeypatch):
    def no_room(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", no_room)
    with pytest.raises(OSError, match="No space left"):
        create_text(tmp_path / "lock", "mine")
    assert os.listdir(tmp_path) == []


def test_the_target_of_a_link_is_written(tmp_path):
    (tmp_path / "elsewhere").mkdir()
    for name in ("there.json", "absent.json"):
        (tmp_path / name).symlink_to(tmp_path / "elsewhere" / name)
    (tmp_path / "elsewhere" / "there.json").write_text("old")
    for name in ("there.json", "absent.json"):
        write_text(tmp_path / name, "new")
        assert (tmp_path / name).is_symlink() and (tmp_path / "elsewhere" / name).read_text() == "new"
    assert sorted(os.listdir(tmp_path / "elsewhere")) == ["absent.json", "there.json"]


def test_devices_and_pipes_are_written_through(tmp_path):
    before = os.stat("/dev/null").st_ino
    write_text("/dev/null", "new")
    assert stat.S_ISCHR(os.stat("/dev/null").st_mode) and os.stat("/dev/null").st_ino == before
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    read: list[str] = []
    reader = threading.Thread(target=lambda: read.append(pipe.read_text()))
    reader.start()
    write_text(pipe, "new")
    reader.join(PATIENCE)
    assert read == ["new"] and stat.S_ISFIFO(pipe.stat().st_mode)
    link = tmp_path / "link"
    link.symlink_to("/dev/full")
    with pytest.raises(ValueError, match=r"cannot write .*link: No space left on device"):
        write_text(link, "new")
    assert link.is_symlink() and stat.S_ISCHR(link.stat().st_mode)


@pytest.mark.parametrize("to", ["a pipe", "a file"])
def test_standard_output_keeps_what_was_printed(tmp_path, to):
    program = (
        "from balancing.files import write_text\nprint('before')\nwrite_text('/dev/stdout', 'new\\n')\nprint('after')"
    )
    with open(tmp_path / "out", "w") as file:
        done = subprocess.run(
            [sys.executable, "-c", program], stdout=subprocess.PIPE if to == "a pipe" else file,
            cwd=REPOSITORY, text=True, timeout=PATIENCE, check=True,
        )  # fmt: skip
    assert (done.stdout or (tmp_path / "out").read_text()) == "before\nnew\nafter\n"


def test_what_is_not_meant_is_refused(tmp_path):
    data = tmp_path / "data.json"
    data.write_text("old")
    (tmp_path / "link.json").symlink_to(data)
    os.link(data, tmp_path / "same.json")
    refused(tmp_path, "it is a folder")
    refused("", "there is no folder")
    for name in ("data.json", "link.json", "same.json"):
        refused(tmp_path / name, f"it is {data}, which this command reads", (tmp_path / "none", data))
    refused(tmp_path / "absent" / "x.json", f"there is no folder {tmp_path}/absent")
    refused(data / "x.json", "Not a directory")
    with pytest.raises(ValueError, match=r"cannot write /proc/x.json: "):
        write_text("/proc/x.json", "new")  # where root may write, as far as the system says
    assert data.read_text() == "old"


def test_a_full_disk_is_named_and_leaves_nothing(tmp_path, monkeypatch):
    path = tmp_path / "loads.npz"

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    for old in (None, "old"):
        if old:
            path.write_text(old)
        with pytest.raises(ValueError, match=f"cannot write {path}: No space left on device"), output(path) as file:
            np.savez_compressed(file, counts=np.arange(9))
        assert os.listdir(tmp_path) == (["loads.npz"] if old else [])


HALF = """
import sys
from balancing.files import output
with output(sys.argv[1]) as file:
    file.write(b"half")
    file.flush()
    print("writes", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def writer(tmp_path):
    """A process in the middle of writing a file."""
    with started(sys.executable, "-c", HALF, tmp_path / "page.html", says="writes") as process:
        yield process


def test_what_a_killed_writer_left_is_removed(writer, tmp_path):
    writer.kill()
    writer.wait(PATIENCE)
    (left,) = os.listdir(tmp_path)
    assert left.endswith(".part")
    others = [".page.part", "page.part", f"x{left}", f"{left}x", left.replace(".part", ".html")]
    for name in others:
        (tmp_path / name).write_text("")
    write_text(tmp_path / "data.json", "new")
    assert sorted(os.listdir(tmp_path)) == sorted(["data.json", *others])


def test_what_a_living_writer_writes_stays(writer, tmp_path):
    (part,) = os.listdir(tmp_path)
    os.utime(tmp_path / part, (0, 0))  # it may write slowly
    write_text(tmp_path / "data.json", "new")
    assert sorted(os.listdir(tmp_path)) == [part, "data.json"]
    writer.communicate("", PATIENCE)
    assert (tmp_path / "page.html").read_text() == "half" and sorted(os.listdir(tmp_path)) == ["data.json", "page.html"]


def test_a_number_that_another_process_got_is_no_writer(tmp_path):
    with output(tmp_path / "page.html") as file:
        name = os.path.basename(file.name)
    space, pid, started, own = name.split("-")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / f"{space}-{pid}-{int(started) - 1}-{own}").write_text("half")
    write_text(tmp_path / "other" / "page.html", "new")
    assert os.listdir(tmp_path / "other") == ["page.html"]


def test_of_another_machine_what_nobody_wrote_to_for_a_day_is_removed(tmp_path):
    """Whether its process lives cannot be told."""
    for name in (".00000000-1-1-aaaaaaaa.part", ".00000000-1-1-bbbbbbbb.part"):
        (tmp_path / name).write_text("half")
    old = (tmp_path / ".00000000-1-1-aaaaaaaa.part").stat().st_mtime - 90_000
    os.utime(tmp_path / ".00000000-1-1-aaaaaaaa.part", (old, old))
    write_text(tmp_path / "page.html", "new")
    assert sorted(os.listdir(tmp_path)) == [".00000000-1-1-bbbbbbbb.part", "page.html"]


def test_an_error_of_another_file_keeps_its_name(tmp_path):
    with pytest.raises(FileNotFoundError, match="other"), output(tmp_path / "x"):
        (tmp_path / "other").read_text()


def test_names_that_are_not_unicode_are_escaped(tmp_path):
    write_text(tmp_path / "x", "a\udcffb")
    assert (tmp_path / "x").read_text() == "a\\udcffb"


def test_texts_and_arrays(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "latin").write_bytes(b"\xe9")
    for name, says in (("pipe", "no regular file"), ("latin", "no text in UTF-8"), ("none", "No such file")):
        with pytest.raises(ValueError, match=says):
            read_text(tmp_path / name)
    with pytest.raises(ValueError, match="nested too deeply"):
        parse_json("[" * 100_000)
    np.savez(tmp_path / "two.npz", a=np.arange(3), b=np.ones(2))
    assert {name: array.tolist() for name, array in read_arrays(tmp_path / "two.npz").items()} == {
        "a": [0, 1, 2],
        "b": [1.0, 1.0],
    }
    whole = (tmp_path / "two.npz").read_bytes()
    for size in range(0, len(whole), 7):
        (tmp_path / "cut.npz").write_bytes(whole[:size])
        with pytest.raises(ValueError, match=r"cut\.npz"):
            read_arrays(tmp_path / "cut.npz")
    for at in range(0, len(whole), 3):  # whatever else is wrong
        (tmp_path / "odd.npz").write_bytes(whole[:at] + b"\xff" + whole[at + 1 :])
        try:
            read_arrays(tmp_path / "odd.npz")
        except ValueError as error:
            assert "odd.npz" in str(error)
