"""The kernel that splits tokens on a GPU: interpreted by Triton, equal to NumPy to the token; and compiled.

What it does on a GPU is tested with the other splits, where there is one.
"""

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

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

    monkeypatch.setattr(split_kernel, "_routes_work", lambda device: True)
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

    monkeypatch.setattr(split_kernel, "_routes_work", lambda device: True)
    monkeypatch.setattr(split_kernel.SplitKernels, "__init__", lambda *unused, **named: None)
    monkeypatch.setattr(split_kernel.SplitKernels, "__call__", fail)
    split_kernel.kernels_work.cache_clear()
    with pytest.warns(UserWarning, match="on the host, because Triton fails to compile.*C compiler") as told:
        assert not split_kernel.kernels_work(4, torch.device("cpu"))
        assert not split_kernel.kernels_work(4, torch.device("cpu"))
    assert len(told) == 1 and "\n" not in str(told[0].message)
    split_kernel.kernels_work.cache_clear()


def test_a_second_launch_does_not_ask_triton_for_the_kernel():
    """And if a Triton does not launch compiled kernels this way, it is asked."""
    from balancing.experts.split import launching

    asked, launched = [], []

    class Kernel:
        arg_names = ("load", "size", "CONSTANT")

        def __init__(self, works):
            self.works = works

        def __getitem__(self, grid):
            def by_triton(*arguments, **options):
                asked.append((grid, arguments, options))
                return {(3, 1, 1): by_handle}

            def by_handle(*arguments):
                if not self.works:
                    raise TypeError
                launched.append(arguments)

            return by_triton

    load, options = torch.ones(1), {"CONSTANT": 8, "num_warps": 2}
    for works, by_triton, by_handle in ((True, 1, 2), (False, 3, 0)):
        kernel = Kernel(works)
        asked.clear()
        launched.clear()
        for size in (1, 2, 3):
            launching.launch(kernel, (3, 1), (load,), (size,), options)
        assert (len(asked), len(launched)) == (by_triton, by_handle)
        assert launched == [(load, size, 8) for size in (2, 3)][:by_handle]
        assert asked[0] == ((3, 1), (load, 1), options)


# (ranks, instances of the hottest expert, late slots): most bytes of the stack, to which registers spill
@pytest.mark.parametrize(
    ("ranks", "instances", "late", "stack"), [(8, 4, 0, 0), (64, 8, 0, 0), (64, 30, 0, 0), (64, 8, 1, 256)]
)
@pytest.mark.parametrize("architecture", [80, 90])
def test_the_kernel_compiles_for_gpus(ranks, instances, late, stack, architecture, tmp_path):
    from balancing.experts.split.split_kernel import launch_options, split_tokens

    slots = np.full((ranks, 2), -1)
    slots[1:instances, 0] = 0
    placement = ReplicaPlacement(contiguous_homes(4 * ranks, ranks), slots).with_late(np.full((ranks, late), -1))
    types = dict.fromkeys(("load", "out", "tokens", "scratch"), "*i64") | {"tables": "*i32", "neighbors": "*i8"}
    assert _stack(split_tokens, types, launch_options(placement), architecture, tmp_path) <= stack


@pytest.mark.parametrize("architecture", [80, 90])
@pytest.mark.parametrize("probs", ["fp32", "bf16"])
def test_the_kernel_of_routes_compiles_for_gpus(probs, architecture, tmp_path):
    from balancing.experts.split.routes_kernel import ROUTE_OPTIONS, number_routes

    types = dict.fromkeys(("expert", "first", "last"), "*i64") | dict.fromkeys(("chosen", "served"), "*u8")
    types |= dict.fromkeys(("probs", "given"), f"*{probs}")
    assert _stack(number_routes, types, ROUTE_OPTIONS, architecture, tmp_path) == 0


def _stack(kernel: Any, types: dict[str, str], options: dict[str, Any], architecture: int, folder: Path) -> int:
    """Bytes of the stack of a kernel, compiled for a GPU that need not be there. types: of the pointers."""
    from triton import compile, knobs
    from triton.backends import backends
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    if "nvidia" not in backends:
        pytest.skip("this Triton does not compile for Nvidia's GPUs")
    sizes = {name: options[name] for name in kernel.arg_names if name in options}
    signature = {name: types.get(name, "i32") for name in kernel.arg_names} | dict.fromkeys(sizes, "constexpr")
    compiled = compile(
        ASTSource(kernel, signature, constexprs=sizes), target=GPUTarget("cuda", architecture, 32),
        options={name: value for name, value in options.items() if name not in sizes},
    )  # fmt: skip
    assert compiled.asm["cubin"]
    ptx = folder / "kernel.ptx"
    ptx.write_text(compiled.asm["ptx"])
    name = f"sm_{architecture}{'a' * (architecture >= 90)}"
    command = [knobs.nvidia.ptxas.path, "-v", f"--gpu-name={name}", ptx, "-o", folder / "kernel.cubin"]
    told = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    return max(map(int, re.findall(r"(\d+) bytes stack frame", told)))


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
