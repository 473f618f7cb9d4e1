"""A CUDA graph of whole iterations on the CPU device, and what its kernels are made of.

`Graph` extends `cuda_graphs` by what a graph of an iteration holds beside operators: collectives and
messages, which a replay starts again and waits for where the capture did, and kernels of packages outside of torch
(`as_kernel`). As on a GPU, a capture changes no memory that it did not make, since nothing runs, and it fails where the
host reads numbers of the device, where memory is used that a message may still read or write, and where it ends before
all messages are waited for.

Two of these kernels: HybridEP's, into a buffer of a given number of rows, and the fused grouped MLP of Transformer
Engine's operations, for which the host need not know how many rows an expert has.
"""

import types
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_map

from tests.support.stand_ins.cuda_graphs import _READS_DEVICE, CUDAGraph, _alias, _is_view, _returns, _tensors
from tests.support.stand_ins.flex_buffers import HybridEPBuffer, install_flex

__all__ = ["Graph", "as_kernel", "captured", "install"]

captured: list["Graph"] = []  # by this process
_capturing: list["Graph"] = []


def _memory(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


class _Use(NamedTuple):
    """Addresses, from start to stop, that an operator or a message reads or writes."""

    start: int
    stop: int
    writes: bool


def _uses(values: Any, writes: bool) -> Iterator[_Use]:
    for tensor in _tensors(values):
        if tensor.numel() and tensor.data_ptr():
            last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
            start = tensor.data_ptr()
            yield _Use(start, start + (last + 1) * tensor.element_size(), writes)


class Graph(CUDAGraph):
    def __init__(self, keep_graph: bool = False) -> None:
        super().__init__(keep_graph)
        self.messages = 0  # collectives and messages in the graph
        self._made: set[int] = set()  # memory
        self._before: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # what was there before, of other memory
        self._works: list[torch.distributed.Work] = []  # of messages, in the order of their starts
        self._flying: dict[int, list[_Use]] = {}  # number of a message that the capture has not waited for -> memory
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
        """End the capture: nothing of it has run."""
        assert not self._flying, f"{len(self._flying)} messages are not joined to the stream that captures"
        self._works.clear()
        for whole, values in self._before.values():
            whole.copy_(values)

    def check(self, func: Any, uses: Iterable[_Use]) -> None:
        """Fail if `func` uses memory that a message may still read or write, for which a GPU would not wait."""
        for use in uses:
            for message in (each for flying in self._flying.values() for each in flying):
                apart = use.stop <= message.start or message.stop <= use.start
                assert apart or not (use.writes or message.writes), f"{func} does not wait for a message"

    def start(self, func: Any, args: tuple, kwargs: dict, work: torch.distributed.Work) -> None:
        """Note a message that has been started."""
        self._flying[len(self._works)] = [*_message_uses(func, args)]
        self.operators.append((func, tree_map(_alias, args), kwargs, len(self._works)))
        self._works.append(work)
        self.messages += 1

    def wait(self, work: torch.distributed.Work) -> None:
        """Note that what follows waits for a message."""
        for number in [number for number in self._flying if self._works[number] is work]:
            del self._flying[number]
            self.operators.append((_wait, (), {}, number))

    @torch.no_grad()
    def replay(self) -> None:
        self.begin_replay()
        flying: dict[int, torch.distributed.Work] = {}
        for func, args, kwargs, result in self.operators:
            if _is_message(func):
                flying[result] = _work(func(*args, **kwargs))
            elif func is _wait:
                _wait(flying.pop(result))
            else:
                self.run_again(func, args, kwargs, result)
        assert not flying


_wait = torch.distributed.Work.wait


def _work(result: Any) -> torch.distributed.Work:
    """The handle in what an operator that starts a message returns."""
    return torch.distributed.Work.unbox(result[-1] if isinstance(result, (tuple, list)) else result)


def _is_message(func: Any) -> bool:
    return isinstance(func, torch._ops.OpOverload) and func.namespace == "c10d"


def _message_uses(func: Any, args: tuple) -> Iterator[_Use]:
    """The memory of a message. Operators that receive name what they write first."""
    yield from _uses(args[0], func is not torch.ops.c10d.send.default)
    yield from _uses(args[1:], False)


def _operator_uses(func: Any, args: tuple, kwargs: dict) -> Iterator[_Use]:
    declared = func._schema.arguments
    names = {argument.name: argument for argument in declared}
    given = [*zip(args, declared, strict=False), *((value, names.get(name)) for name, value in kwargs.items())]
    for value, argument in given:
        info = None if argument is None else argument.alias_info
        yield from _uses(value, info is not None and info.is_write)


class _Capture(TorchDispatchMode):
    def __init__(self, graph: Graph) -> None:
        super().__init__()
        self._graph = graph

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs, graph = kwargs or {}, self._graph
        if func in _READS_DEVICE:
            raise RuntimeError(f"{func}: operation not permitted when stream is capturing")
        if _is_message(func):
            graph.check(func, _message_uses(func, args))
            for tensor in _tensors(args):
                graph.keep(tensor)
            result = func(*args, **kwargs)
            graph.start(func, args, kwargs, _work(result))
            return result
        if not _is_view(func):
            graph.check(func, _operator_uses(func, args, kwargs))
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


def _noted_wait(work: torch.distributed.Work, *args: Any, **kwargs: Any) -> bool:
    for graph in _capturing:
        graph.wait(work)
    with _disable_current_modes():  # gloo ends a reduce-scatter with a copy, which is part of the message
        return _wait(work, *args, **kwargs)


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
    graph.check(kernel, _uses(tensors, False))
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


class _LateProduct(torch.autograd.Function):
    """rows [token, in] times weight [out, in], whose backward pass notes in `late` what the weight's gradient needs."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, weight: torch.Tensor, late: list) -> torch.Tensor:
        ctx.save_for_backward(rows)
        ctx.weight, ctx.late = weight, late
        return rows @ weight.t()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (rows,) = ctx.saved_tensors
        ctx.late.append((ctx.weight, rows, gradient))
        return gradient @ ctx.weight, None, None


class _GroupedLinear(torch.nn.Module):
    """`transformer_engine.pytorch.ops.GroupedLinear` with the weights of the layer `linear`."""

    def __init__(self, linear: Any) -> None:
        super().__init__()
        assert not linear.fuse_wgrad_accumulation and not linear.use_bias
        self._linear = (linear,)  # no submodule
        self._late: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []

    def forward(self, rows: torch.Tensor, expert: int) -> torch.Tensor:
        (linear,) = self._linear
        weight = getattr(linear, f"weight{expert}")
        return _LateProduct.apply(rows, weight, self._late) if linear.delay_wgrad_compute else rows @ weight.t()

    @torch.no_grad()
    def backward_dw(self) -> None:
        for weight, rows, gradient in self._late:
            weight.grad = gradient.t() @ rows
        self._late.clear()


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
    if self._fused_ops is None:
        parts = _GroupedLinear(self.linear_fc1), torch.nn.SiLU(), _GroupedLinear(self.linear_fc2)
        self._fused_ops = (torch.nn.Sequential(*parts),)
    fc1, activation, fc2 = self._fused_ops[0]
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
        gate, linear = fc1(rows, expert).chunk(2, dim=-1)
        inner = activation(gate) * linear * permuted_probs.unsqueeze(-1).to(rows.dtype)
        result = fc2(inner, expert)
        out = out + torch.where(own.unsqueeze(-1), result, torch.zeros_like(result))
    return paged_stash_group_commit(out, name="grouped_mlp") if self.config.moe_paged_stash else out


def _at_once(target: Callable, *args: Any, **unused: Any) -> Any:
    """In the place of a thread that hands messages on: a stream does it, and its messages are in the graph."""
    target(*args)
    return types.SimpleNamespace(join=lambda: None)


def install() -> None:
    """Give this process, whose device is the CPU, graphs of iterations and these kernels, for good, and have balanced
    experts take the paths of a GPU."""
    from megatron.core.transformer.moe import fused_a2a
    from megatron.core.transformer.moe.experts import TEGroupedMLP

    from balancing.experts.engine import relay
    from megatron.balanced.experts import moe_layer
    from tests.support.stand_ins import split_kernels

    install_flex()
    fused_a2a.HybridEPBuffer = _HybridEPBuffer
    TEGroupedMLP._is_fused_impl_supported = lambda self: True
    TEGroupedMLP._fused_forward = _fused_forward
    moe_layer.is_cpu = lambda: False
    split_kernels.install(as_kernel)
    torch.cuda.CUDAGraph, torch.cuda.graph = Graph, _graph
    torch.cuda.graph_pool_handle = lambda: (0, 0)
    torch.distributed.Work.wait = _noted_wait
    relay.start_thread = _at_once
    for name in ("tolist", "numpy"):
        setattr(torch.Tensor, name, _not_captured(name))
    resize = torch.UntypedStorage.resize_
    # Memory that is given back during a capture stays the graph's.
    torch.UntypedStorage.resize_ = lambda self, size: self if _capturing else resize(self, size)
