"""Megatron-LM's wrappers of a schedule: one captures all passes of an iteration in one CUDA graph, and replays it
(`--cuda-graph-impl full_iteration`); another stashes activations of experts, and runs an iteration again if a rank got
too many tokens (`--moe-expert-rank-capacity-factor`). Both remember where layers are.

Checks of flags read this module before these have chosen the device, so functions import `megatron.core`.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

__all__ = [
    "captures_iterations",
    "captures_next",
    "drop_graph",
    "graph_of_iterations",
    "graph_wrapper",
    "on_capture_stream",
    "renew_stash",
]


def captures_iterations(model: Any) -> bool:
    """Whether one graph holds all passes of an iteration. model: its config, or arguments that describe it."""
    return getattr(model, "cuda_graph_impl", "none") == "full_iteration"


def graph_wrapper(schedule: Any) -> Any:
    """The `FullCudaGraphWrapper` among Megatron-LM's wrappers of the schedule of micro-batches."""
    from megatron.core.full_cuda_graph import FullCudaGraphWrapper

    while not isinstance(schedule, FullCudaGraphWrapper):
        schedule = schedule.forward_backward_func
    return schedule


def captures_next(wrapper: Any) -> bool | None:
    """Whether the next iteration of training is captured; False if a graph is replayed, None if it runs without one."""
    if wrapper.curr_iter("training") < wrapper.cuda_graph_warmup_steps:
        return None
    return wrapper.cuda_graph["training"] is None


def graph_of_iterations(schedule: Any, chunks: Sequence[Any], before: Callable[[], None] = lambda: None) -> None:
    """From now on the `graph_wrapper` calls `before` as each iteration begins that it captures or runs without a graph,
    and such an iteration gathers all parameters that are gathered in forward passes.

    schedule: the schedule of micro-batches, in Megatron-LM's wrappers.
    chunks: the model chunks of this rank, in `DistributedDataParallel`.
    """
    wrapper = graph_wrapper(schedule)
    run = wrapper.forward_backward_func

    def forward_backward_func(*args: Any, **kwargs: Any) -> Any:
        for ddp in chunks:
            if ddp.ddp_config.overlap_param_gather:
                # A validation or a save has gathered parameters already; each replay must gather them.
                ddp.reset_param_sync_dispatch_state()
        before()
        return run(*args, **kwargs)

    wrapper.forward_backward_func = forward_backward_func


def drop_graph(schedule: Any, of: str | None = None) -> None:
    """Drop the graph of "training" or "validation", or else both. It is captured again after as many iterations without
    a graph as at the start. All ranks call it together."""
    graph_wrapper(schedule).reset_cuda_graph(of)


def renew_stash(schedule: Any) -> None:
    """Layers have moved: let Megatron-LM find those whose tokens it counts, and record anew which activations it
    stashes, in what order. Without its `PagedStashRunner`, do nothing."""
    from megatron.core.transformer.moe.paged_stash import PagedStashManager, PagedStashRunner

    if isinstance(schedule, PagedStashRunner):
        PagedStashManager.STASH_MGR = None
        names = ("config", "copy_main_params", "model", "optimizer", "forward_backward_func")
        PagedStashRunner.__init__(schedule, *(getattr(schedule, name) for name in names))


@contextmanager
def on_capture_stream(model: Any) -> Iterator[None]:
    """Where Megatron-LM wraps model chunks for data parallelism. The nodes that accumulate gradients keep the stream on
    which they are made, and a capture of iterations allows no other than its own. model: its config."""
    if not captures_iterations(model):
        yield
        return
    from megatron.core.full_cuda_graph import get_shared_capture_stream

    stream, current = get_shared_capture_stream(), torch.cuda.current_stream()
    stream.wait_stream(current)
    with torch.cuda.stream(stream):
        yield
    current.wait_stream(stream)
