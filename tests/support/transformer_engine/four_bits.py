"""Numbers in 4 bits (NVFP4Tensor): 16 numbers share a scale in 8 bits, and all of a tensor one in 32.

Weights have blocks of 16 x 16, other tensors of 16 along a row. "Columnwise" data is the transpose, of activations and
gradients after a Hadamard transform over 16 tokens, which a product over tokens undoes. Stochastic rounding, which
kernels apply to gradients, is rounding to nearest here. Scales stay in the order of rows.
"""

from typing import Any

import torch

from tests.support.transformer_engine.numbers import in_8_bits, largest_of

__all__ = ["plain_4_bits", "quantize_4_bits"]

_BLOCK = 16
_LARGEST, _LARGEST_SCALE = 6.0, 448.0
_VALUES = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
_BETWEEN = (_VALUES[1:] + _VALUES[:-1]) / 2


def _quantize(rows: torch.Tensor, square: bool, data: torch.Tensor, scales: torch.Tensor, amax: torch.Tensor) -> None:
    """rows [n, m] -> two numbers a byte [n, m / 2], scales [n, m / 16] in 8 bits, and the largest number."""
    amax.copy_(largest_of(rows))
    if not rows.numel():
        return
    blocks = rows.float().view(len(rows), -1, _BLOCK)
    largest = blocks.abs().amax(-1)
    if square:
        whole = largest.view(-1, _BLOCK, largest.shape[1]).amax(1)
        largest = whole.repeat_interleave(_BLOCK, 0)
    whole_scale = _whole_scale(amax)
    stored = in_8_bits(largest / _LARGEST * whole_scale, torch.float8_e4m3fn)
    factors = stored.view(torch.float8_e4m3fn).float() / whole_scale
    scaled = torch.where(factors[..., None] > 0, blocks / factors[..., None], 0.0)
    codes = torch.bucketize(scaled.abs(), _BETWEEN).to(torch.uint8) | (scaled < 0).to(torch.uint8) << 3
    codes = codes.view(len(rows), -1, 2)
    data.copy_((codes[..., 0] | codes[..., 1] << 4).view(data.shape))
    scales.zero_()[: stored.shape[0], : stored.shape[1]].copy_(stored)


def _whole_scale(amax: torch.Tensor) -> torch.Tensor:
    return torch.where(amax > 0, _LARGEST * _LARGEST_SCALE / amax, 1.0)


def quantize_4_bits(rows: torch.Tensor, quantizer: Any, out: Any) -> None:
    """rows: [n, m]. out: an NVFP4Tensor, whose data is written."""
    if quantizer.row_scaled_nvfp4 or quantizer.nvfp4_use_4over6 or quantizer.with_amax_reduction:
        raise NotImplementedError("NVFP4 with other scales has no stand-in on the CPU")
    square = quantizer.with_2d_quantization
    if out._rowwise_data is not None:
        _quantize(rows, square, out._rowwise_data, out._rowwise_scale_inv, out._amax_rowwise)
    if out._columnwise_data is not None:
        columns = rows.t().contiguous()
        if quantizer.with_rht and rows.numel():
            columns = (columns.view(-1, _BLOCK).float() @ quantizer.rht_matrix.float()).view(columns.shape)
        _quantize(columns, square, out._columnwise_data, out._columnwise_scale_inv, out._amax_columnwise)


def plain_4_bits(tensor: Any, columnwise: bool) -> torch.Tensor:
    """The numbers of `tensor` in float32, [n, m]."""
    if columnwise:
        data, scales, amax = tensor._columnwise_data, tensor._columnwise_scale_inv, tensor._amax_columnwise
    else:
        data, scales, amax = tensor._rowwise_data, tensor._rowwise_scale_inv, tensor._amax_rowwise
    data = data.flatten(0, -2)
    codes = torch.stack([data & 15, data >> 4], -1).flatten(1).int()
    numbers = torch.where(codes >= 8, -1.0, 1.0) * _VALUES[codes & 7]
    factors = scales.view(torch.float8_e4m3fn).float() / _whole_scale(amax)
    factors = factors.repeat_interleave(_BLOCK, 1)[: numbers.shape[0], : numbers.shape[1]]
    return (numbers * factors).t() if columnwise else numbers * factors
