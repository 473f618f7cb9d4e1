"""Grouped GEMM where experts have no tokens, and the kernels that split tokens, on a device."""

import subprocess
import sys

import numpy as np
import pytest

from tests.support.patience import PATIENCE
from tests.support.pool import single_threaded

# Rows of each group: some, none at the ends and in between, none at all.
GROUPS = ((16, 0, 40, 0), (0, 64, 0, 8), (0, 0, 0, 5), (0, 0, 0, 0))
TOLERANCE = {"float32": 1e-5, "bfloat16": 1e-2}


def _empty_groups(device: str) -> float:
    """The largest error of a product or a gradient, relative in norm. Memory is full of NaN before each."""
    import torch

    from megatron.balanced.experts.grouped_mlp import _GroupedProduct, _Groups
    from tests.gpu.training import local_device

    place, worst = local_device(device), 0.0

    def poison() -> None:
        freed = [torch.full((size,), float("nan"), device=place) for size in (1 << 10, 1 << 14, 1 << 18, 1 << 20) * 4]
        del freed  # which the next tensors of these sizes are made of

    for dtype in ("float32", "bfloat16"):
        for counts in GROUPS:
            draw = torch.Generator().manual_seed(0)
            rows = torch.randn(sum(counts), 64, generator=draw).to(place, getattr(torch, dtype)).requires_grad_()
            weights = [
                torch.randn(96, 64, generator=draw).to(place, getattr(torch, dtype)).requires_grad_() for _ in counts
            ]
            poison()
            out = _GroupedProduct.apply(rows, _Groups(list(counts), place), *weights)
            poison()
            found = [out, *torch.autograd.grad(out, [rows, *weights], torch.ones_like(out))]
            parts = rows.detach().double().split(counts)
            wanted = [
                torch.cat([part @ weight.double().t() for part, weight in zip(parts, weights, strict=True)]),
                torch.cat([w.double().sum(0).expand(len(p), -1) for p, w in zip(parts, weights, strict=True)]),
                *(part.sum(0).expand(96, -1) for part in parts),
            ]
            for one, other in zip(found, wanted, strict=True):
                assert torch.isfinite(one).all(), f"{dtype}, groups of {counts}"
                error = float((one.double() - other).norm())
                size = float(other.norm())
                assert error <= TOLERANCE[dtype] * size, f"{dtype}, groups of {counts}: {error} of {size}"
                worst = max(worst, error / size if size else 0.0)
    return worst


def test_groups_without_rows(ranks, device, figure):
    (worst,) = ranks.run(1, _empty_groups, device)
    figure(f"largest error {worst:.1e}")


def splits(device: str, sizes: tuple[int, ...]) -> int:
    """Split loads with the kernels and with NumPy, which must agree. How many there were."""
    import torch

    from balancing.experts.placement import ReplicaPlacement, color_by_rank
    from balancing.experts.split.split import numpy_split
    from balancing.experts.split.split_kernel import SplitKernels

    generator, done = np.random.default_rng(0), 0
    for ranks in sizes:
        home = np.arange(2 * ranks) // 2
        slots = np.stack([generator.choice(np.flatnonzero(home != rank), 2, replace=False) for rank in range(ranks)])
        for ranks_per_node in {ranks, max(1, ranks // 2)}:
            placement = ReplicaPlacement(home, slots, ranks_per_node=ranks_per_node)
            for most in (10, 100_000):
                load = generator.integers(0, most, (ranks, 2 * ranks)) * (generator.random((ranks, 2 * ranks)) < 0.7)
                kernels = SplitKernels(placement, color_by_rank(placement), 4, device)
                found = kernels(torch.from_numpy(load).to(device)).cpu().numpy()
                assert np.array_equal(found, numpy_split(placement, 4, load)), (ranks, ranks_per_node, most)
                done += 1
    return done


def test_kernels_split_like_numpy(ranks, device, figure):
    """Compiled on a GPU; interpreted on the CPU, in a process of its own, for Triton decides that when imported."""
    pytest.importorskip("triton")
    sizes = (2, 8, 64, 128) if device == "cuda" else (2, 8)
    if device == "cuda":
        figure(f"{splits(device, sizes)} splits at {sizes} ranks")
        return
    done = subprocess.run(
        [sys.executable, "-c", f"from tests.gpu.test_expert_kernels import splits; print(splits('cpu', {sizes}))"],
        env=single_threaded() | {"TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert done.returncode == 0, done.stderr
    figure(f"{done.stdout.strip()} splits at {sizes} ranks, interpreted")
