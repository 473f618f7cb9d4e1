"""The kernels that split tokens on a GPU: interpreted by Triton, equal to NumPy to the token; and compiled.

What they do on a GPU is tested with the other splits, where there is one.
"""

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from balancing.experts import ReplicaPlacement, contiguous_homes
from balancing.experts.late import LateCopies
from balancing.experts.placement import color_by_rank
from balancing.experts.split.placed_split import SplitTables, place_all
from balancing.experts.split.split import Splitter
from balancing.upload import upload
from tests.support.command import run_python
from tests.support.packages_apart import why_not_interpreted

pytest.importorskip("triton")


def test_the_kernels_split_to_the_token_like_numpy():
    """In a process of its own: Triton decides when it is imported whether kernels are interpreted."""
    if why := why_not_interpreted():
        pytest.skip(why)
    code = "from tests.experts.test_split_kernel import compare; print(compare(), 'splits agree')"
    done = run_python("-c", code, TRITON_INTERPRET="1")
    assert done.returncode == 0, done.stderr
    assert "splits agree" in done.stdout


def test_kernels_that_are_wrong_on_a_device_are_not_used(monkeypatch):
    from balancing.experts.split import split_kernel

    monkeypatch.setattr(split_kernel.SplitKernels, "__init__", lambda *unused, **named: None)
    monkeypatch.setattr(split_kernel.SplitKernels, "__call__", lambda self, load: load.new_zeros(4, 16))
    split_kernel.kernels_work.cache_clear()
    with pytest.warns(UserWarning, match="on the host"):
        assert not split_kernel.kernels_work(4, torch.device("cpu"))
    split_kernel.kernels_work.cache_clear()


def test_kernels_that_cannot_be_compiled_are_not_used(monkeypatch):
    """As where Triton finds no C compiler, or no driver."""
    from balancing.experts.split import split_kernel

    def fail(self, load):
        raise RuntimeError("Failed to find C compiler. Please specify via CC environment variable.\nmore")

    monkeypatch.setattr(split_kernel.SplitKernels, "__init__", lambda *unused, **named: None)
    monkeypatch.setattr(split_kernel.SplitKernels, "__call__", fail)
    split_kernel.kernels_work.cache_clear()
    with pytest.warns(UserWarning, match="on the host, because Triton fails to compile.*C compiler") as told:
        assert not split_kernel.kernels_work(4, torch.device("cpu"))
        assert not split_kernel.kernels_work(4, torch.device("cpu"))
    assert len(told) == 1 and "\n" not in str(told[0].message)
    split_kernel.kernels_work.cache_clear()


@pytest.mark.parametrize(("kernel", "pointers"), [("balance", 3), ("divide", 5), ("add_late", 5)])
@pytest.mark.parametrize("architecture", [80, 90])
def test_the_kernels_compile_for_gpus(kernel, pointers, architecture):
    from triton import compile
    from triton.backends import backends
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from balancing.experts.split import late_kernel, split_kernel

    if "nvidia" not in backends:
        pytest.skip("this Triton does not compile for Nvidia's GPUs")
    function = getattr(late_kernel if kernel == "add_late" else split_kernel, kernel)
    types = {name: "*i64" if at < pointers else "i32" for at, name in enumerate(function.arg_names)}
    sizes = {"WIDTH": 64, "LATE": 1, "LOCALS": 8, "ROUNDS": 2}
    sizes = {name: size for name, size in sizes.items() if name in types}
    types |= {"tables": "*i32"} | dict.fromkeys(sizes, "constexpr")
    source = ASTSource(function, types, constexprs=sizes)
    options = split_kernel.launch_options(64)
    del options["WIDTH"]
    compiled = compile(source, target=GPUTarget("cuda", architecture, 32), options=options)
    assert compiled.asm["cubin"]


def compare() -> int:
    """Split all cases with NumPy and with the kernels, on the CPU. How many there were."""
    from balancing.experts.split.split_kernel import kernels_work

    splits = copies = 0
    for placement, load, sweeps in _cases():
        _compare(placement, Splitter(placement, sweeps=sweeps), load, sweeps if placement.split == "level" else 0)
        splits += 1
        if placement.split != "level":
            continue
        slots, permille, least = splits % 2 + 1, 1000 + 20 * (splits % 3), (0, 30)[splits % 2]
        empty = placement.with_late(np.full((len(load), slots), -1))
        expected = LateCopies(Splitter(empty, sweeps=sweeps), permille, least)(load.sum(0))
        _compare(empty, expected, load, sweeps, permille, least)
        copies += expected.placement.late_copies
    assert all(kernels_work(ranks, torch.device("cpu"), ranks % 3) for ranks in (2, 7, 16))
    assert copies > 20
    return splits


def _compare(
    placement: ReplicaPlacement, expected: Splitter, load: np.ndarray, sweeps: int, permille: int = 0, least: int = 0
) -> None:
    """Split a load with the kernel, which must give what `expected` does, for all sources and for one."""
    from balancing.experts.split.split_kernel import SplitKernels, kernel_tables

    classes = color_by_rank(placement)
    tables = upload(kernel_tables(placement, classes), None)
    kernels = SplitKernels(placement, len(classes), sweeps, tables)
    served = expected(load)
    (placed,) = place_all([SplitTables(expected.placement, None)], None)
    before = placed.tokens_before(served)
    for sources in (None, range(len(load) - 1, len(load))):
        rows = slice(None) if sources is None else slice(sources.start, sources.stop)
        found = kernels(torch.from_numpy(load), sources, permille, least)
        assert np.array_equal(found.served.numpy(), served), (placement, load, sweeps)
        # Empty slots have no tokens before them.
        full = expected.placement.phys2log >= 0
        assert np.array_equal(found.first.numpy(), before[rows] * full)
        assert np.array_equal(found.last.numpy(), before[rows] * full + served[rows])
        assert np.array_equal(found.tokens.numpy(), served.reshape(len(load), len(load), -1).sum((0, 2)))
        if placement.late_slots:
            assert found.expert is not None and found.late is not None
            assert np.array_equal(found.expert.numpy(), expected.placement.phys2log.clip(0))
            assert np.array_equal(found.late.numpy(), expected.placement.late)


def _cases() -> Iterator[tuple[ReplicaPlacement, np.ndarray, int]]:
    """Placements with replicas, a load for each, and the number of sweeps."""
    generator = np.random.default_rng(0)
    for scale in (2, 50, 1000, 100_000, 2**27) * 2:
        ranks, homes, slots = (int(number) for number in generator.integers((2, 1, 1), (10, 4, 4)))
        home = contiguous_homes(ranks * homes, ranks)
        split = "level" if generator.random() < 0.8 else "even"
        placement = ReplicaPlacement(
            home, _placed(home, slots, generator), split, int(generator.integers(1, ranks + 1))
        )
        load = generator.integers(0, scale, (ranks, len(home))) * (generator.random((ranks, len(home))) < 0.7)
        yield placement, load, 3

    home = contiguous_homes(12, 6)
    placement = ReplicaPlacement(home, _placed(home, 2, generator), ranks_per_node=4)
    nothing = np.zeros((6, 12), dtype=np.int64)
    yield placement, nothing, 2
    one_expert, rank_without, one_source = nothing.copy(), generator.integers(0, 99, (6, 12)), nothing.copy()
    one_expert[:, next(iter(placement.chains))] = 2**31 // 6  # nearly the most
    rank_without[3] = 0
    one_source[5] = generator.integers(0, 2**27, 12)
    for load in one_expert, rank_without, one_source:
        yield placement, load, 4

    # One expert everywhere, and the others in a chain in which the water has to flow through all ranks.
    ranks = 18
    slots = [[-1, 1]] + [[0, rank + 1] for rank in range(1, ranks - 1)] + [[0, -1]]
    load = np.full((ranks, ranks), 10)
    load[:, :2] = 1001
    yield ReplicaPlacement(np.arange(ranks), slots, ranks_per_node=5), load, 6


def _placed(home: np.ndarray, slots: int, generator: np.random.Generator) -> np.ndarray:
    """Experts for the slots of each rank, some of which stay empty, and one replica at least."""
    ranks = home.max() + 1
    placed = np.full((ranks, slots), -1)
    for rank in range(ranks):
        others = generator.permutation(np.flatnonzero(home != rank))[:slots]
        placed[rank, : len(others)] = np.where(generator.random(len(others)) < 0.8, others, -1)
    placed[0, 0] = np.flatnonzero(home != 0)[0] if (placed < 0).all() else placed[0, 0]
    return placed
