"""The kernels that merge partial results and add gradients on a GPU: interpreted by Triton, equal to the references;
and compiled.

What it does on a GPU is tested with the kernels of attention, where there is one.
"""

import subprocess
from typing import Any

import numpy as np
import pytest
import torch

from balancing.cluster import Cluster
from balancing.kernels import merging
from balancing.kernels.merging import add_rows, merge_rows
from balancing.sequences import AttentionShape, SequenceAttention, compile_rank, plan_sequences
from benchmarks.host.attention import Kernel
from benchmarks.host.counting import Counted, fake_ranks
from tests.support.command import run_python
from tests.support.patience import PATIENCE
from tests.support.sequence_plans import in_many_turns

pytest.importorskip("triton")


def test_the_kernels_merge_and_add_like_torch() -> None:
    """In a process of its own: Triton decides when it is imported whether kernels are interpreted."""
    code = "from tests.kernels.test_rows import compare, compare_sums; "
    code += "print(compare(), 'merges and', compare_sums(), 'sums agree')"
    done = run_python("-c", code, TRITON_INTERPRET="1")
    assert done.returncode == 0, done.stderr
    assert "8 merges and 42 sums agree" in done.stdout


def compare() -> int:
    """Merge with the kernel and with operations of torch, on the CPU, twice the same. How many merges there were."""
    from balancing.kernels.rows import merge_rows_fused

    draw = torch.Generator().manual_seed(0)
    merges = 0
    for rows in (slice(3, 40), torch.randperm(50, generator=draw)[:37].int()):
        for size, more_type in ((16, torch.float32), (24, torch.float32), (64, torch.bfloat16), (128, torch.bfloat16)):
            out, more = (torch.randn(tokens, 3, size, generator=draw) for tokens in (50, 37))
            logsumexp, more_logsumexp = (8 * torch.randn(3, tokens, generator=draw) for tokens in (50, 37))
            more = more.to(more_type)
            found, again, expected = ((out.clone(), logsumexp.clone()) for _ in range(3))
            merge_rows_fused(*found, more, more_logsumexp, rows)
            merge_rows_fused(*again, more, more_logsumexp, rows)
            merge_rows(*expected, more, more_logsumexp, rows)
            assert all(torch.equal(*pair) for pair in zip(found, again, strict=True))
            torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
            merges += 1
    return merges


def compare_sums() -> int:
    """Add with the kernel and with operations of torch, on the CPU: the same bits. How many sums there were."""
    from balancing.kernels.rows import add_rows_fused

    draw = torch.Generator().manual_seed(0)
    sums = 0
    for rows in (slice(3, 40), torch.randperm(50, generator=draw)[:37].int()):
        for terms in (None, torch.randperm(60, generator=draw)[:37].int()[None], _terms(draw)):
            given = 37 if terms is None else 60
            for sizes, kind in (((16,), torch.float32), ((128,), torch.bfloat16), ((24, 8), torch.bfloat16)):
                # As from a kernel that pads values, a part may lie in a wider tensor.
                parts = tuple(torch.randn(given, 3, size + 4, generator=draw).to(kind)[..., :size] for size in sizes)
                total = torch.randn(50, 3, sum(sizes), generator=draw)
                found, expected = total.clone(), total.clone()
                add_rows_fused(found, rows, parts, terms)
                add_rows(expected, rows, parts, terms)
                assert torch.equal(found, expected) and not torch.equal(found, total)
                sums += 1
                sent = torch.full((50, 3, sum(sizes)), torch.nan, dtype=torch.bfloat16)
                found, expected = sent.clone(), sent.clone()
                add_rows_fused(found, rows, parts, terms, stores=True)
                add_rows(expected, rows, parts, terms, stores=True)
                # Triton's interpreter cuts off what a device rounds.
                torch.testing.assert_close(found[rows], expected[rows], rtol=2**-7, atol=0)
                assert found.isnan().any((1, 2)).sum() == 13
                sums += 1
            total, part = torch.zeros(50, 3, 8, dtype=torch.float64), torch.ones(given, 3, 8)
            add_rows_fused(total, rows, (part,), terms)
            assert total.sum() == (37 if terms is None else (terms >= 0).sum()) * 24
            sums += 1
    return sums


def _terms(draw: torch.Generator) -> torch.Tensor:
    """int32 [3, 37], up to three of 60 tokens for each of 37 rows; every row has one."""
    terms = torch.randint(0, 60, (3, 37), generator=draw, dtype=torch.int32)
    terms[1, ::3] = terms[2, ::2] = -1
    return terms


def test_operations_of_torch_take_over_where_the_kernel_does_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here, without a device; on a device a kernel that merges wrongly is not used either."""
    monkeypatch.setattr(torch.Tensor, "cuda", lambda self: self)
    merging._fused.cache_clear()
    with pytest.warns(UserWarning, match="merged by operations of torch") as caught:
        assert merging.choose_merge(torch.device("cuda")) is merge_rows
    assert "\n" not in str(caught[0].message)
    merging._fused.cache_clear()
    assert merging.choose_merge(torch.device("cpu")) is merge_rows
    merging._fused_add.cache_clear()
    with pytest.warns(UserWarning, match="added by operations of torch"):
        assert merging.choose_add(torch.device("cuda")) is add_rows
    merging._fused_add.cache_clear()
    assert merging.choose_add(torch.device("cpu")) is add_rows


class _Gpu:
    """A GPU of Triton's driver, on which nothing runs."""

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 90, 32)


def test_nothing_is_compiled_after_the_first_micro_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine runs programs of random plans, and Triton says what it would compile for each launch."""
    from triton import knobs
    from triton.runtime import driver

    from balancing.kernels import rows

    asked: list[tuple[str, bool]] = []

    def compiled(*, key: Any, fn: Any, is_manual_warmup: bool, **rest: Any) -> bool:
        asked.append((f"{fn.name} {key}", is_manual_warmup))
        return True  # do not

    monkeypatch.setattr(knobs.runtime, "jit_cache_hook", compiled)
    monkeypatch.setattr(merging, "choose_merge", lambda device: rows.merge_rows_fused)
    monkeypatch.setattr(merging, "choose_add", lambda device: rows.add_rows_fused)
    kernels = rows.merge_kernel, rows.add_kernel
    monkeypatch.setattr(driver, "_active", _Gpu())
    try:
        draw = np.random.default_rng(0)
        for number in range(12):
            if number == 2:
                of_two = len(asked)
            lengths = draw.integers(1, 3000, draw.integers(1, 9)).tolist()
            for method in ("chunks", "zones", "ring"):
                _run_engine(lengths, method, int(draw.integers(4)))
    finally:
        rows._launched.clear()
        for kernel in kernels:
            kernel.device_caches.clear()
    launched, warm = ({key for key, manual in asked if manual is way} for way in (False, True))
    # Merges list rows or not; sums do, and have several terms or not: of queries, of keys with values, of received
    # gradients, of received sums of a ring, and what is sent: of keys with values, and of sums.
    assert len(warm) == 2 + 6 * 4
    assert launched <= warm
    first_launch = next(number for number, (_, manual) in enumerate(asked) if not manual)
    assert len(asked) > 200 and first_launch < 4
    assert max(number for number, (_, manual) in enumerate(asked) if manual) < of_two, "later than in two batches"


def _run_engine(lengths: list[int], method: str, rank: int) -> None:
    """Forward and backward pass of one rank of four, without messages, with a kernel that computes nothing. Keys come
    in as many turns as may be, so that all kinds of launches occur."""
    cluster = in_many_turns(Cluster.sheet("h200-8x400g").relabel(2, 2))
    shape = AttentionShape(64, 4, 2, 2, 64)
    plan = plan_sequences(lengths, cluster, shape=shape, method=method)
    program = compile_rank(plan, rank)
    tokens = int(plan.linear_tokens[rank])
    inputs = [torch.zeros(tokens, heads, 16, dtype=torch.bfloat16, requires_grad=True) for heads in (4, 2, 2)]
    with fake_ranks(rank, plan.ranks):
        out = SequenceAttention(plan, program=program, kernel=Kernel(Counted()))(*inputs)
        torch.autograd.grad(out, inputs, torch.zeros_like(out))


@pytest.mark.parametrize("listed", [False, True])
@pytest.mark.parametrize("architecture", [80, 90, 100])
def test_the_kernel_compiles_for_gpus_without_spills(
    architecture: int, listed: bool, capsys: pytest.CaptureFixture[str], record_property: object
) -> None:
    pytest.importorskip("triton")
    from balancing.kernels import rows

    merged = {"out": "*fp32", "logsumexp": "*fp32", "more_out": "*bf16", "more_logsumexp": "*fp32", "rows": "*i32"}
    added = {"total": "*fp32", "part": "*bf16", "more": "*bf16", "rows": "*i32", "which": "*i32"}
    kernels = {
        "merge": (rows.merge_kernel, merged, rows.merge_options(128)),
        "add": (
            rows.add_kernel,
            added,
            rows.add_options(192, 128) | {"SUMMED": listed, "STORES": listed},
        ),
    }
    for name, (kernel, pointers, options) in kernels.items():
        registers, spills = _compiled(kernel, pointers, options | {"LISTED": listed}, architecture)
        with capsys.disabled():
            print(f"\n{name} kernel, sm_{architecture}, rows {'listed' if listed else 'adjacent'}: ", end="")
            print(f"{registers} registers, {spills} bytes spilled")
        assert spills == 0 and registers <= 128


def _compiled(kernel: Any, pointers: dict[str, str], options: dict[str, Any], architecture: int) -> tuple[int, int]:
    """Registers of a thread and bytes of its stack. options: constants of the kernel and its warps."""
    from triton import compile
    from triton.backends import backends
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    if "nvidia" not in backends:
        pytest.skip("this Triton does not compile for Nvidia's GPUs")
    warps = options.pop("num_warps")
    types = {name: pointers.get(name, "constexpr" if name in options else "i32") for name in kernel.arg_names}
    source = ASTSource(kernel, types, constexprs=options)
    compiled = compile(source, target=GPUTarget("cuda", architecture, 32), options={"num_warps": warps})
    return resources(compiled.asm["cubin"])


def resources(cubin: bytes) -> tuple[int, int]:
    """Registers of a thread and bytes of its stack, by the tool that Triton brings."""
    import tempfile

    from triton.knobs import nvidia

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        dumped = subprocess.run(
            [nvidia.cuobjdump.path, "--dump-resource-usage", file.name],
            capture_output=True,
            text=True,
            check=True,
            timeout=PATIENCE,
        ).stdout
    (line,) = (line for line in dumped.splitlines() if "REG:" in line)
    fields = dict(part.split(":", 1) for part in line.split() if ":" in part)
    return int(fields["REG"]), int(fields["STACK"]) + int(fields["LOCAL"])
