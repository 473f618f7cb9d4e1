"""The pool of ranks: what it promises the other tests."""

import os
import pickle
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.support.command import run_python
from tests.support.patience import PATIENCE, heed_interrupts
from tests.support.pool import Hang, Pool, single_threaded
from tests.support.training import EXACT, MOCK_DATA, MODEL, MOE, assert_same, join, train, train_rank

TESTS = Path(__file__).resolve().parents[1]


def _sum_of_ranks(offset: float) -> tuple[int, float]:
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    total = torch.tensor(dist.get_rank() + offset)
    dist.all_reduce(total)
    return dist.get_rank(), total.item()


def _environment() -> tuple[str, ...]:
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "OMP_NUM_THREADS")
    return tuple(os.environ[name] for name in names)


def _fail_on_rank(which: int) -> None:
    print("before the failure", flush=True)
    if int(os.environ["RANK"]) == which:
        raise KeyError("the reason")
    time.sleep(3600)


class NotPicklable(Exception):
    def __init__(self) -> None:
        super().__init__(lambda: None)


def _raise_strangely() -> None:
    raise NotPicklable


def _leave(code: int) -> None:
    sys.exit(code)


def _die() -> None:
    if os.environ["RANK"] == "1":
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(3600)


def _abort_and_fail() -> None:
    if os.environ["RANK"] == "0":
        print("before the abort", flush=True)
        os.kill(os.getpid(), signal.SIGABRT)
    raise ConnectionError("the other rank is gone")


def _sleep(seconds: float) -> None:
    print("sleeping", flush=True)
    time.sleep(seconds)


def _return_a_function() -> Any:
    return lambda: None


def _wreck() -> None:
    """Leave behind all that a careless job could."""
    import torch
    from megatron.core import parallel_state
    from megatron.training import global_vars, training

    torch.set_default_dtype(torch.float64)
    torch.manual_seed(7)
    torch.distributed.init_process_group("gloo")
    parallel_state.initialize_model_parallel()
    global_vars._GLOBAL_ARGS = object()
    training.train_step = None
    os.environ["NVTE_FUSED_ATTN"] = "1"
    os.chdir("/")
    sys.argv[1:] = ["--nonsense"]


def test_results_are_in_the_order_of_ranks(pool):
    assert pool.run(3, _sum_of_ranks, 1.0) == [(0, 6.0), (1, 6.0), (2, 6.0)]
    assert pool.run(1, _sum_of_ranks, 1.0) == [(0, 1.0)]
    assert pool.run(8, _sum_of_ranks, 0.0) == [(rank, 28.0) for rank in range(8)]


def test_environment(pool):
    assert pool.run(2, _environment) == [("0", "0", "2", "127.0.0.1", "1"), ("1", "1", "2", "127.0.0.1", "1")]


def test_an_exception_comes_back_with_its_rank(pool):
    with pytest.raises(KeyError, match="the reason") as failed:
        pool.run(3, _fail_on_rank, 2, timeout=3600)  # the time limit of the test ends what waits for the others
    notes = "\n".join(failed.value.__notes__)
    assert "rank 2 of 3 in _fail_on_rank" in notes
    assert 'raise KeyError("the reason")' in notes
    assert "--- output of rank 2 ---\nbefore the failure" in notes


def test_a_rank_that_a_signal_ended_shows_its_output_beside_the_failure_of_another(pool):
    with pytest.raises(ConnectionError) as failed:
        pool.run(2, _abort_and_fail, timeout=3600, grace=PATIENCE)
    assert "--- output of rank 0 ---\nbefore the abort" in "\n".join(failed.value.__notes__)


def test_other_ends(pool):
    with pytest.raises(RuntimeError, match="NotPicklable"):
        pool.run(1, _raise_strangely)
    with pytest.raises(RuntimeError, match="SystemExit: 3"):
        pool.run(1, _leave, 3)
    with pytest.raises(RuntimeError, match="rank 1 of 2 died, exit code -9"):
        pool.run(2, _die, timeout=3600)
    with pytest.raises(RuntimeError, match="cannot be pickled"):
        pool.run(1, _return_a_function)
    assert pool.run(1, _sum_of_ranks, 1.0) == [(0, 1.0)]


def test_a_hang_is_ended(pool):
    for seconds in (1.0, 10.0, 100.0):  # until the machine finds the time to start the ranks
        with pytest.raises(Hang, match=rf"ranks \[0, 1\] of 2 did not end within {seconds} s") as hung:
            pool.run(2, _sleep, 3600, timeout=seconds)
        if "sleeping" in str(hung.value):
            break
    assert "sleeping" in str(hung.value)
    assert pool.run(1, _sum_of_ranks, 1.0) == [(0, 1.0)]


def test_nothing_is_left_from_other_jobs(pool):
    """A run after other runs, and after a job that wrecks what it can, is the run of a new process bit for bit."""
    argv = [*MODEL, *MOCK_DATA, *"--train-iters 2".split()]
    code = """
import pickle, sys
from megatron.balanced.cpu.device import use_cpu
use_cpu()
from tests.support.pool_server import shrink_mock_data
from tests.support.training import train_rank
shrink_mock_data()
run = train_rank(sys.argv[1:], True)
sys.stderr.write("RUN " + pickle.dumps(run).hex() + "\\n")
"""
    done = run_python("-W", "ignore", "-c", code, *argv)
    assert done.returncode == 0, done.stderr
    alone = join([pickle.loads(bytes.fromhex(done.stderr.rpartition("RUN ")[2]))])
    train(pool, 2, f"{' '.join(EXACT)} {' '.join(MOE)} --expert-model-parallel-size 2")
    pool.run(2, _wreck)
    assert_same(join(pool.run(1, train_rank, argv, True)), alone)


def _ranks_of(process: psutil.Process) -> list[psutil.Process]:
    return [child for child in process.children(recursive=True) if child.status() != psutil.STATUS_ZOMBIE]


def _wait_until_gone(processes: list[psutil.Process]) -> None:
    _, alive = psutil.wait_procs(processes, timeout=PATIENCE)
    assert not alive


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM])
def test_nothing_outlives_the_test_run(tmp_path, end):
    """However it ends: a pool in a process of its own, killed in the middle of a job."""
    code = (
        "from tests.support.pool import Pool; from tests.tools import test_pool\n"
        "Pool('none').run(2, test_pool._sleep, 3600)"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code], env=single_threaded(), stderr=subprocess.DEVNULL, preexec_fn=heed_interrupts
    )
    try:
        run = psutil.Process(process.pid)
        while len(ranks := _ranks_of(run)) < 3:  # the server and two ranks
            assert process.poll() is None
            time.sleep(0.1)
        process.send_signal(end)
        process.wait(timeout=PATIENCE)
        _wait_until_gone(ranks)
    finally:
        process.kill()
        process.wait()


def test_a_process_whose_parent_has_ended_already_ends():
    """As where the parent is killed between starting it and its asking for a signal."""
    code = (
        "import os, time\n"
        "from tests.support.pool_server import die_with_parent\n"
        "parent = os.getpid()\n"
        "if os.fork() == 0:\n"
        "    while os.getppid() == parent: time.sleep(0.01)\n"
        "    print('asks', flush=True)\n"
        "    die_with_parent(parent)\n"
        "    print('lives on', flush=True)\n"
    )
    assert run_python("-c", code).stdout == "asks\n"


def test_a_server_that_dies_is_replaced():
    workers = Pool("none")
    try:
        assert workers.run(1, _environment)[0][0] == "0"
        workers._server.process.kill()
        workers._server.process.wait()
        with pytest.raises(RuntimeError, match="server process died"):
            workers.run(1, _environment)
        assert workers.run(1, _environment)[0][0] == "0"
        server = psutil.Process(workers.server)
    finally:
        workers.stop()
    _wait_until_gone([server])


def test_the_time_limit_of_a_test(tmp_path):
    """The limit ends a test that waits for ranks, and the next test finds a pool that works."""
    (tmp_path / "test_slow.py").write_text(
        "import pytest, signal\nfrom tests.support.pool import Pool\n"
        "from tests.tools.test_pool import _sleep, _environment\n"
        "@pytest.fixture(scope='module')\ndef pool():\n"
        "    workers = Pool('none')\n    yield workers\n    workers.stop()\n"
        "def test_first(pool):\n    pool.run(1, _environment)\n"
        # Its time runs faster from its first line on. Set-up and tear-down have the limit, too, and may not reach it.
        "@pytest.mark.limit(700)\ndef test_slow(pool):\n"
        "    signal.setitimer(signal.ITIMER_REAL, 2)\n    pool.run(1, _sleep, 3600)\n"
        "def test_next(pool):\n    assert pool.run(1, _environment)[0][0] == '0'\n"
    )
    (tmp_path / "conftest.py").write_text(
        f"import sys; sys.path.insert(0, {str(TESTS.parent)!r})\nfrom tests_conftest import *"
    )
    (tmp_path / "tests_conftest.py").write_text((TESTS / "conftest.py").read_text())
    done = run_python("-m", "pytest", "-q", "-p", "no:cacheprovider", tmp_path, cwd=tmp_path)
    assert "1 failed, 2 passed" in done.stdout, done.stdout + done.stderr
    assert "TimeoutError: test_slow.py::test_slow did not end within 700 s" in done.stdout


def _meet(folder: Path, mine: str, other: str) -> str:
    """Wait for the other job, which must therefore run at the same time."""
    (folder / mine).touch()
    deadline = time.monotonic() + PATIENCE
    while not (folder / other).exists():
        assert time.monotonic() < deadline, f"{other} does not run beside {mine}"
        time.sleep(0.01)
    return os.environ["LOCAL_RANK"] + os.environ.get("OF_RANK", "") + os.environ.get("OMP_NUM_THREADS", "-")


def test_branches_run_jobs_at_the_same_time(tmp_path):
    """A hang in one ends it alone; its next job finds a new branch, and all end with the pool."""
    root = Pool("none")
    branches = [root.branch(), root.branch()]
    try:
        with ThreadPoolExecutor() as threads:
            jobs = [
                threads.submit(
                    branch.run, 2, _meet, tmp_path, mine, other, gpus=1,
                    environment={"OF_RANK": "of {rank} of {}", "OMP_NUM_THREADS": None},
                )
                for branch, mine, other in zip(branches, "ab", "ba", strict=True)
            ]  # fmt: skip
            assert [job.result() for job in jobs] == [["0of 0 of {}-", "0of 1 of {}-"]] * 2
        servers = [psutil.Process(branch.server) for branch in branches]
        assert len({root.server, *(server.pid for server in servers)}) == 3
        with pytest.raises(Hang):
            branches[0].run(1, _sleep, 3600, timeout=0.5)
        branches[0].stop()
        assert branches[0].run(1, _environment)[0][0] == branches[1].run(1, _environment)[0][0] == "0"
        servers.append(psutil.Process(branches[0].server))
        assert servers[1].pid == branches[1].server, "the other branch was ended with it"
    finally:
        root.stop()
    _wait_until_gone(servers)


def _imported() -> list[str]:
    return [name for name in ("torch", "megatron.core") if name in sys.modules]


@pytest.mark.parametrize("touches", [False, True])
def test_ranks_on_gpus_are_forks_unless_an_import_touches_cuda(tmp_path, touches):
    """As far as that goes without a GPU: CUDA's driver is a library that says whether it was initialized."""
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler")
    code = f"int cuDeviceGetCount(int *count) {{ return {0 if touches else 3}; }}"
    (tmp_path / "driver.c").write_text(code)
    library = tmp_path / "libcuda.so.1"
    subprocess.run([compiler, "-shared", "-o", library, tmp_path / "driver.c"], check=True)
    ranks = Pool("cuda", environment={"LD_LIBRARY_PATH": str(tmp_path)})
    try:
        assert ranks.branch().run(2, _imported) == [["torch"] if touches else ["torch", "megatron.core"]] * 2
        server = psutil.Process(ranks.server)
    finally:
        ranks.stop()
    _wait_until_gone([server])
