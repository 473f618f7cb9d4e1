"""Megatron-LM's wrapper of a schedule that captures all passes of an iteration in one CUDA graph, and replays it
(`--cuda-graph-impl full_iteration`)."""

from typing import Any

__all__ = ["captures_next", "graph_wrapper"]


def graph_wrapper(schedule: Any) -> Any:
    """The `FullCudaGraphWrapper` among Megatron-LM's wrappers of the schedule of micro-batches."""
    from megatron.core.full_cuda_graph import FullCudaGraphWrapper  # only after flags have chosen the device

    while not isinstance(schedule, FullCudaGraphWrapper):
        schedule = schedule.forward_backward_func
    return schedule


def captures_next(wrapper: Any) -> bool | None:
    """Whether the next iteration of training is captured; False if a graph is replayed, None if it runs without one."""
    if wrapper.curr_iter("training") < wrapper.cuda_graph_warmup_steps:
        return None
    return wrapper.cuda_graph["training"] is None
