"""flash-attn's own Python on a CPU: what stands in for its C++ module `flash_attn_2_cuda`.

Matrix products in float32, and the demands of `csrc/flash_attn/flash_api.cpp` on what it is called with.
"""

import sys
import types
from collections.abc import Iterator
from typing import Any

import torch

from tests.support.packages_apart import add_to_path

__all__ = ["install"]


def install() -> None:
    """Have `import flash_attn` work in this process, for good, on tensors of the CPU."""
    add_to_path("flash_attn")
    module = types.ModuleType("flash_attn_2_cuda")
    module.varlen_fwd, module.varlen_bwd = torch.no_grad()(_forward), torch.no_grad()(_backward)  # type: ignore
    sys.modules[module.__name__] = module
    custom_op = torch.library.custom_op

    def for_any_device(name: str, *args: Any, device_types: Any = None, **options: Any) -> Any:
        return custom_op(name, *args, **options)

    torch.library.custom_op = for_any_device  # type: ignore
    try:
        import flash_attn  # noqa: F401
    finally:
        torch.library.custom_op = custom_op


def _check(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *bounds: torch.Tensor) -> None:
    for tensor in (q, k, v):
        assert tensor.dtype in (torch.float16, torch.bfloat16) and tensor.dtype == q.dtype
        assert tensor.dim() == 3 and tensor.stride(-1) == 1
    assert q.shape[2] % 8 == 0 and q.shape[2] <= 256 and q.shape[1] % k.shape[1] == 0
    for bound in bounds:
        assert bound.dtype is torch.int32 and bound.is_contiguous() and len(bound) == len(bounds[0])


def _pieces(bounds_q: torch.Tensor, bounds_k: torch.Tensor, longest: tuple[int, int]) -> Iterator[tuple[slice, slice]]:
    ends_q, ends_k = bounds_q.tolist(), bounds_k.tolist()
    for i in range(len(ends_q) - 1):
        rows, keys = slice(ends_q[i], ends_q[i + 1]), slice(ends_k[i], ends_k[i + 1])
        assert rows.stop - rows.start <= longest[0] and keys.stop - keys.start <= longest[1]
        yield rows, keys


def _scores(q: torch.Tensor, k: torch.Tensor, scale: float, causal: bool, left: int) -> torch.Tensor:
    """[heads, queries, keys], causal from the bottom right; left: keys before its own that a query sees, -1 for all."""
    scores = torch.einsum("qhd,khd->hqk", q, k) * scale
    if causal:
        every = torch.ones(scores.shape[1:], dtype=torch.bool)
        hidden = every.triu(1 + len(k) - len(q))
        if left >= 0:
            hidden |= every.tril(len(k) - len(q) - left - 1)
        scores = scores.masked_fill(hidden, -torch.inf)
    return scores


def _check_window(causal: bool, left: int, right: int) -> None:
    assert (left, right) == (-1, -1) or (causal and left >= 0 and right == 0)


def _forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: None,
    bounds_q: torch.Tensor,
    bounds_k: torch.Tensor,
    *rest: Any,
) -> tuple[torch.Tensor, ...]:
    used_k, left_pad, table, slopes, longest_q, longest_k, dropout, scale, _, causal, left, right, cap, *_ = rest
    assert (used_k, left_pad, table, slopes, out) == (None,) * 5 and (dropout, cap) == (0, 0)
    _check_window(causal, left, right)
    _check(q, k, v, bounds_q, bounds_k)
    result = torch.zeros(q.shape, dtype=q.dtype)
    logsumexp = torch.zeros(q.shape[1], len(q))
    group = q.shape[1] // k.shape[1]
    for rows, keys in _pieces(bounds_q, bounds_k, (longest_q, longest_k)):
        wide_k, wide_v = (x[keys].float().repeat_interleave(group, 1) for x in (k, v))
        scores = _scores(q[rows].float(), wide_k, scale, causal, left)
        logsumexp[:, rows] = scores.logsumexp(-1)
        result[rows] = torch.einsum("hqk,khd->qhd", scores.softmax(-1), wide_v).to(q.dtype)
    return result, logsumexp, torch.empty(0), torch.empty(2, dtype=torch.int64)


def _backward(
    grad: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    logsumexp: torch.Tensor,
    dq: torch.Tensor,
    dk: torch.Tensor,
    dv: torch.Tensor,
    bounds_q: torch.Tensor,
    bounds_k: torch.Tensor,
    *rest: Any,
) -> tuple[torch.Tensor, ...]:
    slopes, longest_q, longest_k, dropout, scale, _, causal, left, right, cap, *_ = rest
    assert slopes is None and (dropout, cap) == (0, 0)
    _check_window(causal, left, right)
    _check(q, k, v, bounds_q, bounds_k)
    assert grad.stride(-1) == 1 and out.stride(-1) == 1 and logsumexp.dtype is torch.float32
    assert logsumexp.shape == (q.shape[1], len(q)) and logsumexp.is_contiguous()
    group = q.shape[1] // k.shape[1]
    for rows, keys in _pieces(bounds_q, bounds_k, (longest_q, longest_k)):
        own, own_grad = q[rows].float(), grad[rows].float()
        wide_k, wide_v = (x[keys].float().repeat_interleave(group, 1) for x in (k, v))
        weights = (_scores(own, wide_k, scale, causal, left) - logsumexp[:, rows, None]).exp()
        correction = (own_grad * out[rows].float()).sum(-1).t()[..., None]
        of_scores = weights * (torch.einsum("qhd,khd->hqk", own_grad, wide_v) - correction) * scale
        dq[rows] = torch.einsum("hqk,khd->qhd", of_scores, wide_k).to(q.dtype)
        dk[keys] = torch.einsum("hqk,qhd->khd", of_scores, own).unflatten(1, (-1, group)).sum(2).to(k.dtype)
        dv[keys] = torch.einsum("hqk,qhd->khd", weights, own_grad).unflatten(1, (-1, group)).sum(2).to(v.dtype)
    return dq, dk, dv, torch.empty(0)
