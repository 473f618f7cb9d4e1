"""CUDA graphs together with replicas of experts.

A graph repeats the kernels that it captured, with the same addresses and shapes and without any Python. With
`--cuda-graph-impl transformer_engine`, graphs may contain attention, dense layers and routers. They cannot contain what
follows the router: each micro-batch is split over the instances of its experts, the host plans from its load, and
transfers of replicas start there.

With `--cuda-graph-impl full_iteration`, one graph holds all forward and backward passes of an iteration. It contains
the split of each micro-batch, since the device computes it, and the transfers of replicas. The host decides the
placement, so the graph repeats the one that it was captured with. So the placement changes only every plan_interval
iterations. If it has changed, the graph is captured again, which costs the --cuda-graph-warmup-steps iterations that
Megatron-LM runs without a graph before a capture.
"""

from collections.abc import Callable, Iterable
from typing import Any

from balancing.experts.split.placed_split import kernels_split
from megatron.balanced.shared.captured_schedule import graph_wrapper

__all__ = ["captures_iterations", "check_kernels", "graph_of_iterations"]


def captures_iterations(model: Any) -> bool:
    """Whether one graph holds all passes of an iteration. model: its config, or arguments that describe it."""
    return getattr(model, "cuda_graph_impl", "none") == "full_iteration"


def check_kernels(layers: Iterable[Any]) -> None:
    """Raise ValueError if the host would split the tokens of a layer, which a graph of iterations cannot contain.

    layers: MoE layers with replicas (`BalancedMoELayer`), complete and on their device.
    """
    if not all(kernels_split(layer.placement, layer.device) for layer in layers):
        raise ValueError(
            "--balance-experts with --cuda-graph-impl full_iteration splits tokens with Triton's kernels, which do not "
            "work here (a warning says why); use --cuda-graph-impl none"
        )


def graph_of_iterations(schedule: Any, before: Callable[[], None]) -> Any:
    """Megatron-LM's `FullCudaGraphWrapper`, which captures and replays whole iterations. From now on it calls `before`
    at the beginning of each iteration that it captures or runs without a graph.

    schedule: the schedule of micro-batches, in Megatron-LM's wrappers.
    """
    schedule = graph_wrapper(schedule)
    run = schedule.forward_backward_func

    def forward_backward_func(*args: Any, **kwargs: Any) -> Any:
        before()
        return run(*args, **kwargs)

    schedule.forward_backward_func = forward_backward_func
    return schedule
