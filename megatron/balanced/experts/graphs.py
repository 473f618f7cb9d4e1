"""What CUDA graphs may hold beside replicas of experts.

A graph repeats the kernels that it captured, on the same addresses and shapes and without any Python. With
`--cuda-graph-impl transformer_engine`, attention, dense layers and routers can be part of one. Everything behind the
router cannot: each micro-batch is split anew over the instances of its experts, the host plans from its load, and
transfers of replicas start there.

With `--cuda-graph-impl full_iteration` one graph holds all forward and backward passes of an iteration. The split of
each micro-batch is part of it, since it is computed on the device, and so are the transfers of replicas. The placement
is not: it is one of the host's decisions that the graph repeats. So it changes every plan_interval iterations,
and the graph is captured again if it did.
Megatron-LM runs --cuda-graph-warmup-steps iterations without a graph before a capture; that is what a change costs.
"""

from collections.abc import Callable, Iterable
from typing import Any

from balancing.experts.split.placed_split import kernels_split

__all__ = ["captures_iterations", "check_kernels", "graph_of_iterations"]


def captures_iterations(model: Any) -> bool:
    """Whether one graph holds all passes of an iteration. model: its config, or arguments that describe it."""
    return getattr(model, "cuda_graph_impl", "none") == "full_iteration"


def check_kernels(layers: Iterable[Any]) -> None:
    """Raise ValueError where the host would divide the tokens of a layer, and a graph of iterations could not.

    layers: MoE layers with replicas (`BalancedMoELayer`), complete and on their device.
    """
    if not all(kernels_split(layer.placement, layer.device) for layer in layers):
        raise ValueError(
            "--balance-experts is incompatible with --cuda-graph-impl full_iteration where Triton's kernels, which "
            "divide tokens on the GPU, do not work (a warning says why); use --cuda-graph-impl none"
        )


def graph_of_iterations(schedule: Any, before: Callable[[], None]) -> Any:
    """Megatron-LM's `FullCudaGraphWrapper`, which captures and replays whole iterations, and from now on calls `before`
    at the beginning of what it captures or runs without a graph.

    schedule: the schedule of micro-batches in Megatron-LM's wrappers, of which one captures.
    """
    from megatron.core.full_cuda_graph import FullCudaGraphWrapper  # with torch's device, which flags choose

    while not isinstance(schedule, FullCudaGraphWrapper):
        schedule = schedule.forward_backward_func
    run = schedule.forward_backward_func

    def forward_backward_func(*args: Any, **kwargs: Any) -> Any:
        before()
        return run(*args, **kwargs)

    schedule.forward_backward_func = forward_backward_func
    return schedule
