"""The device that `--device auto` chose, the same on all ranks.

Each process chooses before any process group exists. If one node has no CUDA, its ranks would wait on gloo for others
that wait on NCCL. So ranks first tell each other in the job's key-value store: torchrun's, or the one that the process
groups of all ranks will meet in, which then is only opened earlier.
"""

import os
import socket
from datetime import timedelta

import torch.distributed as dist

__all__ = ["agree_on_device"]

_START_SECONDS = 600.0  # for all ranks to start; torch waits as long
_READ_SECONDS = 30.0  # that the rank with the store stays, so that others can read it

_stores: list[dist.Store] = []  # a store that this process holds lives as long as the process


def agree_on_device(device: str) -> None:
    """Raise ValueError, the same one on all ranks, unless all of them chose `device`. Does nothing for a single rank.

    Raises RuntimeError if a rank does not start within ten minutes.
    """
    rank, world_size = (int(os.environ.get(name, default)) for name, default in (("RANK", "0"), ("WORLD_SIZE", "1")))
    if world_size == 1:
        return
    store = dist.PrefixStore(f"device/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", _open_store(rank))
    store.set(str(rank), f"{device} {socket.gethostname()}")
    try:
        store.wait([str(other) for other in range(world_size)], timedelta(seconds=_START_SECONDS))
    except dist.DistStoreError as error:
        raise RuntimeError(f"not all of {world_size} ranks started within {_START_SECONDS:.0f} s") from error
    chosen = [store.get(str(other)).decode().split() for other in range(world_size)]
    store.set(f"read/{rank}", "")
    without = [other for other, (its, _) in enumerate(chosen) if its == "cpu"]
    if not without or len(without) == world_size:
        return
    if rank == 0:  # its end is the store's
        others = [f"read/{other}" for other in range(world_size)]
        store.wait(others, timedelta(seconds=_READ_SECONDS))
    hosts = sorted({host for its, host in chosen if its == "cpu"})
    raise ValueError(
        f"--device auto finds CUDA on {world_size - len(without)} of {world_size} ranks, but not on rank(s) "
        f"{', '.join(map(str, without))} ({', '.join(hosts)}); leave these hosts out, or use --device cpu"
    )


def _open_store(rank: int) -> dist.Store:
    has_launchers_store = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    store = dist.TCPStore(
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        is_master=rank == 0 and not has_launchers_store,
        wait_for_workers=False,
        multi_tenant=True,  # process groups of this process open the same store again
        timeout=timedelta(seconds=_START_SECONDS),
    )
    _stores.append(store)
    return store
