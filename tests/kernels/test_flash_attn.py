"""The kernel on flash-attn's Python interface, over a stand-in for its C++ module, against matrix products."""

import pytest

from tests.support.packages_apart import why_missing


def _largest_differences(kv_heads: int) -> list[float]:
    """Of output, logsumexp and the three gradients, relative to the largest number, over all pieces."""
    import torch

    from balancing.kernels.base import PRODUCTS
    from balancing.kernels.flash import PackageFlash
    from tests.kernels.test_base import PIECES, _inputs
    from tests.support.stand_ins.flash_attn_cuda import install

    install()
    differences = [0.0] * 5
    for pieces in PIECES:
        q, k, v, grad = _inputs(pieces, kv_heads, "cpu", torch.bfloat16, 16)
        found = []
        for kernel in (PackageFlash(), PRODUCTS):
            out, logsumexp = kernel.forward(q, k, v, pieces, 0.3)
            found.append((out, logsumexp, *kernel.backward(grad, q, k, v, out, logsumexp, pieces, 0.3)))
        for number, (own, other) in enumerate(zip(*found, strict=True)):
            assert own.shape == other.shape and own.dtype is other.dtype
            difference = (own - other).abs().max() / other.abs().max()
            differences[number] = max(differences[number], difference.item())
    return differences


@pytest.mark.parametrize("kv_heads", [4, 2, 1])
def test_the_flash_attn_package_is_called_as_it_wants(pool, kv_heads):
    if why := why_missing("flash_attn", "flash-attn"):
        pytest.skip(why)
    (differences,) = pool.run(1, _largest_differences, kv_heads)
    assert max(differences) <= 1e-2
