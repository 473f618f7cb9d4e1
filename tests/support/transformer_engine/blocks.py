"""Numbers in 8 bits with a scale for each block of 128 x 128 numbers of a weight, or of 1 x 128 of tokens.

"Columnwise" data is the transpose: of tokens, its blocks are 128 tokens. Scales are float32, powers of two or not.
Those of 1 x 128 blocks are stored block by block, [blocks, rows].
"""

from typing import Any

import torch

from tests.support.transformer_engine.cpp_module import stands_in
from tests.support.transformer_engine.enums import TORCH_TYPE
from tests.support.transformer_engine.numbers import in_8_bits, scale_of

__all__ = ["plain_blocks", "quantize_blocks_of_128"]

_BLOCK = 128


def _largest_of_blocks(rows: torch.Tensor, block: tuple[int, int]) -> torch.Tensor:
    """[n, m] -> the largest number of each block, [blocks of n, blocks of m]; the last blocks may be smaller."""
    height, width = block
    missing = -rows.shape[0] % height, -rows.shape[1] % width
    padded = torch.nn.functional.pad(rows.float().abs(), (0, missing[1], 0, missing[0]))
    down, across = padded.shape[0] // height, padded.shape[1] // width
    return padded.view(down, height, across, width).amax((1, 3)) if padded.numel() else padded.new_zeros(down, across)


def _of_each_number(scales: torch.Tensor, block: tuple[int, int], shape: torch.Size) -> torch.Tensor:
    """Scales of blocks, [blocks, blocks] or more -> of each number, `shape`."""
    whole = scales.repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)
    return whole[: shape[0], : shape[1]]


def _quantize(rows: torch.Tensor, quantizer: Any, data: torch.Tensor, inverse: torch.Tensor) -> None:
    """rows [n, m] -> data [n, m] and inverse scales, in blocks along m."""
    kind = TORCH_TYPE[int(quantizer.dtype)]
    block = (_BLOCK, _BLOCK) if quantizer.block_scaling_dim == 2 else (1, _BLOCK)
    largest = _largest_of_blocks(rows, block).clamp_min(quantizer.amax_epsilon)
    scales = scale_of(largest, torch.finfo(kind).max, quantizer.force_pow_2_scales)
    data.copy_(in_8_bits(rows.float() * _of_each_number(scales, block, rows.shape), kind).view(data.shape))
    stored = scales.reciprocal() if quantizer.block_scaling_dim == 2 else scales.reciprocal().t()
    inverse.zero_()[: stored.shape[0], : stored.shape[1]].copy_(stored)


def quantize_blocks_of_128(rows: torch.Tensor, quantizer: Any, out: Any) -> None:
    if out._rowwise_data is not None:
        _quantize(rows, quantizer, out._rowwise_data, out._rowwise_scale_inv)
    if out._columnwise_data is not None:
        _quantize(rows.t(), quantizer, out._columnwise_data, out._columnwise_scale_inv)


def plain_blocks(tensor: Any, columnwise: bool) -> torch.Tensor:
    data, inverse = tensor._rowwise_data, tensor._rowwise_scale_inv
    if columnwise:
        data, inverse = tensor._columnwise_data, tensor._columnwise_scale_inv
    block = (_BLOCK, _BLOCK) if tensor._is_2D_scaled else (1, _BLOCK)
    stored = data.reshape(-1, data.shape[-1]) if not columnwise else data.reshape(data.shape[0], -1)
    factors = _of_each_number(inverse if tensor._is_2D_scaled else inverse.t(), block, stored.shape)
    numbers = stored.view(TORCH_TYPE[int(tensor._fp8_dtype)]).float() * factors
    return numbers.t() if columnwise else numbers.view(data.shape)


@stands_in
def fp8_block_scaling_compute_partial_amax(
    tensor: torch.Tensor, amax: torch.Tensor, h: int, w: int, start_offset: int, block_len: int
) -> None:
    """The largest number of each block of a matrix [h, w], of which `tensor` has the numbers from `start_offset` on."""
    whole = torch.zeros(h * w)
    whole[start_offset : start_offset + tensor.numel()] = tensor.float().view(-1)
    largest = _largest_of_blocks(whole.view(h, w), (block_len, block_len))
    amax[: largest.shape[0], : largest.shape[1]].copy_(largest)


@stands_in
def fp8_block_scaling_partial_cast(
    inp: torch.Tensor,
    out: torch.Tensor,
    scale: torch.Tensor,
    h: int,
    w: int,
    start_offset: int,
    block_len: int,
    out_dtype: Any,
) -> None:
    """Numbers of a matrix [h, w] from `start_offset` on, with the scale of the block that each is in."""
    scales = _of_each_number(scale, (block_len, block_len), torch.Size((h, w))).reshape(-1)
    scaled = inp.float().view(-1) * scales[start_offset : start_offset + inp.numel()]
    out.copy_(in_8_bits(scaled, TORCH_TYPE[int(out_dtype)]))
