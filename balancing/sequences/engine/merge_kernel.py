"""The merge of partial results of attention as one Triton kernel.

With operations of torch a merge is about twelve launches and moves each number several times. The kernel reads both
results once and writes one: 4 bytes and 2 in, 4 out for each number in bfloat16.
"""

from typing import Any

import torch
import triton
import triton.language as tl

__all__ = ["launch_options", "merge_kernel", "merge_rows_fused"]

_NUMBERS = 1024  # of one program: tokens x head size


@triton.jit
def merge_kernel(  # type: ignore[no-untyped-def]
    out,
    logsumexp,
    more_out,
    more_logsumexp,
    rows,  # of each token; not read without LISTED
    first,  # row of the first token without LISTED
    tokens,
    out_row,  # strides
    out_head,
    logsumexp_head,
    more_row,
    more_head,
    more_logsumexp_head,
    SIZE: tl.constexpr,  # of a head
    WIDTH: tl.constexpr,  # SIZE, rounded up to a power of two
    TOKENS: tl.constexpr,  # of a program
    LISTED: tl.constexpr,
):
    """One head of TOKENS tokens: out and logsumexp of attention to the keys of both."""
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    head = tl.program_id(1).to(tl.int64)
    real = token < tokens
    row = tl.load(rows + token, mask=real, other=0) if LISTED else first + token
    row, token = row.to(tl.int64), token.to(tl.int64)
    at = logsumexp + head * logsumexp_head + row
    own = tl.load(at, mask=real, other=0.0)
    more = tl.load(more_logsumexp + head * more_logsumexp_head + token, mask=real, other=0.0)
    largest = tl.maximum(own, more)
    both = largest + tl.log(tl.exp(own - largest) + tl.exp(more - largest))
    weight, more_weight = tl.exp(own - both), tl.exp(more - both)
    column = tl.arange(0, WIDTH)
    inside = real[:, None] & (column < SIZE)[None, :]
    target = out + row[:, None] * out_row + head * out_head + column[None, :]
    source = more_out + token[:, None] * more_row + head * more_head + column[None, :]
    kept = tl.load(target, mask=inside, other=0.0)
    added = tl.load(source, mask=inside, other=0.0).to(kept.dtype)
    tl.store(target, kept * weight[:, None] + added * more_weight[:, None], mask=inside)
    tl.store(at, both, mask=real)


def launch_options(head_size: int) -> dict[str, int]:
    """Constants of the kernel for heads of this size, and warps of a program."""
    width = triton.next_power_of_2(head_size)
    return {"SIZE": head_size, "WIDTH": width, "TOKENS": max(1, _NUMBERS // width), "num_warps": 4}


def merge_rows_fused(
    out: torch.Tensor,
    logsumexp: torch.Tensor,
    more_out: torch.Tensor,
    more_logsumexp: torch.Tensor,
    rows: Any,
) -> None:
    """As `merging.merge_rows`, in one launch. Numbers of a head, and logsumexps of a head's tokens, are adjacent."""
    tokens, heads, size = more_out.shape
    assert out.stride(2) == more_out.stride(2) == logsumexp.stride(1) == more_logsumexp.stride(1) == 1
    listed = isinstance(rows, torch.Tensor)
    options = launch_options(size)
    merge_kernel[(triton.cdiv(tokens, options["TOKENS"]), heads)](
        *(out, logsumexp, more_out, more_logsumexp, rows if listed else logsumexp),
        0 if listed else rows.start,
        tokens,
        *(out.stride(0), out.stride(1), logsumexp.stride(0)),
        *(more_out.stride(0), more_out.stride(1), more_logsumexp.stride(0)),
        LISTED=listed,
        **options,
    )
