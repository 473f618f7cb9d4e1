"""The kernel that splits tokens on a GPU: interpreted by Triton, equal to NumPy to the token; and compiled.

What it does on a GPU is tested with the other splits, where there is one.
"""

import re
import subprocess
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from balancing.experts import ReplicaPlacement, contiguous_homes
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

    def wrong(self, load, sources=None, permille=None, least=0):
        return (load.new_zeros(4, 16),)

    monkeypatch.setattr(split_kernel.SplitKernels, "__call__", wrong)
    split_kernel.kernels_work.cache_clear()
    with pytest.warns(UserWarning, match="on the host"):
        assert not split_kernel.kernels_work(4, torch.device("cpu"))
    split_kernel.kernels_work.cache_clear()


def test_kernels_that_cannot_be_compiled_are_not_used(monkeypatch):
    """As where Triton finds no C compiler, or no driver."""
    from balancing.experts.split import split_kernel

    def fail(self, load, sources=None, permille=None, least=0):
        raise RuntimeError("Failed to find C compiler. Please specify via CC environment variable.\nmore")

    monkeypatch.setattr(split_kernel.SplitKernels, "__init__", lambda *unused, **named: None)
    monkeypatch.setattr(split_kernel.SplitKernels, "__call__", fail)
    split_kernel.kernels_work.cache_clear()
    with pytest.warns(UserWarning, match="on the host, because Triton fails to compile.*C compiler") as told:
        assert not split_kernel.kernels_work(4, torch.device("cpu"))
        assert not split_kernel.kernels_work(4, torch.device("cpu"))
    assert len(told) == 1 and "\n" not in str(told[0].message)
    split_kernel.kernels_work.cache_clear()


# (ranks, instances of the hottest expert, late slots): most bytes of the stack, to which registers spill
@pytest.mark.parametrize(
    ("ranks", "instances", "late", "stack"),
    [(8, 4, 0, 0), (64, 8, 0, 0), (64, 30, 0, 0), (128, 8, 0, 64), (64, 8, 1, 256)],
)
@pytest.mark.parametrize("architecture", [80, 90])
def test_the_kernel_compiles_for_gpus(ranks, instances, late, stack, architecture, tmp_path):
    from triton import compile, knobs
    from triton.backends import backends
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from balancing.experts.split.split_kernel import launch_options, split_tokens

    if "nvidia" not in backends:
        pytest.skip("this Triton does not compile for Nvidia's GPUs")
    slots = np.full((ranks, 2), -1)
    slots[1:instances, 0] = 0
    placement = ReplicaPlacement(contiguous_homes(4 * ranks, ranks), slots).with_late(np.full((ranks, late), -1))
    options = launch_options(placement)
    types = {name: "i32" for name in split_tokens.arg_names}
    types |= dict.fromkeys(("load", "out", "tokens", "scratch"), "*i64") | {"tables": "*i32", "neighbors": "*i8"}
    sizes = {name: options.pop(name) for name in split_tokens.arg_names if name in options}
    source = ASTSource(split_tokens, types | dict.fromkeys(sizes, "constexpr"), constexprs=sizes)
    compiled = compile(source, target=GPUTarget("cuda", architecture, 32), options=options)
    ptx = tmp_path / "split.ptx"
    ptx.write_text(compiled.asm["ptx"])
    name = f"sm_{architecture}{'a' * (architecture >= 90)}"
    command = [knobs.nvidia.ptxas.path, "-v", f"--gpu-name={name}", ptx, "-o", tmp_path / "split.cubin"]
    told = subprocess.run(command, capture_output=True, text=True, check=True)
    spilled = re.findall(r"(\d+) bytes stack frame", told.stderr)
    assert spilled and max(map(int, spilled)) <= stack


def compare() -> int:
    """Split all cases with NumPy and with the kernel, on the CPU. How many there were."""
    from balancing.experts.split import split_kernel

    splits = copies = 0
    for placement, load, sweeps in _cases():
        # Interpreted, programs run one after another.
        split_kernel._PROGRAMS = splits % 3 + 1
        _compare(placement, load, sweeps, (None, range(1, 2))[splits % 2])
        splits += 1
        if placement.split != "level":
            continue
        split_kernel._PROGRAMS = splits % 2 + 1
        slots, permille, least = splits % 2 + 1, 1000 + 20 * (splits % 3), (0, 30)[splits % 2]
        empty = placement.with_late(np.full((len(load), slots), -1))
        late = _compare(empty, load, sweeps, (None, range(1, 2))[splits % 2], permille, least)
        copies += int((late >= 0).sum())
    split_kernel._PROGRAMS = 1
    assert all(split_kernel.kernels_work(ranks, torch.device("cpu"), ranks % 3) for ranks in (2, 7, 16))
    assert copies > 20
    return splits


def _compare(
    placement: ReplicaPlacement, load: np.ndarray, sweeps: int, sources: range | None, *late: int
) -> np.ndarray | None:
    """Split a load with the kernel, which must give what NumPy does. Returns late copies.

    late: permille and least of late copies; none without.
    """
    from balancing.experts.split.split_kernel import SplitKernels, kernel_tables

    classes = color_by_rank(placement)
    of_kernels = upload(kernel_tables(placement, classes), None)
    kernels = SplitKernels(placement, len(classes), sweeps if placement.split == "level" else 0, of_kernels)
    tables = SplitTables(placement, None)
    tables.splitter = Splitter(placement, sweeps=sweeps)
    expected = place_all([tables], None)[0].split(load, sources, *late)
    found = kernels(torch.from_numpy(load), sources, *late)
    for name, value, wanted in zip(expected._fields, found, expected, strict=False):
        assert np.array_equal(value, wanted), (name, placement, load, sweeps)
    assert len(found) == (6 if late else 4)
    return expected.late


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
