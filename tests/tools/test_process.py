"""Processes that another one started."""

import pytest

from tests.support.command import REPOSITORY, run_python

PROGRAM = """
import os
import time
from multiprocessing import get_context
from balancing.process import end_with_parent

if __name__ == "__mp_main__":
    while {late} and os.getppid() == int(os.environ["STARTED_BY"]):
        time.sleep(0.01)
    end_with_parent()

def work():
    print("at work", flush=True)
    time.sleep(3600)

if __name__ == "__main__":
    os.environ["STARTED_BY"] = str(os.getpid())
    get_context("{method}").Process(target=work).start()
    time.sleep({rest})
    os._exit(0)
"""


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
@pytest.mark.parametrize("late", [True, False])
def test_a_spawned_process_ends_with_its_parent(tmp_path, method, late):
    """Also where the parent is killed while the process still imports the program."""
    program = tmp_path / "program.py"
    program.write_text(PROGRAM.format(late=late, method=method, rest=0 if late else 2))
    ended = run_python(program, PYTHONPATH=str(REPOSITORY))
    assert ended.returncode == 0, ended.stderr
