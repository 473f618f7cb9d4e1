"""Kernels: attention of some queries to some keys, with the logsumexp for merging it with attention to other keys.

A rank computes attention in pieces: its queries against keys that arrive in turns. A kernel computes a batch of pieces.
Forward gives the output and the logarithm of the softmax's denominator (logsumexp). Backward gives the gradients of a
piece from the output and logsumexp over all keys. Pieces may differ in length and are concatenated without padding.

Masks are full, or causal from the bottom right: the last query sees all keys, the query before it all but the last key.
With a window of w a query sees only the last w + 1 of these keys. Query head h reads key-value head
h // (heads / kv_heads), as usual for grouped-query and multi-query attention.

Here are the kernels that run anywhere: PyTorch's flash attention for CPUs, float64 included, and matrix products in
tiles of queries, exact and slow.
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
import torch

from balancing.kernels.pairs import MOST_TOKENS
from balancing.upload import upload

__all__ = [
    "CPU",
    "PRODUCTS",
    "Kernel",
    "OfOneSize",
    "Pieces",
    "accumulation_dtype",
    "bounds",
    "merge",
    "piece_ends",
    "refusal",
    "sink_gradient",
    "too_large",
    "window_arguments",
    "with_sink",
]

_MOST_ELEMENTS = 2**31 - 1  # of a tensor whose offsets have 32 bits
_TILE = 512  # queries of a tile of the matrix-product kernel


class Pieces(NamedTuple):
    """The pieces of one batch.

    queries, keys: number of tokens of each piece, at least one; causal pieces have at least as many keys as queries.
    causal: whether all pieces have the causal mask; else all are full.
    window: keys before its own that a query of a causal piece sees; None for all.
    ends: two tensors, int32 [piece + 1]: cumulative queries and cumulative keys, on the GPU. If None, the kernel makes
        them.
    """

    queries: tuple[int, ...]
    keys: tuple[int, ...]
    causal: bool
    window: int | None = None
    ends: tuple[torch.Tensor, torch.Tensor] | None = None


class Kernel(Protocol):
    """An implementation of attention.

    q: [query tokens, heads, head_size].
    k: [key tokens, kv_heads, head_size], with any stride between tokens and heads.
    v: [key tokens, kv_heads, value_size], with any stride between tokens and heads. Another size than that of keys
        needs a kernel that takes it; `OfOneSize` makes one.
    out: [query tokens, heads, value_size].
    logsumexp: [heads, query tokens], in `accumulation_dtype`.
    pieces: the pieces of the batch, in the order of the tokens.
    scale: factor of the scores.
    """

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, pieces: Pieces, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Output and logsumexp."""

    def backward(
        self,
        grad: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        logsumexp: torch.Tensor,
        pieces: Pieces,
        scale: float,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Gradients of q, k and v. `out` and `logsumexp` are those of attention to all keys, not only to `k`."""


def refusal(kernel: Kernel, backward: bool, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, pieces: Pieces) -> str:
    """Why a kernel does not take a call, as far as it knows before it runs; "" if it takes it.

    backward: the direction. A kernel that knows has a method `refusal` with the other arguments of this function.
    """
    refuse = getattr(kernel, "refusal", None)
    return "" if refuse is None else refuse(backward, q, k, v, pieces)


def generators(kernel: Kernel) -> list[torch.Generator]:
    """The random generators of a kernel, which a CUDA graph of its calls must know. A kernel that has some has an
    attribute of this name."""
    return list(getattr(kernel, "generators", ()))


def too_large(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> str:
    """For kernels with offsets of 32 bits: why they do not take tensors of these shapes; "" if they do.

    Keys and values may lie beside each other, in a tensor of twice the size.
    """
    elements = max(len(q) * q.shape[1], 2 * len(k) * k.shape[1]) * max(k.shape[2], v.shape[2])
    return f"{elements} elements are more than {_MOST_ELEMENTS}" if elements > _MOST_ELEMENTS else ""


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """The type in which partial results are merged and gradients summed: float64 for float64, else float32."""
    return torch.float64 if dtype is torch.float64 else torch.float32


def merge(
    out: torch.Tensor,
    logsumexp: torch.Tensor,
    more_out: torch.Tensor,
    more_logsumexp: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and logsumexp of attention to two sets of keys together, from the results for each set.

    out: [tokens, heads, head_size], in `accumulation_dtype`.
    logsumexp: [heads, tokens], in `accumulation_dtype`.
    more_out: [tokens, heads, head_size], of the other keys.
    more_logsumexp: [heads, tokens], of the other keys.
    """
    both = torch.logaddexp(logsumexp, more_logsumexp)
    weight, more_weight = ((part - both).exp().transpose(0, 1)[..., None] for part in (logsumexp, more_logsumexp))
    return out * weight + more_out.to(out.dtype) * more_weight, both


def with_sink(out: torch.Tensor, logsumexp: torch.Tensor, sink: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and logsumexp with the sink's score added to each softmax. The sink has no value.

    out: [tokens, heads, head_size], of attention to all keys.
    logsumexp: [heads, tokens], of attention to all keys, in `accumulation_dtype`.
    sink: [heads], scores.

    `Kernel.backward` gives the right gradients of q, k and v from these results, since the sink only takes a share of
    the weights and adds nothing to the output.
    """
    both = torch.logaddexp(logsumexp, sink.to(logsumexp.dtype)[:, None])
    return out * (logsumexp - both).exp().t()[..., None], both


def sink_gradient(grad: torch.Tensor, out: torch.Tensor, logsumexp: torch.Tensor, sink: torch.Tensor) -> torch.Tensor:
    """[heads], the gradient of the sink's scores: minus the sink's weight times grad x out, summed over queries.

    grad: [tokens, heads, head_size].
    out, logsumexp: [tokens, heads, head_size] and [heads, tokens], as from `with_sink`.
    sink: [heads].
    """
    weights = (sink.to(logsumexp.dtype)[:, None] - logsumexp).exp()
    products = (grad.to(logsumexp.dtype) * out.to(logsumexp.dtype)).sum(-1)
    return -(weights * products.t()).sum(1).to(sink.dtype)


class OfOneSize:
    """A kernel that takes values of another size than keys, made from one that does not: the smaller heads are padded
    with zeros, which add nothing to scores or outputs."""

    def __init__(self, kernel: Kernel) -> None:
        self._kernel = kernel

    def refusal(self, backward, q, k, v, pieces):
        return refusal(self._kernel, backward, q, k, v, pieces)

    @property
    def generators(self):
        return generators(self._kernel)

    def forward(self, q, k, v, pieces, scale):
        wide = max(k.shape[2], v.shape[2])
        wide_q, wide_k, wide_v = (_widened(x, wide) for x in (q, k, v))
        out, logsumexp = self._kernel.forward(wide_q, wide_k, wide_v, pieces, scale)
        return out[..., : v.shape[2]], logsumexp

    def backward(self, grad, q, k, v, out, logsumexp, pieces, scale):
        wide = max(k.shape[2], v.shape[2])
        wide_q, wide_k, wide_v = (_widened(x, wide) for x in (q, k, v))
        gradients = self._kernel.backward(
            _widened(grad, wide), wide_q, wide_k, wide_v, _widened(out, wide), logsumexp, pieces, scale
        )
        return tuple(found[..., : x.shape[2]] for found, x in zip(gradients, (q, k, v), strict=True))


class _OneByOne:
    """A kernel that computes one piece after the other."""

    def forward(self, q, k, v, pieces, scale):
        if len(pieces.queries) == 1:
            return self._forward(q, k, v, pieces.causal, pieces.window, scale)
        out = q.new_empty(*q.shape[:2], v.shape[2])
        logsumexp = q.new_empty(q.shape[1], q.shape[0], dtype=accumulation_dtype(q.dtype))
        mask = pieces.causal, pieces.window
        for rows, keys in _rows(pieces):
            out[rows], logsumexp[:, rows] = self._forward(q[rows], k[keys], v[keys], *mask, scale)
        return out, logsumexp

    def backward(self, grad, q, k, v, out, logsumexp, pieces, scale):
        if len(pieces.queries) == 1:
            return self._backward(grad, q, k, v, out, logsumexp, pieces.causal, pieces.window, scale)
        dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        mask = pieces.causal, pieces.window
        for rows, keys in _rows(pieces):
            dq[rows], dk[keys], dv[keys] = self._backward(
                grad[rows], q[rows], k[keys], v[keys], out[rows], logsumexp[:, rows], *mask, scale
            )
        return dq, dk, dv

    def _forward(self, q, k, v, causal, window, scale):
        raise NotImplementedError

    def _backward(self, grad, q, k, v, out, logsumexp, causal, window, scale):
        raise NotImplementedError


class _Cpu(_OneByOne):
    """PyTorch's flash attention for CPUs.

    Its causal mask is from the top left, so a causal piece with more keys than queries is cut into the keys that all
    queries see and a square. It has no windows, so pieces with a window are computed by matrix products.
    """

    def _forward(self, q, k, v, causal, window, scale):
        if window is not None:
            return PRODUCTS._forward(q, k, v, causal, window, scale)
        seen = k.shape[0] - q.shape[0]
        if causal and seen:
            full = self._forward(q, k[:seen], v[:seen], False, None, scale)
            square = self._forward(q, k[seen:], v[seen:], True, None, scale)
            out, logsumexp = merge(full[0].to(full[1].dtype), full[1], *square)
            return out.to(q.dtype), logsumexp
        out, logsumexp = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            *map(_batch, (q, k, v)), 0.0, causal, scale=scale
        )
        return _unbatch(out), logsumexp[0]

    def _backward(self, grad, q, k, v, out, logsumexp, causal, window, scale):
        if window is not None:
            return PRODUCTS._backward(grad, q, k, v, out, logsumexp, causal, window, scale)
        seen = k.shape[0] - q.shape[0]
        if causal and seen:
            full = self._backward(grad, q, k[:seen], v[:seen], out, logsumexp, False, None, scale)
            square = self._backward(grad, q, k[seen:], v[seen:], out, logsumexp, True, None, scale)
            return full[0] + square[0], torch.cat((full[1], square[1])), torch.cat((full[2], square[2]))
        gradients = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            *map(_batch, (grad, q, k, v, out)), logsumexp[None], 0.0, causal, scale=scale
        )
        return tuple(map(_unbatch, gradients))


class _Products(_OneByOne):
    """Matrix products, one tile of queries at a time. With a window only the keys in the tile's windows are used."""

    def _forward(self, q, k, v, causal, window, scale):
        dtype, sharing = accumulation_dtype(q.dtype), q.shape[1] // k.shape[1]
        k, v = (x.to(dtype).repeat_interleave(sharing, 1) for x in (k, v))
        outs, logsumexps = [], []
        for rows in _tiles(len(q)):
            keys = _seen(rows, len(k) - len(q), len(k), window)
            scores = torch.einsum("qhd,khd->hqk", q[rows].to(dtype), k[keys]) * scale
            if causal:
                scores.masked_fill_(_hidden(rows, keys, len(k) - len(q), q.device, window), float("-inf"))
            logsumexps.append(scores.logsumexp(-1))
            weights = (scores - logsumexps[-1][..., None]).exp()
            outs.append(torch.einsum("hqk,khd->qhd", weights, v[keys]))
        return torch.cat(outs).to(q.dtype), torch.cat(logsumexps, 1)

    def _backward(self, grad, q, k, v, out, logsumexp, causal, window, scale):
        dtype, sharing = accumulation_dtype(q.dtype), q.shape[1] // k.shape[1]
        wide_k, wide_v = (x.to(dtype).repeat_interleave(sharing, 1) for x in (k, v))
        dk, dv, dqs = torch.zeros_like(wide_k), torch.zeros_like(wide_v), []
        for rows in _tiles(len(q)):
            tile, tile_grad = q[rows].to(dtype), grad[rows].to(dtype)
            keys = _seen(rows, len(k) - len(q), len(k), window)
            weights = (torch.einsum("qhd,khd->hqk", tile, wide_k[keys]) * scale - logsumexp[:, rows, None]).exp()
            if causal:
                weights.masked_fill_(_hidden(rows, keys, len(k) - len(q), q.device, window), 0.0)
            correction = (tile_grad * out[rows].to(dtype)).sum(-1).transpose(0, 1)[..., None]
            scores = weights * (torch.einsum("qhd,khd->hqk", tile_grad, wide_v[keys]) - correction) * scale
            dqs.append(torch.einsum("hqk,khd->qhd", scores, wide_k[keys]))
            dk[keys] += torch.einsum("hqk,qhd->khd", scores, tile)
            dv[keys] += torch.einsum("hqk,qhd->khd", weights, tile_grad)
        dk, dv = (x.unflatten(1, (-1, sharing)).sum(2) for x in (dk, dv))
        return torch.cat(dqs).to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)


CPU, PRODUCTS = _Cpu(), _Products()


def _widened(x: torch.Tensor, size: int) -> torch.Tensor:
    return x if x.shape[2] == size else torch.nn.functional.pad(x, (0, size - x.shape[2]))


def _batch(x: torch.Tensor) -> torch.Tensor:
    return x.transpose(0, 1)[None]


def _unbatch(x: torch.Tensor) -> torch.Tensor:
    return x[0].transpose(0, 1)


def _rows(pieces: Pieces) -> list[tuple[slice, slice]]:
    found, row, key = [], 0, 0
    for queries, keys in zip(pieces.queries, pieces.keys, strict=True):
        found.append((slice(row, row + queries), slice(key, key + keys)))
        row, key = row + queries, key + keys
    return found


def _tiles(queries: int) -> list[slice]:
    return [slice(start, min(start + _TILE, queries)) for start in range(0, queries, _TILE)]


def _hidden(rows: slice, keys: slice, before: int, device: torch.device, window: int | None) -> torch.Tensor:
    """bool [query, key], True if the causal mask or the window hides the key. before: keys before the first query."""
    row = torch.arange(rows.start, rows.stop, device=device)[:, None] + before
    key = torch.arange(keys.start, keys.stop, device=device)
    return key > row if window is None else (key > row) | (key < row - window)


def _seen(rows: slice, before: int, keys: int, window: int | None) -> slice:
    """The slice of `keys` keys that a tile of queries may see; all without a window. before: as in `_hidden`."""
    return slice(0, keys) if window is None else slice(max(0, rows.start + before - window), rows.stop + before)


def window_arguments(pieces: Pieces) -> dict[str, int]:
    """The window as arguments of flash attention: numbers of keys before and after a query's own key."""
    return {} if pieces.window is None else {"window_size_left": pieces.window, "window_size_right": 0}


def piece_ends(lengths: Sequence[int]) -> np.ndarray:
    """int32 [piece + 1], cumulative lengths of the pieces of a call. Raises ValueError if they do not fit int32."""
    ends = np.cumsum((0, *lengths))
    if ends[-1] > MOST_TOKENS:
        raise ValueError(f"one call of attention has {ends[-1]} rows, and kernels take {MOST_TOKENS}; use more ranks")
    return ends.astype(np.int32)


def bounds(pieces: Pieces, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, int, int]:
    """Cumulative lengths and maximum lengths of queries and keys, the arguments of flash attention."""
    queries, keys = pieces.ends or (upload(piece_ends(part), device) for part in (pieces.queries, pieces.keys))
    return queries, keys, max(pieces.queries), max(pieces.keys)
