"""Threads beside the one that trains: a process that ends while they are inside torch ends with its own exit code."""

import pytest

from tests.support.command import REPOSITORY, run_python

ASKS = """
import sys, threading
import torch.distributed as dist
from balancing.threads import note_exit_code, start_thread

store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
begun, over = threading.Event(), threading.Event()

def ask():
    own = dist.TCPStore("127.0.0.1", store.port, is_master=False, wait_for_workers=False)
    while not over.is_set():
        own.check(["key"])
        begun.set()

for _ in range(4):
    start_thread(ask, end=over.set)
begun.wait()
{end}
"""

# Rank 0 waits in a thread for a message that rank 1, a process that it starts, never sends, until rank 1 ends with it.
WAITS = """
import os, subprocess, sys, threading
import torch, torch.distributed as dist
from balancing import threads

threads._EXIT_SECONDS = 0.5
rank = int(os.environ.get("RANK", 0))
if rank == 0:
    other = subprocess.Popen([sys.executable, *sys.argv], env=os.environ | {{"RANK": "1"}}, stdin=subprocess.PIPE)
dist.init_process_group("gloo", init_method="file://" + sys.argv[1], rank=rank, world_size=2)
dist.barrier()
if rank == 1:
    sys.stdin.read()
    os._exit(0)
work = dist.irecv(torch.zeros(4), 1)
threads.start_thread(work.wait)
{end}
"""

ENDS = {
    "sys.exit": ("threads.note_exit_code(3); sys.exit(3)", 3),
    "the end": ("threads.note_exit_code(None)", 0),
    "an error": ("raise KeyError", 1),
}


@pytest.mark.parametrize("program", [ASKS, WAITS], ids=["asks a store", "waits for a rank"])
@pytest.mark.parametrize("end", ENDS)
def test_the_exit_code_is_that_of_the_process(tmp_path, program, end):
    line, code = ENDS[end]
    text = program.format(end=line if program is WAITS else line.replace("threads.", ""))
    (tmp_path / "program.py").write_text(text)
    done = run_python("-W", "ignore", tmp_path / "program.py", tmp_path / "store", PYTHONPATH=str(REPOSITORY))
    assert done.returncode == code, done.stderr
    assert "terminate called" not in done.stderr
