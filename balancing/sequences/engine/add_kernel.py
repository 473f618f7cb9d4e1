"""The sum of gradients into rows that a rank already has, as one Triton kernel.

With operations of torch, gradients of keys and of values are each chosen, converted to the type of sums and added: up
to six launches and twice the bytes. The kernel reads both and adds them to their rows in one launch.
"""

from typing import Any

import torch
import triton
import triton.language as tl

__all__ = ["add_kernel", "add_rows_fused", "launch_options"]

_NUMBERS = 1024  # of one program: tokens x head size


@triton.jit
def add_kernel(  # type: ignore[no-untyped-def]
    total,
    part,
    more,  # whose numbers follow those of `part` in a row; not read where MORE is 0
    rows,  # of each token; not read without LISTED
    which,  # tokens of `part` and `more` that are added; not read without CHOSEN
    first,  # row of the first token without LISTED
    tokens,
    total_row,  # strides
    total_head,
    part_row,
    part_head,
    more_row,
    more_head,
    SIZE: tl.constexpr,  # of a head of `part`
    MORE: tl.constexpr,  # of a head of `more`
    WIDTH: tl.constexpr,  # the larger of both, rounded up to a power of two
    TOKENS: tl.constexpr,  # of a program
    LISTED: tl.constexpr,
    CHOSEN: tl.constexpr,
):
    """One head of TOKENS tokens."""
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    head = tl.program_id(1).to(tl.int64)
    real = token < tokens
    row = tl.load(rows + token, mask=real, other=0) if LISTED else first + token
    source = tl.load(which + token, mask=real, other=0) if CHOSEN else token
    row, source = row.to(tl.int64), source.to(tl.int64)
    column = tl.arange(0, WIDTH)
    target = total + row[:, None] * total_row + head * total_head + column[None, :]
    inside = real[:, None] & (column < SIZE)[None, :]
    kept = tl.load(target, mask=inside, other=0.0)
    given = tl.load(part + source[:, None] * part_row + head * part_head + column[None, :], mask=inside, other=0.0)
    tl.store(target, kept + given.to(kept.dtype), mask=inside)
    if MORE:
        inside = real[:, None] & (column < MORE)[None, :]
        kept = tl.load(target + SIZE, mask=inside, other=0.0)
        given = tl.load(more + source[:, None] * more_row + head * more_head + column[None, :], mask=inside, other=0.0)
        tl.store(target + SIZE, kept + given.to(kept.dtype), mask=inside)


def launch_options(head_size: int, more_size: int) -> dict[str, int]:
    """Constants of the kernel for heads of these sizes, and warps of a program. more_size: 0 for one part."""
    width = triton.next_power_of_2(max(head_size, more_size))
    tokens = max(1, _NUMBERS // width)
    return {"SIZE": head_size, "MORE": more_size, "WIDTH": width, "TOKENS": tokens, "num_warps": 4}


def add_rows_fused(total: torch.Tensor, rows: Any, parts: tuple[torch.Tensor, ...], which: Any = None) -> None:
    """As `merging.add_rows`, in one launch, of one part or two. Numbers of a head are adjacent in all of them."""
    part, more = parts if len(parts) > 1 else (*parts, parts[0])
    assert total.stride(2) == part.stride(2) == more.stride(2) == 1
    listed = isinstance(rows, torch.Tensor)
    tokens = len(rows) if listed else rows.stop - rows.start
    options = launch_options(part.shape[2], more.shape[2] if len(parts) > 1 else 0)
    add_kernel[(triton.cdiv(tokens, options["TOKENS"]), part.shape[1])](
        *(total, part, more, rows if listed else total, total if which is None else which),
        0 if listed else rows.start,
        tokens,
        *(total.stride(0), total.stride(1), part.stride(0), part.stride(1), more.stride(0), more.stride(1)),
        LISTED=listed,
        CHOSEN=which is not None,
        **options,
    )
