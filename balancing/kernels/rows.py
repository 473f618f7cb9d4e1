"""Triton kernels to merge partial results of attention, and to add gradients to a rank's rows.

- Merge: with operations of torch a merge is about twelve launches and moves each element several times. The kernel
  reads both results once and writes one: for each bfloat16 element it reads 4 and 2 bytes and writes 4.
- Add: with operations of torch the gradients of keys and of values are each selected, converted to the type of sums and
  added, in up to six launches and with twice the bytes. The kernel reads both and adds them to their rows.

Triton compiles a kernel anew for integer arguments that are 1 or multiples of 16, and for each combination of
constants. That takes up to a second, while all other ranks wait. Numbers of tokens and rows change in every
micro-batch, so they are not specialized (`do_not_specialize`), and the first launch for a size of heads compiles the
kernel for all combinations of constants.
"""

import itertools
from typing import Any

import torch
import triton
import triton.language as tl

__all__ = ["add_kernel", "add_options", "add_rows_fused", "merge_kernel", "merge_options", "merge_rows_fused"]

_NUMBERS = 1024  # elements of one Triton program: tokens x head size
_launched: set[tuple[Any, ...]] = set()  # kernels with the types, strides and options for which they are compiled


@triton.jit(do_not_specialize=["first", "tokens", "logsumexp_head", "more_logsumexp_head"])
def merge_kernel(  # type: ignore[no-untyped-def]
    out,
    logsumexp,
    more_out,
    more_logsumexp,
    rows,  # row of each token; read only with LISTED
    first,  # row of the first token; used only without LISTED
    tokens,
    logsumexp_head,  # strides, from here on
    more_logsumexp_head,
    out_row,
    out_head,
    more_row,
    more_head,
    SIZE: tl.constexpr,  # of a head
    WIDTH: tl.constexpr,  # SIZE, rounded up to a power of two
    TOKENS: tl.constexpr,  # of a program
    LISTED: tl.constexpr,
):
    """One head of TOKENS tokens: merges out and logsumexp of attention to two sets of keys."""
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    head = tl.program_id(1).to(tl.int64)
    real = token < tokens
    row = tl.load(rows + token, mask=real, other=0) if LISTED else first + token
    row, token = row.to(tl.int64), token.to(tl.int64)
    at = logsumexp + head * logsumexp_head + row
    before = tl.load(at, mask=real, other=0.0)
    more = tl.load(more_logsumexp + head * more_logsumexp_head + token, mask=real, other=0.0)
    largest = tl.maximum(before, more)
    both = largest + tl.log(tl.exp(before - largest) + tl.exp(more - largest))
    weight, more_weight = tl.exp(before - both), tl.exp(more - both)
    column = tl.arange(0, WIDTH)
    inside = real[:, None] & (column < SIZE)[None, :]
    target = out + row[:, None] * out_row + head * out_head + column[None, :]
    source = more_out + token[:, None] * more_row + head * more_head + column[None, :]
    kept = tl.load(target, mask=inside, other=0.0)
    added = tl.load(source, mask=inside, other=0.0).to(kept.dtype)
    tl.store(target, kept * weight[:, None] + added * more_weight[:, None], mask=inside)
    tl.store(at, both, mask=real)


def merge_options(head_size: int) -> dict[str, int]:
    """Constants of `merge_kernel` for heads of this size, and warps of a program."""
    width = triton.next_power_of_2(head_size)
    return {"SIZE": head_size, "WIDTH": width, "TOKENS": max(1, _NUMBERS // width), "num_warps": 4}


def merge_rows_fused(
    out: torch.Tensor,
    logsumexp: torch.Tensor,
    more_out: torch.Tensor,
    more_logsumexp: torch.Tensor,
    rows: Any,
) -> None:
    """As `merging.merge_rows`, in one launch. Needs a stride of 1 in the last dimension of all tensors."""
    tokens, heads, size = more_out.shape
    assert out.stride(2) == more_out.stride(2) == logsumexp.stride(1) == more_logsumexp.stride(1) == 1
    listed = isinstance(rows, torch.Tensor)
    options = merge_options(size)
    _launch(
        merge_kernel,
        (triton.cdiv(tokens, options["TOKENS"]), heads),
        (out, logsumexp, more_out, more_logsumexp, rows if listed else _whole_numbers(logsumexp)),
        (0 if listed else rows.start, tokens, logsumexp.stride(0), more_logsumexp.stride(0)),
        (*out.stride()[:2], *more_out.stride()[:2]),
        options,
        LISTED=listed,
    )


@triton.jit(do_not_specialize=["first", "tokens", "terms"])
def add_kernel(  # type: ignore[no-untyped-def]
    total,
    part,
    more,  # elements that follow those of `part` in a row; not read if MORE is 0
    rows,  # row of each token; read only with LISTED
    which,  # [term, token], tokens of `part` and `more` to sum, or -1; read only with SUMMED
    first,  # row of the first token; used only without LISTED
    tokens,
    terms,
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
    SUMMED: tl.constexpr,
    STORES: tl.constexpr,
):
    """One head of TOKENS rows of `total`: adds `part` and `more` to them, or with STORES replaces them."""
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    head = tl.program_id(1).to(tl.int64)
    real = token < tokens
    row = tl.load(rows + token, mask=real, other=0) if LISTED else first + token
    row = row.to(tl.int64)
    column = tl.arange(0, WIDTH)
    target = total + row[:, None] * total_row + head * total_head + column[None, :]
    part += head * part_head
    _add_part(target, part, which, token, tokens, terms, part_row, real, column, SIZE, SUMMED, STORES)
    if MORE:
        more += head * more_head
        _add_part(target + SIZE, more, which, token, tokens, terms, more_row, real, column, MORE, SUMMED, STORES)


@triton.jit
def _add_part(  # type: ignore[no-untyped-def]
    target,
    part,
    which,
    token,
    tokens,
    terms,
    part_row,
    real,
    column,
    SIZE: tl.constexpr,
    SUMMED: tl.constexpr,
    STORES: tl.constexpr,
):
    """Adds rows of one head of `part` to `target`, term after term; with STORES to zeros instead."""
    inside = real[:, None] & (column < SIZE)[None, :]
    kept = tl.load(target, mask=inside & (not STORES), other=0.0)
    kept = kept if kept.dtype == tl.float64 else kept.to(tl.float32)
    if SUMMED:
        given = tl.zeros_like(kept)
        at = which + token
        for _ in range(terms):
            source = tl.load(at, mask=real, other=-1).to(tl.int64)
            there = inside & (source >= 0)[:, None]
            given += tl.load(part + source[:, None] * part_row + column[None, :], mask=there, other=0.0).to(kept.dtype)
            at += tokens
    else:
        source = token.to(tl.int64)
        given = tl.load(part + source[:, None] * part_row + column[None, :], mask=inside, other=0.0).to(kept.dtype)
    tl.store(target, kept + given, mask=inside)


def add_options(head_size: int, more_size: int) -> dict[str, int]:
    """Constants of `add_kernel` for heads of these sizes, and warps of a program. more_size: 0 for one part."""
    width = triton.next_power_of_2(max(head_size, more_size))
    tokens = max(1, _NUMBERS // width)
    return {"SIZE": head_size, "MORE": more_size, "WIDTH": width, "TOKENS": tokens, "num_warps": 4}


def add_rows_fused(
    total: torch.Tensor,
    rows: Any,
    parts: tuple[torch.Tensor, ...],
    terms: torch.Tensor | None = None,
    stores: bool = False,
) -> None:
    """As `merging.add_rows`, in one launch, of one or two parts. Needs a stride of 1 in the last dimension."""
    part, more = parts if len(parts) > 1 else (*parts, parts[0])
    assert total.stride(2) == part.stride(2) == more.stride(2) == 1
    listed = isinstance(rows, torch.Tensor)
    tokens = len(rows) if listed else rows.stop - rows.start
    options, unread = add_options(part.shape[2], more.shape[2] if len(parts) > 1 else 0), _whole_numbers(total)
    _launch(
        add_kernel,
        (triton.cdiv(tokens, options["TOKENS"]), part.shape[1]),
        (total, part, more, rows if listed else unread, unread if terms is None else terms),
        (0 if listed else rows.start, tokens, 0 if terms is None else len(terms)),
        (*total.stride()[:2], *part.stride()[:2], *more.stride()[:2]),
        options | {"STORES": stores},
        LISTED=listed,
        SUMMED=terms is not None,
    )


def _whole_numbers(unread: torch.Tensor) -> torch.Tensor:
    """An int32 pointer to pass in place of a list of rows that is not read."""
    return unread.view(torch.int32)


def _launch(
    kernel: Any,
    grid: tuple[int, int],
    pointers: tuple[torch.Tensor, ...],
    planned: tuple[int, ...],
    strides: tuple[int, ...],
    options: dict[str, int],
    **ways: bool,
) -> None:
    """Launch a kernel. Before its first launch with these types, strides and options, compile it for all `ways`.

    planned: integer arguments that change with every plan.
    ways: boolean constants that change with every plan.
    """
    shape = kernel.__name__, pointers[0].device, *(x.dtype for x in pointers), *strides, *options.values()
    if shape not in _launched:
        _launched.add(shape)
        for other in itertools.product((False, True), repeat=len(ways)):
            chosen = dict(zip(ways, other, strict=True))
            kernel.warmup(*pointers, *planned, *strides, grid=grid, **chosen, **options)
    kernel[grid](*pointers, *planned, *strides, **ways, **options)
