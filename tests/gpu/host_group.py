"""Process groups whose messages pass through the host: tensors of a GPU are copied to the host, sent over gloo, and
copied back where a work is waited for. So ranks talk where NCCL does not; order on streams is trivial then, and speed
means nothing.
"""

import inspect
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_leaves, tree_map

__all__ = ["use_host_groups"]

_NAME = "hostgroup"
# As torch 2.14 calls operations, and their names before.
_RENAMED = {
    "all_gather_single": "_allgather_base",
    "all_gather_single_coalesced": "allgather_into_tensor_coalesced",
    "all_to_all_single": "alltoall_base",
    "reduce_scatter_single": "_reduce_scatter_base",
    "reduce_scatter_single_coalesced": "reduce_scatter_tensor_coalesced",
}
_OF_ONE = {
    "allgather_into_tensor_coalesced": "_allgather_base",
    "reduce_scatter_tensor_coalesced": "_reduce_scatter_base",
}
_OPERATIONS = (
    *_RENAMED,
    "allreduce", "allreduce_coalesced", "reduce", "broadcast", "allgather", "_allgather_base", "allgather_coalesced",
    "allgather_into_tensor_coalesced", "gather", "scatter", "reduce_scatter", "_reduce_scatter_base",
    "reduce_scatter_tensor_coalesced", "alltoall", "alltoall_base", "send", "recv", "barrier",
)  # fmt: skip


class _Work:
    """What was started: `wait` lets the results be read. finish: waits for them and gives them, as on the host."""

    def __init__(self, outputs: list[torch.Tensor], finish: Callable[[], list[torch.Tensor]]) -> None:
        self._outputs, self._finish = outputs, finish
        self._waited = False

    def wait(self, timeout: Any = None) -> bool:
        if not self._waited:
            self._waited = True
            for output, host in zip(self._outputs, self._finish(), strict=True):
                if output is not host:
                    output.detach().copy_(host)
        return True

    def is_completed(self) -> bool:
        return self._waited


class HostGroup(dist.ProcessGroup):
    """gloo: the group that carries messages."""

    def __init__(self, rank: int, size: int, gloo: Any) -> None:
        super().__init__(rank, size)
        self._gloo = gloo

    supports_coalescing = False

    def getBackendName(self) -> str:
        return _NAME

    def _get_backend(self, device: Any) -> "HostGroup":
        return self

    @property
    def group_name(self) -> str:
        return dist.distributed_c10d._world.pg_names[self]

    pg_name = group_name

    def _start(self, name: str, *given: Any) -> _Work:
        outputs = [] if name in ("send", "barrier") else [x for x in tree_leaves(given[0]) if torch.is_tensor(x)]
        host = tree_map(lambda x: x.detach().cpu().contiguous() if torch.is_tensor(x) else x, given)
        averaged = name != "send" and getattr(given[-1], "reduceOp", None) == dist.ReduceOp.AVG
        if averaged:  # which gloo does not have
            given[-1].reduceOp = dist.ReduceOp.SUM
        work = self._carry(name, *host)
        arrived = [] if not outputs else [x for x in tree_leaves(host[0]) if torch.is_tensor(x)]

        def finish() -> list[torch.Tensor]:
            for one in work if isinstance(work, list) else [work]:
                one.wait()
            for tensor in arrived if averaged else ():
                tensor.div_(self.size())
            return arrived

        return _Work(outputs, finish)

    def _carry(self, name: str, *given: Any) -> Any:
        """Start an operation over gloo, by the name that this torch's gloo has for it."""
        known = name if hasattr(self._gloo, name) else _RENAMED.get(name, name)
        if hasattr(self._gloo, known):
            return getattr(self._gloo, known)(*given)
        single = getattr(self._gloo, _OF_ONE[known])  # before torch 2.14
        outputs, inputs, *options = given
        return [single(*pair, *options) for pair in zip(outputs, inputs, strict=True)]


def _method(name: str) -> Callable:
    return lambda self, *given, **named: self._start(name, *given, *named.values())


for _operation in _OPERATIONS:
    setattr(HostGroup, _operation, _method(_operation))


def use_host_groups() -> None:
    """Have all process groups of this process that are made from now on be of this kind."""

    def make(store: Any, rank: int, size: int, timeout: timedelta) -> HostGroup:
        return HostGroup(rank, size, dist.ProcessGroupGloo(store, rank, size, timeout=timeout))

    dist.Backend.register_backend(_NAME, make, devices=["cpu", "cuda"])
    from megatron.balanced.cpu import gloo
    from megatron.balanced.cpu.device import is_cpu

    for name in ("init_process_group", "new_group"):
        original = inspect.unwrap(getattr(dist, name))
        parameters = inspect.signature(original)

        def made(*args: Any, _make: Any = original, _of: Any = parameters, _name: str = name, **kwargs: Any) -> Any:
            given = _of.bind(*args, **kwargs).arguments
            given.pop("pg_options", None)
            given.pop("device_id", None)
            if _name == "init_process_group" or given.get("backend") != "gloo":
                given["backend"] = _NAME
            return _make(**given)

        setattr(dist, name, made)
    if not is_cpu():  # which has them: what Megatron-LM uses and gloo lacks
        for name in gloo.__all__:
            if name != "make_group":
                setattr(dist, name, getattr(gloo, name)(getattr(dist, name)))
