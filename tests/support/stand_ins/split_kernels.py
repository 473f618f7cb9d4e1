"""The kernels that split tokens on a GPU, on the CPU device: NumPy's split in their place, which gives the same counts.

To a checker of waits and to a captured graph it is one kernel, which the host does not wait for.
"""

from collections.abc import Callable

import torch

from balancing.experts.placement import ReplicaPlacement
from balancing.experts.split.split import Splitter

__all__ = ["install"]


def install(as_kernel: Callable[..., torch.Tensor] | None = None) -> None:
    """Split with these kernels in this process, for good.

    as_kernel: runs a function of tensors as one kernel of a graph that is captured; None calls it.
    """
    from balancing.experts.split import split_kernel

    run = as_kernel or (lambda kernel, *tensors: kernel(*tensors))

    class SplitKernels:
        def __init__(self, placement: ReplicaPlacement, classes: int, sweeps: int, tables: torch.Tensor) -> None:
            self._splitter = Splitter(placement, sweeps=sweeps or None)

        def __call__(self, load: torch.Tensor) -> torch.Tensor:
            return run(self._split, load)

        def _split(self, load: torch.Tensor) -> torch.Tensor:
            served = torch.from_numpy(self._splitter(load.numpy())).contiguous()
            return load.new_empty(served.shape).copy_(served)

    split_kernel.SplitKernels = SplitKernels
    split_kernel.kernels_work = lambda ranks, device, late_slots=0: True
