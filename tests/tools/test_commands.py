"""Every command ends in one way: exit code 2 and one line `PROGRAM: error: ...` for whatever is wrong."""

import argparse
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from balancing.command_line import Parser
from tests.support.made_up_run import Job, write_run
from tests.support.patience import PATIENCE
from tests.support.training import MODEL

REPOSITORY = Path(__file__).resolve().parents[2]
MODULES = ("report", "whatif", "layers", "experts", "cluster", "doctor")


def command(*words: object, stdout: int | None = subprocess.PIPE, **environment: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, *map(os.fspath, words)], stdout=stdout, stderr=subprocess.PIPE, cwd=REPOSITORY,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY), **environment}, timeout=PATIENCE,
    )  # fmt: skip


def one_line(done: subprocess.CompletedProcess, program: str, *says: str) -> None:
    error = done.stderr.decode()
    assert done.returncode == 2, error
    assert error.startswith(f"{program}: error: ") and error.count("\n") == 1, error
    for words in says:
        assert words in error


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    return write_run(tmp_path_factory.mktemp("run"), Job(), 4)


@pytest.mark.parametrize("name", MODULES)
def test_a_wrong_flag(name):
    one_line(command("-m", f"balancing.{name}", "--colour"), f"python -m balancing.{name}", "(see --help)")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full on this system")
@pytest.mark.parametrize("name", ["report", "whatif", "layers", "experts", "doctor", "cluster"])
def test_standard_output_on_a_full_disk(run, name):
    flags = {"report": [run, "--no-html"], "whatif": [run], "doctor": [], "cluster": ["--preset", "h200-8x400g"]}
    flags = flags.get(name, ["--from-report", run])
    with open("/dev/full", "wb") as full:
        done = command("-m", f"balancing.{name}", *flags, stdout=full.fileno())
    one_line(done, f"python -m balancing.{name}", "standard output: No space left on device")


def test_a_reader_that_goes_away_is_no_error(run):
    reading, writing = os.pipe()
    os.close(reading)
    done = command("-m", "balancing.layers", "--from-report", run, stdout=writing)
    os.close(writing)
    assert done.returncode == 141 and not done.stderr


def test_ctrl_c_is_one_line(capsys):
    def work(options: argparse.Namespace) -> None:
        raise KeyboardInterrupt

    assert Parser(prog="python -m balancing.report").run(work, []) == 130
    assert capsys.readouterr() == ("", "python -m balancing.report: interrupted\n")


def test_ctrl_c_while_a_program_imports_is_one_line():
    begin = "from balancing.command_line import explain_in_one_line; explain_in_one_line('pretrain_gpt.py')"
    done = command("-c", f"{begin}; raise KeyboardInterrupt", RANK="0")
    assert done.returncode == 130 and done.stderr.decode() == "pretrain_gpt.py: interrupted\n"


@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
def test_names_that_are_not_utf_8(run, tmp_path, encoding):
    folder = Path(os.fsdecode(os.fsencode(tmp_path) + b"/x\xff\xc3\xa9"))
    shutil.copytree(run, folder)
    done = command("-m", "balancing.report", folder, PYTHONIOENCODING=encoding)
    assert done.returncode == 0, done.stderr
    assert rb"x\udcff" in done.stdout and (folder / "report.html").stat().st_size > 10_000
    one_line(command("-m", "balancing.report", folder / "no", PYTHONIOENCODING=encoding), "python -m balancing.report")


def test_training_names_a_path_that_the_terminal_cannot_show():
    flags = [*MODEL, "--tokenizer-type", "NullTokenizer", "--vocab-size", "127", "--data-path", "n\xe9ant"]
    done = command("pretrain_gpt.py", *flags, PYTHONIOENCODING="ascii", CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 2
    assert b"n\\xe9ant.idx does not exist" in done.stderr and b"codec" not in done.stderr


def test_the_package_lists_its_commands():
    done = command("-m", "balancing")
    assert done.returncode == 0
    for name in MODULES:
        assert f"python -m balancing.{name} " in done.stdout.decode()
    one_line(command("-m", "balancing.sequences"), "python -m balancing.sequences", "python -m balancing.whatif")


@pytest.mark.parametrize("name", ["quickstart", "demo", "gpu_check", "test", "mutants"])
def test_scripts_say_what_they_do(name):
    script = f"scripts/{name}.sh"
    told = subprocess.run(["bash", script, "--help"], capture_output=True, text=True, cwd=REPOSITORY, timeout=PATIENCE)
    assert told.returncode == 0 and script in told.stdout and "pipefail" not in told.stdout and not told.stderr
