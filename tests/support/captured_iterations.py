"""A CUDA graph of whole iterations on the CPU device, and what its kernels are made of.

`Graph` extends `tests.support.cuda_graphs` by what a graph of an iteration holds beside operators: collectives and
messages, which a replay starts again, and kernels of packages outside of torch (`as_kernel`). As on a GPU, a capture
changes no memory that it did not make, since nothing runs, and it fails where the host reads numbers of the device.

Two of these kernels: HybridEP's, into a buffer of a given number of rows, and the fused grouped MLP of Transformer
Engine's operations, for which the host need not know how many rows an expert has.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_map

from tests.support.cuda_graphs import _READS_DEVICE, CUDAGraph, _alias, _returns, _tensors
from tests.support.flex_buffers import HybridEPBuffer, install_flex

__all__ = ["Graph", "as_kernel", "captured", "install"]

captured: list["Graph"] = []  # by this process
_capturing: list["Graph"] = []


def _memory(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


class Graph(CUDAGraph):
    def __init__(self, keep_graph: bool = False) -> None:
        super().__init__(keep_graph)
        self.messages = 0  # collectives and messages in the graph
        self._made: set[int] = set()  # memory
        self._before: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # what was there before, of other memory
        # No test draws random numbers in a graph, and Transformer Engine looks for this in the class.
        self.register_generator_state = lambda generator: None

    def keep(self, tensor: torch.Tensor) -> None:
        """Note what is in memory that the capture is about to write."""
        if _memory(tensor) not in self._made and _memory(tensor) not in self._before:
            whole = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
            self._before[_memory(tensor)] = whole, whole.clone()

    def made(self, result: Any) -> None:
        self._made.update(_memory(tensor) for tensor in _tensors(result))

    def undo(self) -> None:
        for whole, values in self._before.values():
            whole.copy_(values)

    @torch.no_grad()
    def replay(self) -> None:
        self.begin_replay()
        flying: list[tuple[Any, set[int]]] = []  # messages, and the memory that they read or write
        before: Any = None
        for func, args, kwargs, result in self.operators:
            # Messages between two ranks start together: a rank that waited for one of them would keep the others.
            together = _is_between_two(func) and _is_between_two(before)
            before = func
            if flying and not together:
                used = {_memory(tensor) for tensor in _tensors((args, kwargs))}
                for message in [message for message in flying if message[1] & used]:
                    message[0].wait()
                    flying.remove(message)
            if _is_message(func):
                again = func(*args, **kwargs)
                work = torch.distributed.Work.unbox(again[-1] if isinstance(again, (tuple, list)) else again)
                flying.append((work, {_memory(tensor) for tensor in _tensors(args)}))
                continue
            self.run_again(func, args, kwargs, result)
        for work, _ in flying:
            work.wait()


def _is_message(func: Any) -> bool:
    return isinstance(func, torch._ops.OpOverload) and func.namespace == "c10d"


def _is_between_two(func: Any) -> bool:
    return func in (torch.ops.c10d.send.default, torch.ops.c10d.recv_.default)


class _Capture(TorchDispatchMode):
    def __init__(self, graph: Graph) -> None:
        super().__init__()
        self._graph = graph

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs, graph = kwargs or {}, self._graph
        if func in _READS_DEVICE:
            raise RuntimeError(f"{func}: operation not permitted when stream is capturing")
        if _is_message(func):
            graph.messages += 1
            for tensor in _tensors(args):
                graph.keep(tensor)
            result = func(*args, **kwargs)
            graph.operators.append((func, tree_map(_alias, args), kwargs, None))
            return result
        for given, declared in zip([*args, *kwargs.values()], func._schema.arguments, strict=False):
            if declared.alias_info is not None and declared.alias_info.is_write:
                for tensor in _tensors(given):
                    graph.keep(tensor)
        for name, given in kwargs.items():  # out=
            if name == "out":
                graph.keep(given)
        result = func(*args, **kwargs)
        if all(returned.alias_info is None for returned in _returns(func)):
            graph.made(result)
        graph.note(func, args, kwargs, result)
        return result


def _not_captured(name: str) -> Callable:
    original = getattr(torch.Tensor, name)

    def read(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if _capturing:
            raise RuntimeError(f"{name}: operation not permitted when stream is capturing")
        return original(self, *args, **kwargs)

    return read


@contextmanager
def _graph(
    cuda_graph: Graph, pool: Any = None, stream: Any = None, capture_error_mode: str = "global"
) -> Iterator[None]:
    _capturing.append(cuda_graph)
    try:
        with _Capture(cuda_graph):
            yield
    finally:
        _capturing.clear()
    cuda_graph.undo()
    captured.append(cuda_graph)


def as_kernel(kernel: Callable, *tensors: torch.Tensor | None) -> Any:
    """Run `kernel`, which makes new tensors from `tensors`, as one node of the graph that is captured, if any."""
    if not _capturing:
        return kernel(*tensors)
    (graph,) = _capturing
    with _disable_current_modes():
        _capturing.clear()
        result = kernel(*tensors)
        _capturing.append(graph)
    graph.made(result)
    graph.captured += 1
    graph.operators.append((kernel, *tree_map(_alias, (tensors, {}, result))))
    return result


class _HybridEPBuffer(HybridEPBuffer):
    """The handle is a list, which each run of the kernel fills anew, and whether rows were dropped."""

    def dispatch_with_permute(self, *, handle: Any = None, **given: Any) -> Any:
        names = [name for name, value in given.items() if isinstance(value, torch.Tensor)]
        filled = [] if handle is None else handle[0]

        def kernel(*tensors: torch.Tensor) -> Any:
            more = {} if handle is None else {"handle": filled[0]}
            values = given | dict(zip(names, tensors, strict=True)) | more
            rows, probs, _, counts, made = HybridEPBuffer.dispatch_with_permute(self, **values)
            if handle is None:
                filled[:] = [made]
            return rows, probs, counts, made[-1]

        rows, probs, counts, overflow = as_kernel(kernel, *(given[name] for name in names))
        return rows, probs, None, counts, (filled, overflow)

    def combine_with_unpermute(self, *, handle: Any, **given: Any) -> Any:
        names = [name for name, value in given.items() if isinstance(value, torch.Tensor)]

        def kernel(*tensors: torch.Tensor) -> Any:
            values = given | dict(zip(names, tensors, strict=True))
            return HybridEPBuffer.combine_with_unpermute(self, handle=handle[0][0], **values)

        return as_kernel(kernel, *(given[name] for name in names))


def _fused_forward(
    self: Any,
    permuted_local_hidden_states: torch.Tensor,
    tokens_per_expert: torch.Tensor,
    permuted_probs: torch.Tensor,
    output_buffer: torch.Tensor | None = None,
    grad_input_buffer: torch.Tensor | None = None,
) -> torch.Tensor:
    """`TEGroupedMLP._fused_forward` of experts without biases: every expert runs all rows, and its own are taken."""
    from megatron.core.transformer.moe.paged_stash import paged_stash_group_commit, paged_stash_group_start

    assert output_buffer is None and grad_input_buffer is None
    for linear in (self.linear_fc1, self.linear_fc2):
        for hook in linear._forward_pre_hooks.values():
            hook(linear, None)
    rows = permuted_local_hidden_states
    if self.config.moe_paged_stash:
        rows = paged_stash_group_start(rows)
    stop = tokens_per_expert.cumsum(0)
    number = torch.arange(len(rows))
    out = torch.zeros_like(rows)
    for expert in range(self.num_local_experts):
        own = (number >= stop[expert] - tokens_per_expert[expert]) & (number < stop[expert])
        gate, linear = (rows @ getattr(self.linear_fc1, f"weight{expert}").t()).chunk(2, dim=-1)
        inner = torch.nn.functional.silu(gate) * linear * permuted_probs.unsqueeze(-1).to(rows.dtype)
        result = inner @ getattr(self.linear_fc2, f"weight{expert}").t()
        out = out + torch.where(own.unsqueeze(-1), result, torch.zeros_like(result))
    return paged_stash_group_commit(out, name="grouped_mlp") if self.config.moe_paged_stash else out


def install() -> None:
    """Give this process, whose device is the CPU, graphs of iterations and these kernels, for good, and have balanced
    experts take the paths of a GPU."""
    from megatron.core.transformer.moe import fused_a2a
    from megatron.core.transformer.moe.experts import TEGroupedMLP

    from megatron.balanced.experts import moe_layer

    install_flex()
    fused_a2a.HybridEPBuffer = _HybridEPBuffer
    TEGroupedMLP._is_fused_impl_supported = lambda self: True
    TEGroupedMLP._fused_forward = _fused_forward
    moe_layer.is_cpu = lambda: False
    torch.cuda.CUDAGraph, torch.cuda.graph = Graph, _graph
    torch.cuda.graph_pool_handle = lambda: (0, 0)
    for name in ("tolist", "numpy"):
        setattr(torch.Tensor, name, _not_captured(name))
    resize = torch.UntypedStorage.resize_
    # Memory that is given back during a capture stays the graph's.
    torch.UntypedStorage.resize_ = lambda self, size: self if _capturing else resize(self, size)
