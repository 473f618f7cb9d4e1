"""Numbers in 8 bits with scales: one for a tensor (Float8Tensor), one for every 32 numbers (MXFP8Tensor), or one for a
block (`blocks.py`); and in 4 bits (`four_bits.py`).

"Rowwise" data of an MXFP8Tensor has its blocks along the last dimension, "columnwise" data along the first. Their
scales are powers of two, as bytes with an offset of 127 (OCP Microscaling Formats 1.0, section 5.4.1), padded to whole
tiles. They stay in the order of rows, also where a GPU would order them by tiles for a GEMM. Columnwise data of a
Float8Tensor is the transpose.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch

from tests.support.transformer_engine.blocks import plain_blocks, quantize_blocks_of_128
from tests.support.transformer_engine.cpp_module import stands_in
from tests.support.transformer_engine.enums import TORCH_TYPE
from tests.support.transformer_engine.four_bits import plain_4_bits, quantize_4_bits
from tests.support.transformer_engine.numbers import in_8_bits, largest_of, scale_of

__all__ = ["plain"]

_BLOCK = 32
_OFFSET = 127


@stands_in
def create_empty_quantized_tensor(
    quantizer: Any, shape: Sequence[int], dtype: torch.dtype, device: torch.device, pin_memory: bool
) -> Any:
    """A tensor of the class that `quantizer` makes, with memory of undefined content."""
    device = device if device.type == "meta" else torch.device("cpu")
    specs = _inner_tensors(quantizer, tuple(shape))
    inner = {name: torch.empty(size, dtype=kind, device=device) for name, (size, kind) in specs.items()}
    context = _storage(quantizer, dtype)
    cls, rest = context["cls"], context["nontensor_kwargs"]
    if hasattr(cls, "__tensor_flatten__"):
        rest = {name: value for name, value in rest.items() if name != "fake_dtype"}
        return cls(shape=tuple(shape), dtype=dtype, device=device, **_arguments(cls, inner), **rest)
    return cls(**_arguments(cls, inner), **rest)


def _inner_tensors(quantizer: Any, shape: tuple[int, ...]) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    if type(quantizer).__name__ != "Float8Quantizer":
        inner = quantizer.inner_tensor_specs(shape)
        if type(quantizer).__name__ == "NVFP4Quantizer" and quantizer.columnwise_usage:  # a matrix of any shape
            inner["_columnwise_data"] = (shape[-1], math.prod(shape[:-1]) // 2), torch.uint8
        return inner
    specs: dict[str, tuple[tuple[int, ...], torch.dtype]] = {"_scale_inv": ((1,), torch.float32)}
    if quantizer.rowwise_usage:
        specs["_data"] = shape, torch.uint8
    if quantizer.columnwise_usage:
        specs["_transpose"] = (shape[-1], *shape[:-1]), torch.uint8
    return specs


def _storage(quantizer: Any, dtype: torch.dtype) -> dict[str, Any]:
    if type(quantizer).__name__ != "Float8Quantizer":
        return quantizer.storage_metadata(dtype)
    from transformer_engine.pytorch.tensor.float8_tensor import Float8Tensor
    from transformer_engine.pytorch.tensor.storage.float8_tensor_storage import Float8TensorStorage

    rest = {"fp8_dtype": quantizer.dtype, "quantizer": quantizer, "fake_dtype": dtype}
    return {"cls": Float8TensorStorage if quantizer.internal else Float8Tensor, "nontensor_kwargs": rest}


_ARGUMENT = {"_data": "data", "_scale_inv": "fp8_scale_inv", "_transpose": "data_transpose"}


def _arguments(cls: type, inner: dict[str, torch.Tensor]) -> dict[str, torch.Tensor | None]:
    """What the constructor takes, None for what is not there."""
    names = ["_rowwise_data", "_rowwise_scale_inv", "_columnwise_data", "_columnwise_scale_inv"]
    if cls.__name__.startswith("NVFP4Tensor"):
        names += ["_amax_rowwise", "_amax_columnwise"]
    if cls.__name__.startswith("Float8Tensor"):
        names = ["_data", "_scale_inv", "_transpose"]
    return {_ARGUMENT.get(name, name[1:]): inner.get(name) for name in names}


def _quantize_blocks(rows: torch.Tensor, kind: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """rows [n, m] -> bytes [n, m], and bytes of scales [n, m / 32]."""
    blocks = rows.float().view(len(rows), rows.shape[1] // _BLOCK, _BLOCK)
    largest = blocks.abs().amax(-1) / torch.finfo(kind).max
    exponent = largest.clamp_min(2.0**-_OFFSET).log2().ceil().clamp(-_OFFSET, _OFFSET)
    scaled = blocks * torch.exp2(-exponent)[..., None]
    return in_8_bits(scaled, kind).view(rows.shape), (exponent + _OFFSET).to(torch.uint8)


def _quantize_mxfp8(rows: torch.Tensor, kind: torch.dtype, out: Any) -> None:
    if out._rowwise_data is not None:
        data, scales = _quantize_blocks(rows, kind)
        out._rowwise_data.copy_(data.view(out._rowwise_data.shape))
        out._rowwise_scale_inv.zero_()[: scales.shape[0], : scales.shape[1]].copy_(scales)
    if out._columnwise_data is not None:
        data, scales = (part.t() for part in _quantize_blocks(rows.t().contiguous(), kind))
        out._columnwise_data.copy_(data.reshape(out._columnwise_data.shape))
        out._columnwise_scale_inv.zero_()[: scales.shape[0], : scales.shape[1]].copy_(scales)


@stands_in
def compute_amax(input: torch.Tensor, amax: torch.Tensor) -> None:
    amax.copy_(largest_of(input))


@stands_in
def multi_tensor_compute_scale_and_scale_inv(
    chunk_size: int,
    noop_flag: torch.Tensor,
    tensor_lists: Sequence[Sequence[torch.Tensor]],
    max_fp8: float,
    force_pow_2_scales: bool,
    amax_epsilon: float,
) -> None:
    """Lists of the largest numbers, of scales and of their inverses; the last two are written."""
    for largest, scale, inverse in zip(*tensor_lists, strict=True):
        scale.copy_(scale_of(largest.clamp_min(amax_epsilon), max_fp8, force_pow_2_scales))
        inverse.copy_(scale.reciprocal())


def _quantize_float8(rows: torch.Tensor, kind: torch.dtype, quantizer: Any, out: Any) -> None:
    largest = largest_of(rows)
    if type(quantizer).__name__ == "Float8Quantizer":
        scale = quantizer.scale
        if quantizer.amax.numel():  # parameters are cast with a scale that is known
            quantizer.amax.copy_(largest)
    else:
        if quantizer.with_amax_reduction:
            torch.distributed.all_reduce(largest, torch.distributed.ReduceOp.MAX, quantizer.amax_reduction_group)
        scale = scale_of(largest, torch.finfo(kind).max, quantizer.force_pow_2_scales)
    data = in_8_bits(rows.float() * scale, kind)
    if out._data is not None:
        out._data.copy_(data.view(out._data.shape))
    if out._transpose is not None:
        out._transpose.copy_(data.t().reshape(out._transpose.shape))
        out._transpose_invalid = False
    out._scale_inv.copy_(scale.reciprocal().view(out._scale_inv.shape))


@stands_in
def quantize(tensor: torch.Tensor, quantizer: Any, out: Any = None, noop_flag: torch.Tensor | None = None) -> Any:
    """`tensor` as `quantizer` stores it, in `out` if given."""
    if noop_flag is not None:
        raise NotImplementedError("quantize with a flag that skips it has no stand-in on the CPU")
    if out is None:
        out = create_empty_quantized_tensor(quantizer, tensor.shape, tensor.dtype, torch.device("cpu"), False)
    rows, name = tensor.reshape(-1, tensor.shape[-1]), type(quantizer).__name__
    if name == "NVFP4Quantizer":
        quantize_4_bits(rows, quantizer, out)
        return out
    kind = TORCH_TYPE[int(quantizer.dtype)]
    if name == "MXFP8Quantizer":
        _quantize_mxfp8(rows, kind, out)
    elif name == "Float8BlockQuantizer":
        quantize_blocks_of_128(rows, quantizer, out)
    elif name in ("Float8Quantizer", "Float8CurrentScalingQuantizer"):
        _quantize_float8(rows, kind, quantizer, out)
    else:
        raise NotImplementedError(f"{name} has no stand-in on the CPU")
    return out


@stands_in
def split_quantize(
    tensor: torch.Tensor, split_sections: Sequence[int], quantizers: Sequence[Any], *unused: Any, **also: Any
) -> list[Any]:
    parts = tensor.split([int(rows) for rows in split_sections])
    return [quantizer(part) for part, quantizer in zip(parts, quantizers, strict=True)]


def _dequantize_mxfp8(tensor: Any, columnwise: bool) -> torch.Tensor:
    if columnwise:
        data, scales = tensor._columnwise_data, tensor._columnwise_scale_inv
    else:
        data, scales = tensor._rowwise_data, tensor._rowwise_scale_inv
    numbers = data.reshape(-1, data.shape[-1]).view(TORCH_TYPE[int(tensor._fp8_dtype)]).float()
    dimension = 0 if columnwise else 1
    factors = torch.exp2(scales.float() - _OFFSET).repeat_interleave(_BLOCK, dimension)
    return (numbers * factors[: numbers.shape[0], : numbers.shape[1]]).view(data.shape)


def _dequantize_float8(tensor: Any, columnwise: bool) -> torch.Tensor:
    data = tensor._data
    if data is None or (columnwise and tensor._transpose is not None and not tensor._transpose_invalid):
        data = tensor._transpose.movedim(0, -1).contiguous()
    return data.view(TORCH_TYPE[int(tensor._fp8_dtype)]).float() * tensor._scale_inv


def plain(tensor: Any, *, columnwise: bool = False) -> torch.Tensor:
    """`tensor` in float32 if it is quantized, itself otherwise. columnwise: which of its data is read, where it has
    both."""
    if hasattr(tensor, "_is_2D_scaled"):
        return plain_blocks(tensor, columnwise)
    if hasattr(tensor, "_fp4_dtype"):
        return plain_4_bits(tensor, columnwise)
    if hasattr(tensor, "_rowwise_data"):
        return _dequantize_mxfp8(tensor, columnwise)
    return _dequantize_float8(tensor, columnwise) if hasattr(tensor, "_fp8_dtype") else tensor


@stands_in
def dequantize(tensor: Any, otype: Any) -> torch.Tensor:
    columnwise = getattr(tensor, "_rowwise_data", tensor) is None
    return plain(tensor, columnwise=columnwise).to(TORCH_TYPE[int(otype)])


@stands_in
def fp8_transpose(data: torch.Tensor, dtype: Any, out: torch.Tensor | None = None) -> torch.Tensor:
    transposed = data.movedim(-1, 0).contiguous()
    return transposed if out is None else out.copy_(transposed)
