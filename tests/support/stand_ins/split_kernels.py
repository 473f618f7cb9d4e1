"""The kernel that splits tokens on a GPU, on the CPU device: NumPy's split in its place, which gives the same counts.

To a checker of waits and to a captured graph it is one kernel, which the host does not wait for.
"""

from collections.abc import Callable
from typing import Any

import torch

from balancing.experts.placement import ReplicaPlacement
from balancing.experts.split.placed_split import SplitTables, place_all
from balancing.experts.split.routes import route
from balancing.experts.split.split import Splitter

__all__ = ["install"]


def install(as_kernel: Callable[..., Any] | None = None) -> None:
    """Split with these kernels in this process, for good.

    as_kernel: runs a function of tensors as one kernel of a graph that is captured; None calls it.
    """
    from balancing.experts.split import split_kernel

    run = as_kernel or (lambda kernel, *tensors: kernel(*tensors))

    class SplitKernels:
        route = staticmethod(route)

        def __init__(self, placement: ReplicaPlacement, classes: int, sweeps: int, tables: torch.Tensor) -> None:
            on_host = SplitTables(placement, None)
            on_host.splitter = Splitter(placement, sweeps=sweeps or None)
            self._split = place_all([on_host], None)[0].split

        def __call__(self, load: torch.Tensor, *how: Any) -> tuple[torch.Tensor, ...]:
            def kernel(load: torch.Tensor) -> tuple[torch.Tensor, ...]:
                split = self._split(load.numpy(), *how)
                fields = split if split.late is not None else split[:4]
                return tuple(load.new_empty(x.shape).copy_(torch.as_tensor(x)) for x in fields)

            return run(kernel, load)

    split_kernel.SplitKernels = SplitKernels
    split_kernel.kernels_work = lambda ranks, device, late_slots=0: True
