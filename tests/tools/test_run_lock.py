"""One directory, one run: the second is told who has it, and a run that was killed is in nobody's way."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest

from balancing import run_lock
from balancing.process import process_space
from balancing.run_lock import NAME, one_run
from tests.support.command import run_python, started
from tests.support.patience import PATIENCE

HOLD = """
import sys, time
from balancing import run_lock
from balancing.run_lock import one_run
run_lock.BEAT_SECONDS = 0.1
with one_run("--save", sys.argv[1]):
    print("has it", flush=True)
    time.sleep(1000)
"""


@pytest.fixture
def holder(tmp_path):
    """A process that has the lock of a folder."""
    with started(sys.executable, "-c", HOLD, tmp_path / "run", says="has it") as process:
        yield process


def test_training_in_a_folder_that_another_run_has_is_refused(holder, tmp_path):
    """By the command itself, in one line, and nothing is written into the folder."""
    from tests.support.training import MOCK_DATA, MODEL

    for flags in (["--save", tmp_path / "run", "--save-interval", "1"], ["--balance-report", tmp_path / "run"]):
        done = run_python("pretrain_gpt.py", *MODEL, *MOCK_DATA, *flags, CUDA_VISIBLE_DEVICES="")
        (line,) = [line for line in done.stderr.splitlines() if "error" in line]
        assert done.returncode == 2 and "Traceback" not in done.stderr
        assert line.startswith(f"pretrain_gpt.py: error: {flags[0]} {tmp_path}/run is in use by process {holder.pid} ")
    assert os.listdir(tmp_path / "run") == [NAME]


@pytest.fixture
def quick(monkeypatch):
    """A run watches the lock of a dead one for a short time. A living one, which may stand still, needs PATIENCE."""
    monkeypatch.setattr(run_lock, "BEAT_SECONDS", 0.05)
    monkeypatch.setattr(run_lock, "PATIENCE_SECONDS", 2.0)


def elsewhere(folder: Path) -> None:
    """Let the lock be one of another machine, which does not show whether its process lives."""
    content = json.loads((folder / NAME).read_text())
    (folder / NAME).write_text(json.dumps(content | {"space": "another boot", "host": "node7", "job": "123"}))


def test_the_second_run_is_told_who_has_it(holder, tmp_path):
    says = f"--save {tmp_path}/run is in use by process {holder.pid} on "
    with pytest.raises(ValueError, match=says) as error, one_run("--save", tmp_path / "run"):
        pass
    assert "\n" not in str(error.value) and "name another folder" in str(error.value)
    assert json.loads((tmp_path / "run" / NAME).read_text())["pid"] == holder.pid, "the first run lost its lock"


def test_a_killed_run_leaves_no_work(holder, tmp_path, quick):
    holder.send_signal(signal.SIGKILL)
    holder.wait(PATIENCE)
    for _ in range(2):  # and a run that ends as it should leaves nothing
        with one_run("--save", tmp_path / "run"):
            assert json.loads((tmp_path / "run" / NAME).read_text())["pid"] == os.getpid()
        assert os.listdir(tmp_path / "run") == []


def test_a_number_that_another_process_got_is_no_run(holder, tmp_path, quick):
    content = json.loads((tmp_path / "run" / NAME).read_text())
    (tmp_path / "run" / NAME).write_text(json.dumps(content | {"started": "7"}))
    with one_run("--save", tmp_path / "run"):
        pass


def test_a_requeue_on_another_machine_waits_and_goes_on(tmp_path, quick, capsys):
    with one_run("--save", tmp_path / "mine"):
        left = (tmp_path / "mine" / NAME).read_text()
    (tmp_path / "mine" / NAME).write_text(left)
    elsewhere(tmp_path / "mine")
    begun = time.monotonic()
    with one_run("--save", tmp_path / "mine"):
        assert time.monotonic() - begun >= 2
    assert "left by process" in capsys.readouterr().out


def test_a_run_that_lives_on_another_machine_is_seen_by_its_touches(tmp_path, quick, monkeypatch):
    monkeypatch.setattr(run_lock, "PATIENCE_SECONDS", PATIENCE)
    with one_run("--save", tmp_path):
        elsewhere(tmp_path)  # the thread of this process goes on touching it
        says = r"in use by process \d+ on node7, Slurm job 123"
        with pytest.raises(ValueError, match=says), one_run("--save", tmp_path):
            pass


@pytest.fixture
def other_machine(tmp_path):
    """A process that has the lock in namespaces of its own, as on another host of a network mount."""
    become = ["unshare", "--uts", "--pid", "--fork", "--kill-child", "--mount-proc"]
    if subprocess.run([*become, "true"], capture_output=True).returncode:
        pytest.skip("needs namespaces of its own")
    hold = [sys.executable, "-c", HOLD, tmp_path / "run"]
    renamed = [*become, "sh", "-c", 'hostname node7; exec "$@"', "sh", *hold]
    with started(*renamed, says="has it", SLURM_JOB_ID="123") as process:
        yield process


def test_a_run_of_another_machine_keeps_its_folder_until_it_dies(other_machine, tmp_path, quick, capsys, monkeypatch):
    says = f"--save {tmp_path}/run is in use by process 1 on node7, Slurm job 123, since"
    with monkeypatch.context() as patient:
        patient.setattr(run_lock, "PATIENCE_SECONDS", PATIENCE)
        with pytest.raises(ValueError, match=says), one_run("--save", tmp_path / "run"):
            pass
    holder = psutil.Process(other_machine.pid).children()
    other_machine.kill()
    other_machine.wait(PATIENCE)
    assert (
        psutil.wait_procs(holder, PATIENCE)[1] == []
    )  # it is killed with the other, and may touch the lock until then
    capsys.readouterr()
    with one_run("--save", tmp_path / "run"):
        assert json.loads((tmp_path / "run" / NAME).read_text())["pid"] == os.getpid()
    assert "left by process 1 on node7, Slurm job 123" in capsys.readouterr().out


def test_a_run_that_ends_while_it_is_watched_gives_way_at_once(tmp_path, quick, monkeypatch):
    monkeypatch.setattr(run_lock, "PATIENCE_SECONDS", 10 * PATIENCE)
    (tmp_path / NAME).write_text(json.dumps({"space": "another boot", "host": "node7", "pid": 1}))
    looked = threading.Event()
    touched = run_lock._touched
    monkeypatch.setattr(run_lock, "_touched", lambda path: (touched(path), looked.set())[0])
    threading.Thread(target=lambda: (looked.wait(PATIENCE), (tmp_path / NAME).unlink())).start()
    with one_run("--save", tmp_path):
        assert json.loads((tmp_path / NAME).read_text())["pid"] == os.getpid()


def test_a_run_that_loses_its_folder_leaves_the_lock_of_the_other(tmp_path, quick):
    other = json.dumps({"space": "another boot", "host": "node7", "pid": 1})
    with one_run("--save", tmp_path):
        (tmp_path / NAME).write_text(other)
    assert (tmp_path / NAME).read_text() == other


@pytest.mark.parametrize("content", ["", "[", "[1]", "{}"])
def test_a_damaged_lock_is_taken_over(tmp_path, quick, content):
    (tmp_path / NAME).write_text(content)
    with one_run("--save", tmp_path):
        pass


def test_a_folder_that_takes_no_file_has_no_lock(tmp_path):
    (tmp_path / "file").write_text("")
    with one_run("--save", tmp_path / "file" / "folder"), one_run("--save", "/proc/run"):
        pass


@pytest.mark.parametrize("late", ["", "1", "2"])
def test_of_two_that_take_over_at_once_one_goes_on(tmp_path, quick, monkeypatch, late):
    """Also where one of them stands still when it has seen that the old one is dead."""
    (tmp_path / NAME).write_text(json.dumps({"space": process_space(), "pid": 2**30, "started": "1"}))
    held: list[str] = []
    both, first_has_ended = threading.Barrier(2), threading.Event()
    lives = run_lock._lives

    def lives_and_waits(path: Path, own: dict) -> bool:
        found = lives(path, own)
        if path.name == NAME:
            both.wait(PATIENCE)
            if own["pid"] == late:
                assert first_has_ended.wait(PATIENCE)
        return found

    monkeypatch.setattr(run_lock, "_lives", lives_and_waits)
    monkeypatch.setattr(run_lock, "is_alive", lambda pid, started: pid in ("1", "2"))

    def run(name: str) -> None:
        try:
            run_lock._take("--save x", tmp_path / NAME, {"space": process_space(), "pid": name})
            held.append(name)
        except ValueError as error:
            refused.append(str(error))
        if name != late:
            first_has_ended.set()

    refused: list[str] = []
    threads = [threading.Thread(target=run, args=(name,)) for name in ("1", "2")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    (holder,), (line,) = held, refused
    assert holder != late and "--save x " in line and f"by process {holder} " in line
    assert json.loads((tmp_path / NAME).read_text())["pid"] == holder and os.listdir(tmp_path) == [NAME]


def test_a_run_that_was_killed_while_it_took_over_is_in_nobodys_way(tmp_path, quick, monkeypatch):
    dead = json.dumps({"space": process_space(), "pid": 2**30, "started": "1"})
    (tmp_path / NAME).write_text(dead)
    with monkeypatch.context() as patched:
        patched.setattr(run_lock, "_text", lambda path: dead)
        patched.setattr(run_lock, "write_text", lambda *unused: (_ for _ in ()).throw(KeyboardInterrupt))
        patched.setattr(Path, "unlink", lambda *unused: None)
        with pytest.raises(KeyboardInterrupt):
            run_lock._take("--save x", tmp_path / NAME, json.loads(dead))
    assert len(os.listdir(tmp_path)) == 2
    with one_run("--save", tmp_path):
        assert os.listdir(tmp_path) == [NAME]
