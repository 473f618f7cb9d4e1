"""Collectives that Megatron-LM uses and gloo lacks, built from those that gloo has.

These are reductions to the average, all-gathers and reduce-scatters of pieces of different length, and split sizes
given as tensors. Each function takes a function of `torch.distributed` and returns one with the same signature, and
with the result that NCCL would give.
"""

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

__all__ = ["all_gather", "all_reduce", "all_to_all_single", "make_group", "reduce_scatter", "reduce_scatter_tensor"]


class _Done:
    """The work handle of a collective that has already finished."""

    def wait(self, timeout: Any = None) -> bool:
        return True

    def is_completed(self) -> bool:
        return True


def make_group(original: Callable) -> Callable:
    """`init_process_group` or `new_group` on gloo, without NCCL's options and device binding."""
    parameters = inspect.signature(original)

    @functools.wraps(original)
    def group(*args: Any, **kwargs: Any) -> Any:
        given = parameters.bind(*args, **kwargs).arguments
        given.pop("pg_options", None)
        given.pop("device_id", None)
        if given.get("backend") not in (None, "fake"):
            given["backend"] = "gloo"
        return original(**given)

    return group


def _is_average(op: Any) -> bool:
    return op == dist.ReduceOp.AVG


def all_reduce(original: Callable) -> Callable:
    """`all_reduce` with averages: each rank divides its contribution, so that the work can stay asynchronous."""

    @functools.wraps(original)
    def all_reduce(tensor: torch.Tensor, op: Any = dist.ReduceOp.SUM, group: Any = None, async_op: bool = False) -> Any:
        if _is_average(op):
            tensor.div_(dist.get_world_size(group))
            op = dist.ReduceOp.SUM
        return original(tensor, op=op, group=group, async_op=async_op)

    return all_reduce


def reduce_scatter_tensor(original: Callable) -> Callable:
    """`reduce_scatter_tensor` with averages. If the output is part of the input, as in Megatron's gradient buffers, it
    makes no copy."""

    @functools.wraps(original)
    def reduce_scatter_tensor(
        output: torch.Tensor,
        input: torch.Tensor,
        op: Any = dist.ReduceOp.SUM,
        group: Any = None,
        async_op: bool = False,
    ) -> Any:
        if _is_average(op):
            in_place = output.untyped_storage().data_ptr() == input.untyped_storage().data_ptr()
            size = dist.get_world_size(group)
            input = input.div_(size) if in_place else input / size
            op = dist.ReduceOp.SUM
        return original(output, input, op=op, group=group, async_op=async_op)

    return reduce_scatter_tensor


def all_gather(original: Callable) -> Callable:
    """`all_gather` of pieces that may differ in length along the first dimension."""

    @functools.wraps(original)
    def all_gather(
        tensor_list: Sequence[torch.Tensor], tensor: torch.Tensor, group: Any = None, async_op: bool = False
    ) -> Any:
        rows = [piece.shape[0] if piece.dim() else 1 for piece in tensor_list]
        if len(set(rows)) == 1:
            return original(tensor_list, tensor, group=group, async_op=async_op)
        padded = tensor.new_zeros(max(rows), *tensor.shape[1:])
        padded[: tensor.shape[0]] = tensor
        gathered = [torch.empty_like(padded) for _ in rows]
        original(gathered, padded, group=group)
        for piece, whole, count in zip(tensor_list, gathered, rows, strict=True):
            piece.copy_(whole[:count])
        return _Done() if async_op else None

    return all_gather


def reduce_scatter(original: Callable) -> Callable:
    """`reduce_scatter` of pieces that may differ in length along the first dimension, by one all-reduce."""

    @functools.wraps(original)
    def reduce_scatter(
        output: torch.Tensor,
        input_list: Sequence[torch.Tensor],
        op: Any = dist.ReduceOp.SUM,
        group: Any = None,
        async_op: bool = False,
    ) -> Any:
        whole = torch.cat(list(input_list))
        dist.all_reduce(whole, op=op, group=group)
        start = sum(piece.shape[0] for piece in input_list[: dist.get_rank(group)])
        output.copy_(whole[start : start + output.shape[0]])
        return _Done() if async_op else None

    return reduce_scatter


def all_to_all_single(original: Callable) -> Callable:
    """`all_to_all_single` with split sizes that may be tensors, as Megatron's dispatchers keep them on the device."""

    def listed(sizes: Any) -> Any:
        return sizes.tolist() if isinstance(sizes, torch.Tensor) else sizes

    @functools.wraps(original)
    def all_to_all_single(
        output: torch.Tensor,
        input: torch.Tensor,
        output_split_sizes: Any = None,
        input_split_sizes: Any = None,
        group: Any = None,
        async_op: bool = False,
    ) -> Any:
        return original(
            output, input, listed(output_split_sizes), listed(input_split_sizes), group=group, async_op=async_op
        )

    return all_to_all_single
