"""CUDA graphs of a layer's attention on the CPU device: `captured_iterations` for captures by `capture_begin`.

Graphs share one memory pool, so when one is replayed, all memory of the others is overwritten here, with NaN. What
allocates memory is no node of a graph. `alive` are the graphs that there are, `captures` and `replays` counts.
"""

import weakref
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils._pytree import tree_iter

from tests.support.stand_ins import captured_iterations
from tests.support.stand_ins.captured_iterations import Graph, _Capture, _capturing, _memory, _noted_wait

__all__ = ["alive", "counted", "install"]

# They read or write rows of a tensor, of which messages under way may have others.
_OF_ROWS = {
    f"aten::{name}" for name in ("index_select", "index.Tensor", "index_put_", "index_add_", "_index_put_impl_")
}

alive: weakref.WeakSet["_Graph"] = weakref.WeakSet()
counted: Counter[str] = Counter()


class _Graph(Graph):
    def __init__(self, keep_graph: bool = False) -> None:
        super().__init__(keep_graph)
        alive.add(self)

    def check(self, func: Any, uses: Any) -> None:
        if func.name() not in _OF_ROWS and not _allocates(func):
            super().check(func, uses)

    def capture_begin(self, pool: Any, capture_error_mode: str) -> None:
        assert not _capturing and capture_error_mode == "thread_local"
        _capturing.append(self)
        self._mode: Any = _Capture(self)
        self._mode.__enter__()

    def capture_end(self) -> None:
        self._mode.__exit__(None, None, None)
        del self._mode
        _capturing.clear()
        self.undo()
        counted["captures"] += 1

    def replay(self) -> None:
        assert not _capturing
        for other in alive:
            if other is not self:
                for memory in other.made_memory():
                    memory.fill_(255)
        super().replay()
        counted["replays"] += 1

    def made_memory(self) -> Iterator[torch.Tensor]:
        """What the capture has allocated, as bytes."""
        found = {}
        for *_, result in self.operators:
            for value in tree_iter(result):
                if isinstance(value, torch.Tensor) and _memory(value) in self._made:
                    found[_memory(value)] = value.untyped_storage()
        return (torch.empty(0, dtype=torch.uint8).set_(storage) for storage in found.values())

    def run_again(self, func: Any, args: tuple, kwargs: dict, result: Any) -> None:
        if not _allocates(func):
            super().run_again(func, args, kwargs, result)


def _allocates(func: Any) -> bool:
    """Whether an operator only allocates memory."""
    return func.name().startswith(("aten::empty", "aten::new_empty"))


def install() -> None:
    """Give this process, whose device is the CPU, such graphs, for good."""
    torch.cuda.CUDAGraph = _Graph
    torch.cuda.graph_pool_handle = lambda: (0, 0)
    for work in (torch.distributed.Work, torch._C._distributed_c10d.FakeWork):
        work.wait = _noted_wait
    for name in ("tolist", "numpy"):
        setattr(torch.Tensor, name, captured_iterations._not_captured(name))
