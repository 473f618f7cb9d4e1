"""Kernels of attention on this machine's devices against matrix products, and merging of partial results."""

import warnings

import pytest
import torch

from balancing.sequences.engine import kernels
from balancing.sequences.engine.kernels import Pieces, choose_kernel, merge

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
    kernel = kernels._PRODUCTS if device == "products" else choose_kernel(torch.device(place), dtype, size)
    for pieces in PIECES:
        q, k, v, grad = _inputs(pieces, kv_heads, place, dtype, size)
        out, logsumexp = kernel.forward(q, k, v, pieces, 0.3)
        assert logsumexp.shape == (4, len(q)) and logsumexp.dtype is kernels.accumulation_dtype(dtype)
        found = (out, *kernel.backward(grad, q, k, v, out, logsumexp, pieces, 0.3))
        leaves = [x.double().requires_grad_() for x in (q, k, v)]
        reference = _alone(*leaves, pieces, 0.3)
        wanted = (reference, *torch.autograd.grad(reference, leaves, grad.double()))
        for one, other in zip(found, (x.detach() for x in wanted), strict=True):
            assert (one.double() - other).abs().max() <= tolerance * max(1.0, float(other.abs().max()))


def _nothing(name: str) -> None:
    raise ImportError(f"no {name} here\nand more of it")


def _too_old(direction: str) -> None:
    raise AttributeError(direction)


@pytest.mark.parametrize(
    ("major", "activate", "package", "chosen", "said"),
    [
        (9, lambda name: None, _too_old, "_CUDA", None),  # FlashAttention 3, through PyTorch's switch
        (9, _nothing, lambda direction: None, "_PACKAGE", "the flash-attn package; not used: FA3: ImportError no FA3"),
        (10, _nothing, _too_old, "_CUDA", "PyTorch's own flash attention; not used: FA4: ImportError no FA4 here"),
        (8, _nothing, lambda direction: None, "_PACKAGE", None),
        (8, _nothing, _too_old, "_CUDA", None),  # nothing faster is known, and the package is not installed
    ],
)
def test_the_fastest_flash_attention_that_imports(monkeypatch, major, activate, package, chosen, said) -> None:
    """What is tried on a device of each generation, with imports that succeed and fail; no device takes part."""
    monkeypatch.setattr(torch.nn.attention, "activate_flash_attention_impl", activate)
    monkeypatch.setattr(kernels, "_from_package", package)
    monkeypatch.setattr(kernels.importlib.util, "find_spec", lambda name: None)
    kernels._flash.cache_clear()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert kernels._flash(major) is getattr(kernels, chosen)
        assert kernels._flash(major) is getattr(kernels, chosen)  # tried once
    kernels._flash.cache_clear()
    lines = [str(one.message) for one in caught]
    assert len(lines) == (said is not None) and all(said in line and "\n" not in line for line in lines)


class _Refuses(kernels._Products):
    def forward(self, q, k, v, pieces, scale):
        if k.shape != v.shape:
            raise RuntimeError("values of 8 are not built for keys of 12\nand more of it")
        return super().forward(q, k, v, pieces, scale)


class _Errs(kernels._Products):
    def backward(self, grad, q, k, v, out, logsumexp, pieces, scale):
        dq, dk, dv = super().backward(grad, q, k, v, out, logsumexp, pieces, scale)
        return dq, dk, dv if k.shape == v.shape else 0 * dv


@pytest.mark.parametrize(
    ("name", "kernel", "padded", "said"),
    [
        ("FA3", kernels._Products(), False, None),
        ("FA3", _Refuses(), True, "RuntimeError values of 8 are not built for keys of 12"),
        ("FA3", _Errs(), True, "AssertionError"),
        ("FA4", kernels._Products(), True, None),
        (None, kernels._Products(), True, None),
    ],
)
def test_values_are_padded_only_where_a_kernel_needs_it(monkeypatch, name, kernel, padded, said) -> None:
    """FlashAttention 3 is asked once, with a small batch; no device takes part."""
    monkeypatch.setattr(kernels, "_CUDA", kernel)
    monkeypatch.setattr(kernels, "_flash", lambda major: kernel)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.nn.attention, "current_flash_attention_impl", lambda: name)
    monkeypatch.setattr(torch.Tensor, "to", lambda self, *unused, of=torch.Tensor.to: of(self, unused[-1]))
    kernels._of_two_sizes.cache_clear()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            chosen = choose_kernel(torch.device("cuda"), torch.bfloat16, 16, 8)
            assert isinstance(chosen, kernels.OfOneSize) is padded
    assert [said in str(one.message) for one in caught] == [True] * (said is not None)
    kernels._of_two_sizes.cache_clear()


def test_merging_two_sets_of_keys_is_attention_to_both() -> None:
    q, k, v, _ = _inputs(Pieces((5,), (9,), False), 2, "cpu", torch.float64, 4)
    kernel = choose_kernel(q.device, q.dtype, 4)
    parts = [
        kernel.forward(q, k[rows], v[rows], Pieces((5,), (n,), False), 1.0)
        for rows, n in ((slice(0, 2), 2), (slice(2, 9), 7))
    ]
    out, logsumexp = merge(*parts[0], *parts[1])
    whole, whole_logsumexp = kernel.forward(q, k, v, Pieces((5,), (9,), False), 1.0)
    torch.testing.assert_close(out, whole, rtol=0, atol=1e-14)
    torch.testing.assert_close(logsumexp, whole_logsumexp, rtol=0, atol=1e-14)
