"""Run a function on the ranks of a gloo world without starting Python for each of them.

    def total(x):
        dist.init_process_group("gloo")
        ...

    results = pool.run(4, total, 1.0)      # one result a rank, in the order of ranks

The ranks are forks of one process that imported Megatron-LM, on the CPU device or for GPUs (`pool_server.py`), so each
job starts from the same state as a new process would, whatever ran before.
"""

import contextlib
import os
import pickle
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from tests.support.patience import PATIENCE
from tests.support.pool_server import GRACE_SECONDS, Branch, Job, Outcome, output_file, result_file

REPOSITORY = Path(__file__).resolve().parents[2]
MAX_WORLD_SIZE = 8
OUTPUT_SHOWN = 6000  # characters of a rank's output shown with an error
# glibc gives freed memory back to Linux, which clears it for the next tensor. Below 64 MB it shall keep it.
_KEEPS_MEMORY = {"MALLOC_MMAP_THRESHOLD_": str(2**26), "MALLOC_TRIM_THRESHOLD_": str(2**32)}


class Hang(RuntimeError):
    """A job did not end in its time. Its ranks were killed."""


def single_threaded(first: Sequence[str] = ()) -> dict[str, str]:
    """The environment of a rank: one thread each, the checkout importable. first: folders before all others."""
    paths = [*first, str(REPOSITORY), os.environ.get("PYTHONPATH", "")]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(path for path in paths if path),
        "OMP_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
        "CUDA_DEVICE_MAX_CONNECTIONS": "1",
    }


class Pool:
    """Starts its server at the first job, and again after a job that had to be abandoned.

    device: "cpu", "cuda", or "none" for jobs that need neither torch nor Megatron, whose server starts at once.
    before: a module whose `install` is called before Megatron is imported, or for device "none" instead.
    first: folders that Python looks into before all others.
    environment: of the server, beside this process's.
    """

    def __init__(
        self,
        device: str = "cpu",
        before: str | None = None,
        first: Sequence[str] = (),
        environment: Mapping[str, str] = {},
    ) -> None:
        self._device, self._before, self._first, self._environment = device, before, first, environment
        self._server: _Server | None = None
        self._root: Pool | None = None
        self._lock = threading.Lock()  # branches are asked for by several threads
        self.output: list[str] = []  # what each rank of the last job printed

    def branch(self) -> "Pool":
        """A pool whose server is a fork of this one's: both run jobs at the same time, for one import.

        Any thread may use it. This one starts here, since Linux kills a server with the thread that started it.
        """
        self.start()
        branch = Pool(self._device)
        branch._root = self
        return branch

    def run(
        self,
        world_size: int,
        function: Callable,
        *args: Any,
        timeout: float = PATIENCE,
        grace: float = GRACE_SECONDS,
        environment: Mapping[str, str | None] = {},
        gpus: int = 0,
        **kwargs: Any,
    ) -> list[Any]:
        """Call a module-level function on `world_size` ranks at once. Returns their results in the order of ranks.

        The ranks find RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT in their environment. The exception of
        the rank that failed first is raised here, with the rank, its traceback and its output as a note; Hang is
        raised when the job takes longer than `timeout` seconds.

        grace: seconds that the other ranks have to end by themselves after one has failed. What a test expects of them
            needs PATIENCE.
        environment: of the ranks, as in `Job`.
        gpus: that the ranks share, in turn.
        """
        assert 1 <= world_size <= MAX_WORLD_SIZE, f"a world of {world_size} ranks; use 1 to {MAX_WORLD_SIZE}"
        everyone = {
            "WORLD_SIZE": str(world_size),
            "LOCAL_WORLD_SIZE": str(world_size),
            "MASTER_ADDR": "127.0.0.1",
            # The store that the ranks meet in is the server's, as under torchrun.
            "TORCHELASTIC_USE_AGENT_STORE": "True",
        }
        folder = Path(tempfile.mkdtemp(prefix="pool-"))
        try:
            call = pickle.dumps((function, args, kwargs))
            job = Job(call, world_size, {**everyone, **environment}, folder, timeout, grace, gpus)
            ended = self._ask(job)
            self.output = [_read(output_file(folder, rank)) for rank in range(world_size)]
            outcomes = {
                rank: pickle.loads(result_file(folder, rank).read_bytes())
                for rank in range(world_size)
                if result_file(folder, rank).exists()
            }
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        self._raise_first(outcomes, ended, function, world_size, timeout)
        return [outcomes[rank].value for rank in range(world_size)]

    def _raise_first(
        self,
        outcomes: dict[int, Outcome],
        ended: dict[int, int],
        function: Callable,
        world_size: int,
        timeout: float,
    ) -> None:
        # What others tell of a rank that was killed comes after it, whether or not they were given the time to.
        killed = [rank for rank, code in ended.items() if code == -signal.SIGKILL]
        failed = [rank for rank, outcome in outcomes.items() if outcome.report is not None]
        silent = sorted(set(range(world_size)) - set(outcomes))
        if failed and not killed:
            rank = min(failed, key=lambda rank: outcomes[rank].at)
            outcome = outcomes[rank]
            error = outcome.error
            if not isinstance(error, Exception):  # SystemExit and the like would end the test run
                last_line = str(outcome.report).strip().splitlines()[-1]
                error = RuntimeError(f"rank {rank} of {world_size}: {last_line}")
            error.add_note(f"rank {rank} of {world_size} in {function.__qualname__}\n{outcome.report}")
            for each in [rank, *(other for other in silent if ended.get(other, 0) < 0)]:
                error.add_note(self._output_of(each))
            raise error
        died = killed or [rank for rank in silent if rank in ended]
        if died:
            raise RuntimeError(f"rank {died[0]} of {world_size} died, exit code {ended[died[0]]}{self._outputs(died)}")
        if silent:
            raise Hang(f"ranks {silent} of {world_size} did not end within {timeout} s{self._outputs(silent)}")

    def _outputs(self, ranks: list[int]) -> str:
        return "".join(f"\n{self._output_of(rank)}" for rank in ranks)

    def _output_of(self, rank: int) -> str:
        return f"--- output of rank {rank} ---\n{self.output[rank][-OUTPUT_SHOWN:]}"

    def _ask(self, job: Job) -> dict[int, int]:
        try:
            server = self.start()
            pickle.dump(job, server.jobs)
            server.jobs.flush()
            return pickle.load(server.answers)
        except (EOFError, BrokenPipeError, ConnectionError) as error:
            self.stop()
            raise RuntimeError("the pool's server process died; see its output above") from error
        except BaseException:  # a test's time limit, Ctrl-C: what still runs must not meet the next job
            self.stop()
            raise

    def start(self) -> "_Server":
        """Start the server unless it runs, and wait until it has imported everything."""
        server = self.launch()
        if not server.pid:
            server.pid = pickle.load(server.answers)
        return server

    def launch(self) -> "_Server":
        """Start the server unless it runs, which then imports while this process does something else."""
        if self._server is None:
            self._server = self._spawn() if self._root is None else self._root._fork()
        return self._server

    def _spawn(self) -> "_Server":
        code = f"from tests.support import pool_server; pool_server.main({os.getpid()})"
        process = subprocess.Popen(
            [sys.executable, "-c", code, self._device, *([self._before] if self._before else [])],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=single_threaded(self._first) | (_KEEPS_MEMORY if self._device != "cuda" else {}) | self._environment,
        )
        assert process.stdin and process.stdout
        return _Server(process.stdin, process.stdout, process)

    def _fork(self) -> "_Server":
        """A branch of this pool's server."""
        with self._lock, tempfile.TemporaryDirectory(prefix="pool-") as folder, socket.socket(socket.AF_UNIX) as door:
            server = self.start()
            door.bind(address := f"{folder}/door")
            door.listen()
            door.settimeout(PATIENCE)
            pickle.dump(Branch(address), server.jobs)
            server.jobs.flush()
            connection, _ = door.accept()
            connection.settimeout(None)
            jobs, answers = connection.makefile("wb"), connection.makefile("rb")
            connection.close()  # once the files are
            return _Server(jobs, answers)

    @property
    def server(self) -> int:
        """Process id of the server, whose children are the ranks of a job."""
        assert self._server is not None, "no job has run yet"
        return self._server.pid

    def stop(self) -> None:
        """End the server and all ranks. The next job starts a new one."""
        server, self._server = self._server, None
        if server is not None:
            server.stop()


class _Server:
    """The process behind a pool. process: where it is a child of this one, and not a branch of another server."""

    def __init__(self, jobs: BinaryIO, answers: BinaryIO, process: subprocess.Popen | None = None) -> None:
        self.jobs, self.answers, self.process = jobs, answers, process
        self.pid = 0

    def stop(self) -> None:
        for pid in filter(None, (self.pid, self.process and self.process.pid)):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)  # its ranks are killed by Linux with it
        for file in (self.jobs, self.answers):
            with contextlib.suppress(OSError):
                file.close()
        if self.process is not None:
            self.process.wait()


def _read(path: Path) -> str:
    return path.read_text(errors="replace") if path.exists() else ""
