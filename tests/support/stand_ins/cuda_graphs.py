"""CUDA graphs on the CPU device, in the place of `torch.cuda.CUDAGraph` and `torch.cuda.graph`.

A capture notes every operator with its arguments and results. A replay runs the same operators again, on the same
tensors and into the same memory, without any of the Python around them, as a GPU does: what Python would have decided
otherwise meanwhile stays as it was captured. As on a GPU, a capture fails where the host reads a number of the device,
and what was captured must not have moved (a GPU would go on with the old memory, here the replay fails).

`install` also has Transformer Engine hand out no weak references, whose memory it would reuse: here it is kept.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter, tree_map

__all__ = ["CUDAGraph", "captured", "install", "install_local"]

_READS_DEVICE = (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default)

captured: list["CUDAGraph"] = []  # by this process


def _alias(value: Any) -> Any:
    return value.detach() if isinstance(value, torch.Tensor) else value


def _tensors(values: Any) -> Iterator[torch.Tensor]:
    return (value for value in tree_iter(values) if isinstance(value, torch.Tensor))


class CUDAGraph:
    """operators: function, arguments, their names, result; none once it is reset. files: of the Python that started
    them. captured: how many operators. replays: how many."""

    def __init__(self, keep_graph: bool = False) -> None:
        self.operators: list[tuple[Any, tuple, dict, Any]] = []
        self.files: set[str] = set()
        self.captured = self.replays = 0
        self._parameters: dict[int, tuple[torch.Tensor, int]] = {}  # with their addresses
        self._is_reset = False

    def note(self, func: Any, args: tuple, kwargs: dict, result: Any) -> None:
        for tensor in _tensors((args, kwargs)):
            if isinstance(tensor, torch.nn.Parameter):
                self._parameters.setdefault(id(tensor), (tensor, tensor.data_ptr()))
        self.captured += 1
        # Tensors of their own on the same memory, since the captured ones may be given other memory or none.
        self.operators.append((func, *tree_map(_alias, (args, kwargs, result))))

    @torch.no_grad()
    def replay(self) -> None:
        self.begin_replay()
        for operator in self.operators:
            self.run_again(*operator)

    def begin_replay(self) -> None:
        assert not self._is_reset, "the graph was reset"
        for weight, address in self._parameters.values():
            assert weight.data_ptr() == address, f"a weight of shape {tuple(weight.shape)} is not where it was captured"
        self.replays += 1

    def run_again(self, func: Any, args: tuple, kwargs: dict, result: Any) -> None:
        """Run an operator or a kernel, and leave what it makes where it was captured."""
        if _is_view(func):
            return
        again = func(*args, **kwargs)
        for old, new in zip(_tensors(result), _tensors(again), strict=True):
            if old.data_ptr() != new.data_ptr():
                assert old.shape == new.shape, f"{func} made {tuple(new.shape)}, not {tuple(old.shape)}"
                old.copy_(new)

    def reset(self) -> None:
        self._is_reset = True
        self.operators.clear()
        self._parameters.clear()

    def pool(self) -> tuple[int, int]:
        return 0, 0


def _returns(func: Any) -> Any:
    return func._schema.returns


def _is_view(func: Any) -> bool:
    """Whether the result of `func` is memory that is there already."""
    return isinstance(func, torch._ops.OpOverload) and any(
        returned.alias_info is not None and not returned.alias_info.is_write for returned in _returns(func)
    )


class _Capture(TorchDispatchMode):
    def __init__(self, graph: CUDAGraph) -> None:
        super().__init__()
        self._graph = graph

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if func in _READS_DEVICE or func.namespace == "c10d":
            raise RuntimeError(f"{func}: operation not permitted when stream is capturing")
        result = func(*args, **(kwargs or {}))
        self._graph.note(func, args, kwargs or {}, result)
        frame: Any = sys._getframe(1)
        while frame is not None and not frame.f_code.co_filename.endswith("/transformer_engine/pytorch/graph.py"):
            self._graph.files.add(frame.f_code.co_filename)
            frame = frame.f_back
        return result


@contextmanager
def _graph(cuda_graph: CUDAGraph, pool: Any = None, stream: Any = None, **options: Any) -> Iterator[None]:
    with _Capture(cuda_graph):
        yield
    captured.append(cuda_graph)


def install_local() -> None:
    """In addition, have `--cuda-graph-impl local` work, whose graphs Megatron-LM itself captures. It needs the random
    generator of a GPU, so the command line refuses it on CPUs; no test draws random numbers in a graph."""
    from megatron.core.transformer import cuda_graphs
    from transformer_engine.pytorch import distributed
    from transformer_engine.pytorch.attention.dot_product_attention import dot_product_attention

    from megatron.balanced.trainer.checks import machine

    def alloc_tensor_from_graph_mempool(meta: Any) -> torch.Tensor:
        out = meta.zeros_like()
        out.is_from_global_mempool = True
        return out.requires_grad_(meta.requires_grad)

    cuda_graphs.alloc_tensor_from_graph_mempool = alloc_tensor_from_graph_mempool
    cuda_graphs.make_weak_ref = lambda value: value
    cuda_graphs.get_all_rng_states = lambda: {}
    cuda_graphs._ensure_generator_state_is_cudagraph_safe = lambda gen: gen
    distributed.graph_safe_rng_available = lambda: False
    dot_product_attention.graph_safe_rng_available = lambda: True
    machine._refuse_without_gpu = lambda args: None


def install() -> None:
    """Give this process, whose device is the CPU, CUDA graphs, for good. Samples that Megatron-LM captures with get the
    model's type; it makes them in bfloat16."""
    from megatron.core.transformer.module import GraphableMegatronModule
    from transformer_engine.pytorch import graph
    from transformer_engine.pytorch.attention.dot_product_attention import dot_product_attention

    torch.cuda.CUDAGraph, torch.cuda.graph = CUDAGraph, _graph
    torch.cuda.graph_pool_handle = lambda: (0, 0)
    graph.make_weak_ref = lambda value: value
    dot_product_attention.graph_safe_rng_available = lambda: True  # no test draws random numbers in a graph
    samples = GraphableMegatronModule.get_layer_static_inputs

    def get_layer_static_inputs(self: Any, seq_length: int, micro_batch_size: int) -> dict[str, torch.Tensor]:
        inputs = samples(self, seq_length, micro_batch_size)
        inputs["hidden_states"] = inputs["hidden_states"].detach().to(self.config.params_dtype).requires_grad_()
        return inputs

    GraphableMegatronModule.get_layer_static_inputs = get_layer_static_inputs
