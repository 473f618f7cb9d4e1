"""Ranks of a job on the CPU device or on GPUs, started alike.

On the CPU they are forks of the pool's server. A process that has used CUDA cannot be forked, so on GPUs each rank is a
process of its own. Where there are fewer GPUs than ranks, several ranks share a GPU through a private MPS daemon where
there is one; without one their kernels take turns. NCCL 2.30 has a mode for ranks that share a GPU. An older one takes
ranks on one host for a mistake, so each rank says that it is a host of its own, and messages go through sockets: NCCL's
kernels, streams and rules, at no speed that means anything. Where NCCL does not talk at all, tensors are staged through
the host (`host_group.py`).
"""

import contextlib
import os
import pickle
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from tests.gpu.mps import private_mps
from tests.support.patience import PATIENCE
from tests.support.pool import REPOSITORY, Pool, single_threaded
from tests.support.pool_server import Job, output_file

__all__ = ["OnCpu", "OnGpus", "sharing"]

# A rank's kernels must leave room on the GPU for those of the ranks that they wait for.
_SHARING = {"NCCL_MAX_CTAS": "1", "NCCL_NVLS_ENABLE": "0"}
_AS_HOSTS = {
    "NCCL_HOSTID": "rank{rank}",
    "NCCL_SOCKET_IFNAME": "lo",
    "NCCL_NET": "Socket",
    "NCCL_IB_DISABLE": "1",
    "NCCL_MNNVL_ENABLE": "0",
}


def sharing(ranks: int, gpus: int, nccl: tuple[int, ...]) -> dict[str, str]:
    """The environment in which `ranks` ranks run on `gpus` GPUs; "{rank}" in a value stands for each rank's number.
    nccl: its version."""
    if ranks <= gpus:
        return {}
    return _SHARING | ({"NCCL_MULTI_RANK_GPU_ENABLE": "1"} if nccl >= (2, 30) else _AS_HOSTS)


class OnCpu:
    """Ranks on the CPU device."""

    device = "cpu"

    def __init__(self, pool: Pool) -> None:
        self._pool = pool

    def run(
        self, ranks: int, function: Callable, *args: Any, environment: Mapping[str, str] | None = None, **kwargs: Any
    ) -> list[Any]:
        """As `Pool.run`. environment: of ranks on GPUs; here it means nothing."""
        return self._pool.run(ranks, function, *args, **kwargs)


class OnGpus(Pool):
    """Ranks on the GPUs of this machine. Stop it at the end, which ends the MPS daemon."""

    device = "cuda"

    def __init__(self, gpus: int, nccl: tuple[int, ...], program: tuple[str, ...] = ("-m", "tests.gpu.rank")) -> None:
        super().__init__()
        self._gpus, self._nccl, self._program = gpus, nccl, program
        self._environment: dict[str, str] = {}
        self._mps = contextlib.ExitStack()
        self._mps_environment: dict[str, str] | None = None

    def run(  # type: ignore[override]
        self,
        world_size: int,
        function: Callable,
        *args: Any,
        timeout: float = PATIENCE,
        environment: Mapping[str, str] | None = None,
        **kwargs: Any,
    ) -> list[Any]:
        """As `Pool.run`. environment: more of it, for all ranks."""
        self._environment = sharing(world_size, self._gpus, self._nccl)
        if self._environment:
            self._environment |= self._daemon()
        self._environment |= environment or {}
        return super().run(world_size, function, *args, timeout=timeout, **kwargs)

    def _daemon(self) -> dict[str, str]:
        if self._mps_environment is None:
            self._mps_environment = self._mps.enter_context(private_mps())
        return self._mps_environment

    def _ask(self, job: Job) -> dict[int, int]:
        from torch.distributed import TCPStore

        # The ranks meet in a store of this process, as under torchrun.
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        (job.folder / "job").write_bytes(pickle.dumps(job))
        ranks: list[subprocess.Popen] = []
        try:
            for rank in range(job.world_size):
                own = {"RANK": str(rank), "LOCAL_RANK": str(rank % max(1, self._gpus)), "MASTER_PORT": str(store.port)}
                own |= {name: value.format(rank=rank) for name, value in self._environment.items()}
                with output_file(job.folder, rank).open("ab") as output:
                    ranks.append(
                        subprocess.Popen(
                            [sys.executable, *self._program, str(job.folder), str(rank), str(os.getpid())],
                            cwd=REPOSITORY,
                            env=single_threaded() | job.environment | own,
                            stdin=subprocess.DEVNULL,
                            stdout=output,
                            stderr=output,
                        )
                    )
            return dict(_ended(ranks, time.monotonic() + job.timeout, job.grace))
        finally:
            for process in ranks:
                process.kill()
                process.wait()

    def stop(self) -> None:
        self._mps.close()
        self._mps_environment = None


def _ended(ranks: list[subprocess.Popen], deadline: float, grace: float) -> Iterator[tuple[int, int]]:
    """(rank, exit code) of those that end before the deadline; after one failed, the others may say why they did."""
    running, is_over = dict(enumerate(ranks)), False
    while running and not is_over:
        is_over = time.monotonic() >= deadline  # before the look, so that the last one is after the deadline
        for rank, process in list(running.items()):
            code = process.poll()
            if code is None:
                continue
            del running[rank]
            yield rank, code
            if code:
                deadline = min(deadline, time.monotonic() + grace)
        time.sleep(0.05)
