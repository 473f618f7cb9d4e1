"""The kernels that split tokens, on a device."""

import subprocess
import sys

import numpy as np
import pytest

from tests.support.packages_apart import why_not_interpreted
from tests.support.patience import PATIENCE
from tests.support.pool import single_threaded


def splits(device: str, sizes: tuple[int, ...]) -> int:
    """Split loads with the kernels and with NumPy, which must agree. How many there were."""
    import torch

    from balancing.experts.placement import ReplicaPlacement, color_by_rank
    from balancing.experts.split.split import Splitter
    from balancing.experts.split.split_kernel import SplitKernels, kernel_tables
    from balancing.upload import upload

    generator, done = np.random.default_rng(0), 0
    for ranks in sizes:
        home = np.arange(2 * ranks) // 2
        slots = np.stack([generator.choice(np.flatnonzero(home != rank), 2, replace=False) for rank in range(ranks)])
        for ranks_per_node in {ranks, max(1, ranks // 2)}:
            placement = ReplicaPlacement(home, slots, ranks_per_node=ranks_per_node)
            for most in (10, 100_000):
                load = generator.integers(0, most, (ranks, 2 * ranks)) * (generator.random((ranks, 2 * ranks)) < 0.7)
                classes = color_by_rank(placement)
                tables = upload(kernel_tables(placement, classes), torch.device(device))
                kernels = SplitKernels(placement, len(classes), 4, tables)
                found = kernels(torch.from_numpy(load).to(device)).cpu().numpy()
                assert np.array_equal(found, Splitter(placement, sweeps=4)(load)), (ranks, ranks_per_node, most)
                done += 1
    return done


def test_kernels_split_like_numpy(ranks, device, figure):
    """Compiled on a GPU; interpreted on the CPU, in a process of its own, for Triton decides that when imported."""
    pytest.importorskip("triton")
    if device == "cpu" and (why := why_not_interpreted()):
        pytest.skip(why)
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
