"""The kernels that split tokens, on a device."""

import subprocess
import sys

import numpy as np

from tests.gpu.trial import Skipped, Trial
from tests.support.packages_apart import why_not_interpreted
from tests.support.patience import PATIENCE
from tests.support.pool import single_threaded


def splits(device: str, sizes: tuple[int, ...]) -> int:
    """Split loads with the kernel and with NumPy, which must agree, on a GPU in a graph, too. How many there were."""
    import torch

    from balancing.experts.placement import ReplicaPlacement, color_by_rank
    from balancing.experts.split import split_kernel
    from balancing.experts.split.split import Splitter
    from balancing.experts.split.split_kernel import SplitKernels, kernel_tables
    from balancing.upload import upload

    if device == "cpu":
        split_kernel._PROGRAMS = 2  # interpreted one after another
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
                there = torch.from_numpy(load).to(device)
                found, expected = kernels(there)[0], Splitter(placement, sweeps=4)(load)
                assert np.array_equal(found.cpu().numpy(), expected), (ranks, ranks_per_node, most)
                if device == "cuda":  # a graph splits the load that it finds
                    graph = torch.cuda.CUDAGraph()
                    with torch.cuda.graph(graph):
                        found = kernels(there)[0]
                    there //= 2
                    graph.replay()
                    assert np.array_equal(found.cpu().numpy(), Splitter(placement, sweeps=4)(load // 2)), "in a graph"
                done += 1
    return done


def kernels_like_numpy(trial: Trial) -> None:
    """Compiled on a GPU; interpreted on the CPU, in a process of its own, for Triton decides that when imported."""
    if trial.device == "cuda":
        sizes = (2, 8, 64, 128)
        trial.figure(f"{trial.run(1, splits, trial.device, sizes)[0]} splits at {sizes} ranks")
        return
    if why := why_not_interpreted():
        raise Skipped(why)
    code = "from tests.gpu.splits import splits; print(splits('cpu', (2, 8)))"
    done = subprocess.run(
        [sys.executable, "-c", code], env=single_threaded() | {"TRITON_INTERPRET": "1"}, capture_output=True, text=True,
        timeout=PATIENCE,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    trial.figure(f"{done.stdout.strip()} splits at (2, 8) ranks, interpreted")
