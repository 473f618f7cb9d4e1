"""Run a function on the ranks of a gloo world without starting Python for each of them.

    def total(x):
        dist.init_process_group("gloo")
        ...

    results = pool.run(4, total, 1.0)      # one result a rank, in the order of ranks

The ranks are forks of one process that imported Megatron-LM on the CPU device (`pool_server.py`), so each job starts
from the same state as a new process would, whatever ran before.
"""

import os
import pickle
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tests.support.patience import PATIENCE
from tests.support.pool_server import GRACE_SECONDS, Job, Outcome, output_file, result_file

REPOSITORY = Path(__file__).resolve().parents[2]
MAX_WORLD_SIZE = 8
OUTPUT_SHOWN = 6000  # characters of a rank's output shown with an error


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

    Without `preload` it starts at once, for jobs that need neither torch nor Megatron. before: a module whose `install`
    is called before Megatron is imported. first: folders that Python looks into before all others.
    """

    def __init__(self, preload: bool = True, before: str | None = None, first: Sequence[str] = ()) -> None:
        self._preload, self._before, self._first = preload, before, first
        self._server: subprocess.Popen | None = None
        self.output: list[str] = []  # what each rank of the last job printed

    def run(
        self,
        world_size: int,
        function: Callable,
        *args: Any,
        timeout: float = PATIENCE,
        grace: float = GRACE_SECONDS,
        **kwargs: Any,
    ) -> list[Any]:
        """Call a module-level function on `world_size` ranks at once. Returns their results in the order of ranks.

        The ranks find RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT in their environment. The exception of
        the rank that failed first is raised here, with the rank, its traceback and its output as a note; Hang is
        raised when the job takes longer than `timeout` seconds.

        grace: seconds that the other ranks have to end by themselves after one has failed. What a test expects of them
            needs PATIENCE.
        """
        assert 1 <= world_size <= MAX_WORLD_SIZE, f"a world of {world_size} ranks; use 1 to {MAX_WORLD_SIZE}"
        environment = {
            "WORLD_SIZE": str(world_size),
            "LOCAL_WORLD_SIZE": str(world_size),
            "MASTER_ADDR": "127.0.0.1",
            # The store that the ranks meet in is the server's, as under torchrun.
            "TORCHELASTIC_USE_AGENT_STORE": "True",
        }
        folder = Path(tempfile.mkdtemp(prefix="pool-"))
        try:
            job = Job(pickle.dumps((function, args, kwargs)), world_size, environment, folder, timeout, grace)
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
            if self._server is None:
                self._start()
            assert self._server is not None and self._server.stdin and self._server.stdout
            pickle.dump(job, self._server.stdin)
            self._server.stdin.flush()
            return pickle.load(self._server.stdout)
        except (EOFError, BrokenPipeError) as error:
            self.stop()
            raise RuntimeError("the pool's server process died; see its output above") from error
        except BaseException:  # a test's time limit, Ctrl-C: what still runs must not meet the next job
            self.stop()
            raise

    def _start(self) -> None:
        self._server = subprocess.Popen(
            [
                sys.executable,
                "-c",
                f"from tests.support import pool_server; pool_server.main({os.getpid()})",
                *(["preload"] if self._preload else []),
                *([self._before] if self._before else []),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=single_threaded(self._first),
        )
        ready = pickle.load(self._server.stdout)
        assert ready == "ready"

    @property
    def server(self) -> int:
        """Process id of the server, whose children are the ranks of a job."""
        assert self._server is not None, "no job has run yet"
        return self._server.pid

    def stop(self) -> None:
        """End the server and all ranks. The next job starts a new one."""
        if self._server is None:
            return
        server, self._server = self._server, None
        server.kill()  # its ranks are killed by Linux with it
        server.communicate()


def _read(path: Path) -> str:
    return path.read_text(errors="replace") if path.exists() else ""
