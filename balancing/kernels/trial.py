"""A trial of a kernel of attention: comparison with matrix products on every kind of pieces, and time.

Kernels have had faults that only some calls show: rows that are not written, heads and rows swapped where each sequence
has one query, masks from another corner. So small pieces of every kind are compared in float64, forward and backward,
with NaN in the memory that the results get. Backward gets the output and the logsumexp of more keys than its own.
"""

import contextlib
import math
import time
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch

from balancing.kernels.base import PRODUCTS, Kernel, Pieces, accumulation_dtype, merge, piece_ends, refusal
from balancing.kernels.pairs import causal_area
from balancing.upload import upload

__all__ = [
    "TOLERANCE",
    "AttentionHeads",
    "difference",
    "in_any_order",
    "kind_of",
    "leave_nan",
    "repeats",
    "samples",
    "seconds_a_flop",
    "seconds_of",
]

_LONG, _SHORT = 8192, (1024,) * 8  # tokens of the pieces that are timed
_ROUNDS = 3  # timed; one more runs before
TOLERANCE = {torch.bfloat16: 2e-2, torch.float16: 5e-3, torch.float32: 1e-4, torch.float64: 1e-10}  # in norm
_RESULTS = ("outputs", "logsumexps", "gradients of queries", "gradients of keys", "gradients of values")


class AttentionHeads(NamedTuple):
    """What kernels are chosen for.

    dtype: of queries, keys and values.
    heads, kv_heads: of queries, and of keys and values, on one rank.
    size, value_size: numbers of a head of queries and keys, and of values.
    window: whether queries see a window of the keys before them, in some layers.
    """

    dtype: torch.dtype
    heads: int
    kv_heads: int
    size: int
    value_size: int
    window: bool = False


def kind_of(pieces: Pieces) -> str:
    """The kind of pieces, in words."""
    if not pieces.causal:
        kind = "pieces without a mask"
    elif pieces.window is not None:
        kind = "pieces with a window"
    else:
        kind = "causal pieces" if pieces.queries == pieces.keys else "causal pieces with more keys than queries"
    return f"{kind}, of one query each" if max(pieces.queries) == 1 else kind


def samples(heads: AttentionHeads) -> dict[str, Pieces]:
    """Small pieces of every kind. Kernels take short cuts for pieces of one query each."""
    pieces = [
        Pieces((7, 130, 1, 64), (7, 130, 1, 64), True),
        Pieces((3, 1, 65), (9, 1, 200), True),
        Pieces((33, 70, 1), (50, 20, 140), False),
        Pieces((1, 1), (1, 1), True),
        Pieces((1, 1, 1), (1, 9, 130), True),
        Pieces((1, 1, 1), (3, 9, 130), False),
    ]
    if heads.window:
        pieces += [Pieces((3, 1, 65, 80), (9, 1, 200, 80), True, 5), Pieces((1, 1, 1), (1, 9, 130), True, 5)]
    return {kind_of(each): each for each in pieces}


def _inputs(
    device: torch.device, heads: AttentionHeads, pieces: Pieces
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """q, k, v and a gradient. Keys and values lie beside each other, as in the engine's workspace."""
    draw = torch.Generator(device).manual_seed(1)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=draw, device=device, dtype=torch.float32).to(heads.dtype)

    queries, keys = sum(pieces.queries), sum(pieces.keys)
    kv = normal(keys, heads.kv_heads, heads.size + heads.value_size)
    q, grad = normal(queries, heads.heads, heads.size), normal(queries, heads.heads, heads.value_size)
    return q, kv[..., : heads.size], kv[..., heads.size :], grad


def difference(kernel: Kernel, device: torch.device, heads: AttentionHeads, pieces: Pieces) -> tuple[str, float]:
    """The largest difference to float64, in norm, and of what. NaN counts as infinite."""
    q, k, v, grad = _inputs(device, heads, pieces)
    scale = heads.size**-0.5
    leave_nan(grad, q)
    if why := refusal(kernel, False, q, k, v, pieces) or refusal(kernel, True, q, k, v, pieces):
        raise ValueError(why)
    # First the kernel, so that no right result is left in the memory that it gets.
    found = [*kernel.forward(q, k, v, pieces, scale)]
    exact = q.double(), k.double(), v.double()
    with in_any_order():
        out, logsumexp = PRODUCTS.forward(*exact, pieces, scale)
    wanted = [out, logsumexp]
    # Backward gets results over more keys than those of the pieces, as from the engine.
    out, logsumexp = merge(out, logsumexp, out.flip(0), logsumexp + 0.5)
    rounded, kept = out.to(heads.dtype), logsumexp.to(accumulation_dtype(heads.dtype))
    leave_nan(q, k, v)
    found += kernel.backward(grad, q, k, v, rounded, kept, pieces, scale)
    with in_any_order():
        wanted += PRODUCTS.backward(grad.double(), *exact, rounded.double(), kept.double(), pieces, scale)
    largest = max(float(one.norm()) for one in wanted[2:])
    worst = "results", 0.0
    for what, one, other in zip(_RESULTS, found, wanted, strict=True):
        # Where each query sees one key, the gradients of scores are zero but for rounding.
        of = max(float(other.norm()), 1e-2 * largest if what in _RESULTS[2:] else 1e-30)
        error = float((one.double() - other).norm()) / of if one.shape == other.shape else math.inf
        error = math.inf if math.isnan(error) else error
        worst = max(worst, (what, error), key=lambda pair: pair[1])
    return worst


@contextlib.contextmanager
def in_any_order() -> Iterator[None]:
    """Products need not repeat bit for bit, which cuBLAS refuses to promise without a setting."""
    before, warns = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(False)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=warns)


def leave_nan(*like: torch.Tensor) -> None:
    """Have the memory that the next tensors like these get hold NaN."""
    for _ in range(2):
        [torch.full_like(x, math.nan, memory_format=torch.contiguous_format) for x in like]


def _causal(lengths: tuple[int, ...], device: torch.device) -> Pieces:
    ends = upload(piece_ends(lengths), device)
    return Pieces(lengths, lengths, True, ends=(ends, ends))


def repeats(kernel: Kernel, device: torch.device, heads: AttentionHeads) -> bool:
    """Whether gradients of a long piece are the same bits twice."""
    pieces, scale = _causal((_LONG,), device), heads.size**-0.5
    q, k, v, grad = _inputs(device, heads, pieces)
    try:
        out, logsumexp = kernel.forward(q, k, v, pieces, scale)
        first, *others = (kernel.backward(grad, q, k, v, out, logsumexp, pieces, scale) for _ in range(3))
    except Exception:  # does not run, so does not repeat
        return False
    return all(torch.equal(one, other) for again in others for one, other in zip(first, again, strict=True))


def seconds_a_flop(kernel: Kernel, device: torch.device, heads: AttentionHeads) -> float:
    """Forward and backward, mean of a long piece and of short ones; infinite if the kernel fails."""
    total, scale = 0.0, heads.size**-0.5
    for lengths in ((_LONG,), _SHORT):
        pieces = _causal(lengths, device)
        q, k, v, grad = _inputs(device, heads, pieces)

        def run() -> None:
            out, logsumexp = kernel.forward(q, k, v, pieces, scale)  # noqa: B023  (runs within this round)
            kernel.backward(grad, q, k, v, out, logsumexp, pieces, scale)  # noqa: B023

        try:
            total += seconds_of(run, device) / _flops(heads, lengths)
        except Exception:  # such as too little memory
            return math.inf
    return total / 2


def _flops(heads: AttentionHeads, lengths: Sequence[int]) -> float:
    """Operations of causal attention, forward and backward: two products, and five of the same sizes."""
    return 3.5 * 2 * causal_area(lengths) * heads.heads * (heads.size + heads.value_size)


def seconds_of(run: Callable[[], None], device: torch.device) -> float:
    """Mean of some runs, after one."""

    def now() -> float:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter()

    run()
    begin = now()
    for _ in range(_ROUNDS):
        run()
    return (now() - begin) / _ROUNDS
