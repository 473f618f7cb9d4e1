"""The ranks of a job as the launcher's environment describes them, and the key-value store in which they meet.

The store is torchrun's if there is one, otherwise that of rank 0, which process groups use later. Megatron-LM opens it
after minutes of work. Here it is opened first, so that ranks can compare their flags and code (`agreement`) and agree
on one report when a job fails (`watchdog`).

torchrun keeps its store when it restarts the ranks (`--max-restarts`), with all that the dead ranks wrote. A rank that
reads the address of a dead rank waits for it until a timeout. So each start of the job has a name, and all keys begin
with that name, also those of process groups.
"""

import os
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from datetime import timedelta

import torch.distributed as dist

from balancing.threads import start_thread

__all__ = [
    "has_store",
    "hosts_store",
    "join_job",
    "keeper_of_store",
    "open_store",
    "rank",
    "store_of_process_groups",
    "wait_for",
    "world_size",
]

_START_SECONDS = 600.0  # for rank 0 to start; torch waits as long
_CONNECT_SECONDS = 60.0
_STORE_SECONDS = 10.0  # for one answer of the store

_hosted: list[dist.Store] = []  # keeps a store of this process alive as long as the process
_joined: list[dist.Store] = []  # the connection of `join_job`
_start: list[str] = []  # the name of this start of the job
_asking = threading.Lock()
_exits = threading.Event()  # this process is about to exit


def rank() -> int:
    return _read("RANK", 0)


def world_size() -> int:
    return _read("WORLD_SIZE", 1)


def _read(name: str, default: int) -> int:
    """An integer from the environment; `default` if it is missing or not an integer, which `join_job` refuses."""
    text = os.environ.get(name, "")
    return int(text) if text.isascii() and text.isdigit() else default


def join_job(*, alone: bool = False) -> None:
    """Check the launcher's environment, set that of a single rank if there is none, and open the job's store.

    alone: for a dry run of one process, whose other ranks are assumed; there is no store then.
    Raises ValueError for variables that are missing, not integers, or contradict each other, and for a store that
    cannot be opened.
    """
    needed = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    missing = [name for name in needed if name not in os.environ]
    if "WORLD_SIZE" in os.environ and missing:
        raise ValueError(
            f"WORLD_SIZE is {os.environ['WORLD_SIZE']}, but {' and '.join(missing)} not set; start with torchrun, or "
            "with scripts/slurm under SLURM"
        )
    if "WORLD_SIZE" not in os.environ:
        os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}  # any port, since no other rank connects to it
    world = _number("WORLD_SIZE", 1)
    _number("RANK", 0, world - 1, f" of WORLD_SIZE {world}")
    if "LOCAL_RANK" in os.environ:
        _number("LOCAL_RANK", 0)
    if alone or world == 1:
        return
    port = _number("MASTER_PORT", 1, 65535)
    address = os.environ["MASTER_ADDR"]
    try:
        if rank() == 0 and not _is_launchers() and not _hosted:
            # multi_tenant: the process groups of this process open the same store again.
            _hosted.append(dist.TCPStore(address, port, is_master=True, wait_for_workers=False, multi_tenant=True))
        _joined[:] = [_connect(_START_SECONDS)]
        _name_of_start(_joined[0])
    except dist.DistError as error:
        in_use = "EADDRINUSE" in str(error) or "already in use" in str(error)
        reason = "the port is in use; choose another" if in_use else f"{_first_line(error)}; does rank 0 run there?"
        raise ValueError(f"MASTER_ADDR {address}, MASTER_PORT {port}: {reason}") from error


def _number(name: str, least: int, most: int | None = None, among: str = "") -> int:
    text = os.environ[name]
    bounds = f"from {least} to {most}" if most is not None else f"of at least {least}"
    if not text.isascii() or not text.isdigit() or int(text) < least or (most is not None and int(text) > most):
        raise ValueError(
            f"environment variable {name}={text!r} must be a whole number {bounds}{among}; start "
            "with torchrun, or with scripts/slurm under SLURM"
        )
    return int(text)


def _first_line(error: BaseException) -> str:
    return str(error).splitlines()[0].rstrip(".")


def _is_launchers() -> bool:
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def has_store() -> bool:
    """Whether the job has a store that can be opened: a launcher's, or any after `join_job`."""
    return world_size() > 1 and (_is_launchers() or bool(_joined))


def _connect(seconds: float) -> dist.TCPStore:
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    return dist.TCPStore(address, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=seconds))


def open_store(name: str, *, anew: bool = False) -> dist.Store:
    """The job's store. Raises dist.DistError if it does not answer.

    name: a prefix of all keys.
    anew: open a new connection, since a thread that waits for an answer blocks others on the same connection.
    """
    store = _connect(_CONNECT_SECONDS) if anew or not _joined else _joined[0]
    store.set_timeout(timedelta(seconds=_STORE_SECONDS))
    return dist.PrefixStore(f"{name}/{_name_of_start(store)}", store)


def store_of_process_groups(timeout: timedelta) -> dist.Store | None:
    """The store for process groups; None for the one that torch opens, which no other start has used."""
    if world_size() == 1 or not _is_launchers():
        return None
    store = _connect(_START_SECONDS)
    store.set_timeout(timeout)
    return dist.PrefixStore(f"process groups/{_name_of_start(store)}", store)


def _name_of_start(store: dist.Store) -> str:
    """The name of this start of the job. All its ranks have the same name, and no earlier start had it.

    Rank 0 creates it and sends it to each rank that asks. A rank asks with a unique key, so that only a living rank 0
    can answer. torchrun's count of restarts cannot be the name: each node has a count of its own.

    Raises dist.DistError if rank 0 does not answer.
    """
    with _asking:
        if not _start:
            if not _is_launchers():  # the store ends with its job
                _start.append("0")
            elif rank() == 0:
                _start.append(uuid.uuid4().hex)
                start_thread(_tell, _start[0], name="start", end=_exits.set)
            else:
                word = f"start/{uuid.uuid4().hex}"
                store.append("start/asked", f"{word} ")
                if not wait_for(store, [word], _START_SECONDS):
                    raise dist.DistStoreError(f"rank 0 did not start within {_START_SECONDS:.0f} s")
                _start.append(store.get(word).decode())
                store.add(f"start/{_start[0]}", 1)
        return _start[0]


def _tell(name: str) -> None:
    """Tell the name of this start to all other ranks. Returns when all have it, or when the store has ended."""
    told = 0
    try:
        store = _connect(_CONNECT_SECONDS)
        while not _exits.is_set() and store.add(f"start/{name}", 0) < world_size() - 1:
            asked = store.get("start/asked").split() if store.check(["start/asked"]) else []
            for word in asked[told:]:
                store.set(word.decode(), name)
            told = len(asked)
            _exits.wait(0.05)
    except dist.DistError:
        return


def hosts_store() -> bool:
    """Whether the store ends with this process."""
    return bool(_hosted)


def keeper_of_store() -> str:
    """The process that has the store, in words."""
    return "torchrun on the first node" if _is_launchers() else "rank 0"


def wait_for(store: dist.Store, keys: Sequence[str], seconds: float, look: Callable[[], object] = lambda: None) -> bool:
    """Wait until all keys are set, at most `seconds`. Returns whether they are. torch's own wait warns at a timeout.

    look: called about once a second.
    """
    started = time.monotonic()
    pause = 0.02
    while not store.check(list(keys)):
        if time.monotonic() - started > seconds:
            return False
        if pause == 1.0:
            look()
        time.sleep(pause)
        pause = min(1.0, 1.5 * pause)
    return True
