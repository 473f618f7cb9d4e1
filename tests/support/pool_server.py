"""The process behind `pool.py`: Megatron-LM imported once, and a fork of it for every rank of a job.

Importing torch and Megatron costs seconds, 20 on a machine with GPUs; a fork costs milliseconds and starts from the
state just after the import, so that no job can see what another left behind. The fork is safe because this process runs
no threads: it never opens a process group, and the math libraries are held to one thread. For ranks on GPUs it must not
touch CUDA either, which cannot be used after a fork. If an import does, only torch is imported here and each rank
imports the rest.

Jobs come over stdin and answers go over stdout, both pickled. Results and output of the ranks are files in the job's
folder. When the test run goes away, stdin ends and so does everything here. A branch is a fork of this process that
takes jobs of its own over a socket.
"""

import argparse
import contextlib
import ctypes
import faulthandler
import functools
import gc
import importlib
import importlib.metadata
import multiprocessing
import os
import pickle
import select
import signal
import socket
import stat
import sys
import time
import traceback
import warnings
from dataclasses import dataclass
from multiprocessing.managers import SyncManager
from pathlib import Path
from typing import Any, BinaryIO

from tests.support.patience import PATIENCE

# Imported on the way through a training run and a checkpoint: paid once here instead of in every rank.
PRELOAD = (
    "numpy.ma",
    "pytest",
    "multiprocessing.managers",
    "multiprocessing.pool",
    "multiprocessing.popen_spawn_posix",
    "torch._subclasses.schema_check_mode",
    "torch.distributed.checkpoint",
    "torch.optim",
    "torch.utils.serialization.config",
    "torch.utils.tensorboard",
    "megatron.core.datasets.helpers",
    "megatron.core.models.mimo",
    "megatron.core.tokenizers.text.models",
    "megatron.training.training",
    "megatron.core.dist_checkpointing.strategies.cached_metadata_filesystem_reader",
    "megatron.core.dist_checkpointing.strategies.torch",
    "megatron.core.dist_checkpointing.strategies.fully_parallel",
    "megatron.balanced.trainer.arguments",
    "megatron.balanced.trainer.data",
    "megatron.balanced.experts.graphs",
    "megatron.balanced.trainer.model",
    "megatron.balanced.trainer.patches",
    "megatron.balanced.trainer.train",
)
# What a server for ranks on GPUs imports even if more would touch CUDA.
FIRST = ("torch", "torch.distributed.checkpoint", "torch.optim", "numpy.ma")
GRACE_SECONDS = 3.0  # after one rank failed, the others may say why they did; they may also wait for it for ever


@dataclass(frozen=True)
class Job:
    """One function on every rank of a world."""

    call: bytes  # pickled (function, args, kwargs); unpickled by the ranks, never here
    world_size: int
    environment: dict[str, str | None]  # "{rank}" in a value is the rank's number; None unsets a variable
    folder: Path
    timeout: float  # seconds
    grace: float = GRACE_SECONDS  # seconds for the other ranks to end after one has failed
    gpus: int = 0  # that the ranks share, in turn; 0 on the CPU device


@dataclass(frozen=True)
class Branch:
    """Asks for a fork of the server that takes jobs over the socket at this path."""

    address: str


@dataclass(frozen=True)
class Outcome:
    """How one rank ended. `error` is the exception where it can be pickled, `report` its traceback."""

    value: Any = None
    error: BaseException | None = None
    report: str | None = None
    at: float = 0.0  # time.monotonic()


def result_file(folder: Path, rank: int) -> Path:
    return folder / f"rank{rank}.result"


def output_file(folder: Path, rank: int) -> Path:
    return folder / f"rank{rank}.output"


def die_with_parent(parent: int) -> None:
    """Have Linux kill this process when its parent ends, however it ends.

    parent: its process id, which the parent itself tells: one that has ended before this call is no longer asked for.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # 1 is PR_SET_PDEATHSIG
        if os.getppid() != parent:
            os._exit(1)


def _call(job: Job) -> Outcome:
    try:
        function, args, kwargs = pickle.loads(job.call)
        return Outcome(value=function(*args, **kwargs), at=time.monotonic())
    except BaseException as error:
        report = traceback.format_exc()
        try:
            pickle.loads(pickle.dumps(error))
        except Exception:  # it cannot be sent, its report can
            return Outcome(report=report, at=time.monotonic())
        return Outcome(error=error, report=report, at=time.monotonic())


def _run_rank(job: Job, rank: int, server: int) -> None:
    """The whole life of one rank. Does not return."""
    os.setpgid(0, 0)
    die_with_parent(server)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    output = os.open(output_file(job.folder, rank), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(output, stream)
    faulthandler.enable()  # a rank that crashes says where
    own = {"RANK": str(rank), "LOCAL_RANK": str(rank % job.gpus if job.gpus else rank)}
    for name, value in (job.environment | own).items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value.replace("{rank}", str(rank))
    outcome = _call(job)
    try:
        data = pickle.dumps(outcome)
    except Exception:
        data = pickle.dumps(Outcome(report=f"the result cannot be pickled\n{traceback.format_exc()}"))
    result = result_file(job.folder, rank)
    result.with_suffix(".partial").write_bytes(data)
    result.with_suffix(".partial").rename(result)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0 if outcome.report is None else 1)


def _end(pids: list[int]) -> None:
    """Kill ranks and what they started, such as data loader workers. None of `pids` may be waited for before."""
    for pid in pids:
        for kill in (os.kill, os.killpg):
            with contextlib.suppress(ProcessLookupError):
                kill(pid, signal.SIGKILL)


def _status(pid: int) -> int | None:
    """The exit status of a child that has ended, else None. It keeps its process id until it is waited for."""
    found = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    return None if found is None else found.si_status if found.si_code == os.CLD_EXITED else -found.si_status


def _start_store(server: int) -> tuple[int, int]:
    """A process with the key-value store that the ranks meet in, as torchrun has one. Returns its id and its port.

    The kernel gives the port, so that no other program can take it between choosing and using it.
    """
    told, tell = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.setpgid(0, 0)
        die_with_parent(server)
        from torch.distributed import TCPStore

        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        os.write(tell, str(store.port).encode())
        os.close(tell)
        while os.getppid() == server:
            time.sleep(1)
        os._exit(0)
    os.close(tell)
    with os.fdopen(told) as pipe:
        return pid, int(pipe.read())


def _run(job: Job, server: int, jobs: BinaryIO) -> dict[int, int]:
    """Run a job to its end or its timeout. Returns the exit status of each rank that ended by itself."""
    others = []
    if "torch" in sys.modules:
        store, port = _start_store(server)
        others.append(store)
        job.environment["MASTER_PORT"] = str(port)
    ranks: dict[int, int] = {}
    for rank in range(job.world_size):
        pid = os.fork()
        if pid == 0:
            _run_rank(job, rank, server)
        ranks[pid] = rank
    ended: dict[int, int] = {}
    deadline = time.monotonic() + job.timeout
    while True:
        is_over = time.monotonic() >= deadline  # before the look, so that the last one is after the deadline
        for pid, rank in ranks.items():
            if rank not in ended and (code := _status(pid)) is not None:
                ended[rank] = code
                if code:
                    deadline = min(deadline, time.monotonic() + job.grace)
        # Nothing is sent while a job runs: if there is something to read, the test run went away.
        if is_over or len(ended) == len(ranks) or select.select([jobs], [], [], 0.01)[0]:
            break
    _end([*ranks, *others])
    for pid in (*ranks, *others):
        os.waitpid(pid, 0)
    return ended


def _look_up_once() -> None:
    """What every run looks up anew, and each rank, being a fork, finds here: Megatron makes a parser of eight hundred
    flags twice in a run and takes their help out of its own source; torch searches all installed packages for a backend
    whenever it makes a process group; each rank hashes the source of this package to compare it with the others'."""
    from megatron.training import arguments
    from megatron.training.argument_utils import ArgumentGroupFactory

    from megatron.balanced.trainer import agreement

    known: dict[type, dict[str, str]] = {}
    read = ArgumentGroupFactory._get_field_docstrings

    def docstrings(self: Any, src_cfg_class: type) -> dict[str, str]:
        if src_cfg_class not in known:
            known[src_cfg_class] = read(self, src_cfg_class)
        return known[src_cfg_class]

    ArgumentGroupFactory._get_field_docstrings = docstrings
    make = arguments.add_megatron_arguments
    made = [make(argparse.ArgumentParser(allow_abbrev=False)) for _ in range(2)]

    def add_megatron_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        if not made or parser.allow_abbrev or not parser.add_help:
            return make(parser)
        parser.__dict__.update(made.pop().__dict__ | {"prog": parser.prog, "description": parser.description})
        return parser

    arguments.add_megatron_arguments = add_megatron_arguments
    agreement._source = functools.cache(agreement._source)
    agreement._source()
    importlib.metadata.entry_points = functools.cache(importlib.metadata.entry_points)
    importlib.metadata.entry_points(group="torch.distributed.backends")


def _fork_managers() -> None:
    """Each rank that saves a checkpoint starts a process for a queue, which imports torch for five seconds when the
    first result is put. Fork the rank in its place."""
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    def queue_of_results(mp_mode: str = "fork") -> Any:
        if filesystem_async._results_queue is None:
            manager = SyncManager(ctx=multiprocessing.get_context("fork"))
            manager.start(_leave_sockets, (os.getpid(),))
            filesystem_async._results_queue = manager.Queue()
        return filesystem_async._results_queue

    filesystem_async.get_write_results_queue = queue_of_results


def _leave_sockets(rank: int) -> None:
    """Close the sockets of `rank`, whose fork this process is: others see by theirs that the rank was killed."""
    die_with_parent(rank)
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                os.close(int(name))


def shrink_mock_data() -> None:
    """Megatron's mock dataset has 100,000 documents, whose samples every rank shuffles for 0.3 s. Take fewer."""
    from megatron.core.datasets.gpt_dataset import MockGPTLowLevelDataset

    MockGPTLowLevelDataset.size = 2000


def _be_patient() -> None:
    """Have ranks wait as long for the job's store, and for others that fail as well, as tests do. What never comes, as
    where one rank fails alone, needs a test that sets less."""
    from megatron.balanced.trainer import rendezvous
    from megatron.balanced.trainer.watchdog import failure

    rendezvous._CONNECT_SECONDS = rendezvous._STORE_SECONDS = PATIENCE
    failure._START_SECONDS = failure._PATIENCE_SECONDS = failure._LINGER_SECONDS = PATIENCE
    failure._MOST_SECONDS = 2 * PATIENCE


def _preload(before: list[str], device: str) -> None:
    begin = time.monotonic()
    if device == "cpu":
        from megatron.balanced.cpu.device import use_cpu

        use_cpu()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of what is not installed; the same on every import
        for module in before:
            importlib.import_module(module).install()
        for module in PRELOAD:
            importlib.import_module(module)
    _look_up_once()
    _fork_managers()
    if device == "cpu":
        _be_patient()
    shrink_mock_data()
    _pretend(begin)
    _settle()


def _pretend(begin: float) -> None:
    """For a rehearsal: have imports since `begin` take as long as on another machine."""
    time.sleep(max(0.0, float(os.environ.get("POOL_IMPORT_SECONDS", 0)) - (time.monotonic() - begin)))


def _settle() -> None:
    gc.collect()
    gc.freeze()  # or a collection in a rank would copy every page of this process


def cuda_is_touched() -> bool:
    """Whether this process has initialized CUDA's driver, after which its forks cannot use it."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:  # there is none
        return False
    return driver.cuDeviceGetCount(ctypes.byref(ctypes.c_int())) != 3  # CUDA_ERROR_NOT_INITIALIZED


_TOUCHED = 17  # exit code of a server whose imports touched CUDA


def _preload_for_gpus(before: list[str], server: int) -> int:
    """Import what ranks on GPUs need in a fork, which becomes the server unless CUDA was touched on the way. In that
    case this process does, with torch alone. Returns the id of the process that is the server."""
    for module in FIRST:
        importlib.import_module(module)
    fork = os.fork()
    if fork == 0:
        die_with_parent(server)
        _preload(before, "cuda")
        if cuda_is_touched():
            os._exit(_TOUCHED)
        return os.getpid()
    _, status = os.waitpid(fork, 0)
    if os.waitstatus_to_exitcode(status) != _TOUCHED:
        os._exit(0)  # it was the server, and its work is done
    print("an import touches CUDA: each rank imports Megatron-LM itself", file=sys.stderr, flush=True)
    _settle()
    return server


def main(parent: int) -> None:
    server = os.getpid()
    die_with_parent(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the test run, which then ends this process
    jobs: BinaryIO = sys.stdin.buffer
    answers: BinaryIO = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)

    device, before = sys.argv[1], sys.argv[2:]
    if device == "cuda":
        server = _preload_for_gpus(before, server)
    elif device == "cpu":
        _preload(before, device)
    elif before:
        for module in before:
            importlib.import_module(module).install()
        _settle()
    branches: list[int] = []
    _tell(answers, server)
    while True:
        try:
            request = pickle.load(jobs)
        except EOFError:
            return
        if isinstance(request, Job):
            _tell(answers, _run(request, server, jobs))
            continue
        branches = [pid for pid in branches if os.waitpid(pid, os.WNOHANG)[0] == 0]
        if branch := os.fork():
            branches.append(branch)
            continue
        die_with_parent(server)
        server, branches = os.getpid(), []
        connection = socket.socket(socket.AF_UNIX)
        connection.connect(request.address)
        jobs, answers = connection.makefile("rb"), connection.makefile("wb")
        _tell(answers, server)


def _tell(answers: BinaryIO, what: Any) -> None:
    pickle.dump(what, answers)
    answers.flush()
