"""Kernels of attention on this machine's devices against matrix products, and merging of partial results."""

import pytest
import torch

from balancing.kernels.base import CPU, PRODUCTS, Pieces, accumulation_dtype, merge
from balancing.kernels.choice import choose_kernel
from balancing.kernels.trial import AttentionHeads

PIECES = [
    Pieces((7,), (7,), True),
    Pieces((3, 1, 5), (9, 1, 5), True),
    Pieces((4, 6), (5, 2), False),
    Pieces((600,), (700,), True),  # more than a tile of the reference
    Pieces((3, 1, 5), (9, 1, 5), True, 2),
    Pieces((600, 4), (1300, 4), True, 100),
    Pieces((5,), (6,), True, 0),
]
HALF = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


def _inputs(pieces: Pieces, kv_heads: int, device: str, dtype: torch.dtype, size: int) -> list[torch.Tensor]:
    draw = torch.Generator().manual_seed(1)
    queries, keys = sum(pieces.queries), sum(pieces.keys)
    q, grad = (torch.randn(queries, 4, size, generator=draw, dtype=torch.float64) for _ in range(2))
    kv = torch.randn(keys, 2, kv_heads, size, generator=draw, dtype=torch.float64)
    q, kv, grad = (x.to(device=device, dtype=dtype) for x in (q, kv, grad))
    return [q, kv[:, 0], kv[:, 1], grad]


def _alone(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, pieces: Pieces, scale: float) -> torch.Tensor:
    outs = []
    ends = zip(q.split(pieces.queries), k.split(pieces.keys), v.split(pieces.keys), strict=True)
    for piece, keys, values in ends:
        group = q.shape[1] // k.shape[1]
        keys, values = (x.repeat_interleave(group, 1) for x in (keys, values))
        scores = torch.einsum("qhd,khd->hqk", piece, keys) * scale
        if pieces.causal:
            every = torch.ones(scores.shape[1:], dtype=torch.bool)
            hidden = every.triu(1 + len(keys) - len(piece))
            if pieces.window is not None:
                hidden |= every.tril(len(keys) - len(piece) - pieces.window - 1)
            scores = scores.masked_fill(hidden.to(q.device), float("-inf"))
        outs.append(torch.einsum("hqk,khd->qhd", scores.softmax(-1), values))
    return torch.cat(outs)


@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@pytest.mark.parametrize(
    ("device", "dtype", "size", "tolerance"),
    [
        ("cpu", torch.float64, 6, 1e-12),
        ("cpu", torch.bfloat16, 8, 5e-2),
        ("products", torch.float64, 6, 1e-12),
        pytest.param("cuda", torch.bfloat16, 64, 5e-2, marks=HALF),
        pytest.param("cuda", torch.float64, 6, 1e-12, marks=HALF),
    ],
)
def test_kernel_equals_products(kv_heads: int, device: str, dtype: torch.dtype, size: int, tolerance: float) -> None:
    place = "cpu" if device == "products" else device
    heads = AttentionHeads(dtype, 4, kv_heads, size, size, True)
    kernel = PRODUCTS if device == "products" else choose_kernel(torch.device(place), heads).kernel
    for pieces in PIECES:
        q, k, v, grad = _inputs(pieces, kv_heads, place, dtype, size)
        out, logsumexp = kernel.forward(q, k, v, pieces, 0.3)
        assert logsumexp.shape == (4, len(q)) and logsumexp.dtype is accumulation_dtype(dtype)
        found = (out, *kernel.backward(grad, q, k, v, out, logsumexp, pieces, 0.3))
        leaves = [x.double().requires_grad_() for x in (q, k, v)]
        reference = _alone(*leaves, pieces, 0.3)
        wanted = (reference, *torch.autograd.grad(reference, leaves, grad.double()))
        for one, other in zip(found, (x.detach() for x in wanted), strict=True):
            assert (one.double() - other).abs().max() <= tolerance * max(1.0, float(other.abs().max()))


def test_merging_two_sets_of_keys_is_attention_to_both() -> None:
    q, k, v, _ = _inputs(Pieces((5,), (9,), False), 2, "cpu", torch.float64, 4)
    kernel = CPU
    parts = [
        kernel.forward(q, k[rows], v[rows], Pieces((5,), (n,), False), 1.0)
        for rows, n in ((slice(0, 2), 2), (slice(2, 9), 7))
    ]
    out, logsumexp = merge(*parts[0], *parts[1])
    whole, whole_logsumexp = kernel.forward(q, k, v, Pieces((5,), (9,), False), 1.0)
    torch.testing.assert_close(out, whole, rtol=0, atol=1e-14)
    torch.testing.assert_close(logsumexp, whole_logsumexp, rtol=0, atol=1e-14)
